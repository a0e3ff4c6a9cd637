# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of `jax_cudnn.adapters` give what they show."""

import doctest
import importlib
import sys

import pytest

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", ["equinox", "keras", "maxtext"])
def test_examples_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"jax_cudnn.adapters.{name}")
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted >= 3
    assert not found.failed


@pytest.mark.parametrize("name", ["equinox", "keras"])
def test_a_library_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"jax_cudnn.adapters.{name}", raising=False)
    told = rf"package {name} is not installed\. Run: pip install .*{name}"
    with pytest.raises(ImportError, match=told):
        importlib.import_module(f"jax_cudnn.adapters.{name}")
