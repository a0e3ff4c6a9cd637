# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of `jax_cudnn.adapters` give what they show."""

import doctest
import importlib

import pytest

pytestmark = pytest.mark.once


@pytest.mark.parametrize("name", ["equinox", "keras", "maxtext"])
def test_examples_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"jax_cudnn.adapters.{name}")
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted >= 3
    assert not found.failed
