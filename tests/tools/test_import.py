# SPDX-License-Identifier: Apache-2.0
"""Tests that importing the package is quick and changes neither JAX nor environment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_cudnn

pytestmark = pytest.mark.once

# What `import jax_cudnn` may import of other distributions, once JAX is imported.
_NEEDED = {"jax", "jaxlib", "platformdirs"}


def _run(program: str, **env: str) -> str:
    """Run a program in a new interpreter on the CPU, warnings as errors."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_brings_no_library_that_a_call_may_never_need() -> None:
    """What makes an import slow is what it imports: Flax, torch, matplotlib."""
    program = """
import sys, jax
before = set(sys.modules)
import jax_cudnn
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(names - set(sys.stdlib_module_names)))
"""
    assert set(_run(program).split()) - {"jax_cudnn"} <= _NEEDED


def test_import_starts_no_backend() -> None:
    # JAX refuses this option once a backend has started, as the last lines show.
    program = """
import jax, jax_cudnn
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
try:
    jax.config.update("jax_num_cpu_devices", 2)
except RuntimeError:
    print("refused")
"""
    assert _run(program).split() == ["3", "refused"]


def test_import_opens_neither_cuda_nor_cudnn() -> None:
    program = """
import jax_cudnn
with open("/proc/self/maps") as maps:
    files = {line.split()[-1].rpartition("/")[2] for line in maps}
print(*(name for name in files if name.startswith(("libcu", "libnv"))))
"""
    assert _run(program) == ""


def test_import_changes_neither_environment_nor_config() -> None:
    program = """
import os, jax
environment, config = dict(os.environ), dict(jax.config.values)
import jax_cudnn
assert dict(os.environ) == environment
assert dict(jax.config.values) == config
print("same")
"""
    assert _run(program) == "same"


def test_flax_is_there_and_is_imported_when_it_is_asked_for() -> None:
    program = """
import sys, jax_cudnn
assert "flax" in dir(jax_cudnn)
assert "flax" not in sys.modules
from jax_cudnn import *
assert "flax" not in sys.modules
assert jax_cudnn.flax.attention_fn and jax_cudnn.flax.nnx.Linear
import jax_cudnn.flax as again
assert jax_cudnn.flax is again
try:
    jax_cudnn.flux
except AttributeError as error:
    print(error)
"""
    assert _run(program) == "module 'jax_cudnn' has no attribute 'flux'"


def test_flax_that_is_not_installed_says_what_to_run() -> None:
    program = """
import sys
sys.modules["flax"] = None
import jax_cudnn
for ask in (lambda: jax_cudnn.flax, lambda: __import__("jax_cudnn.flax")):
    try:
        ask()
    except ImportError as error:
        print(error)
print("flax" in dir(jax_cudnn))
"""
    told = (
        "jax_cudnn.flax: the package flax is not installed. It is an optional "
        'dependency of jax_cudnn. Run: pip install ".[flax]" (in jax_cudnn\'s source '
        "folder)"
    )
    # Tools that go through all attributes meet no error.
    assert _run(program).splitlines() == [told, told, "False"]


def test_import_brings_no_optional_dependency() -> None:
    program = """
import sys, jax_cudnn
print(*{"flax", "optax", "jaxtyping"}.intersection(sys.modules))
"""
    assert _run(program) == ""


def test_the_version_is_the_one_that_was_installed() -> None:
    program = """
import importlib.metadata, jax_cudnn
assert importlib.metadata.version("jax-cudnn") == jax_cudnn.__version__
print("same")
"""
    assert _run(program) == "same"


def test_the_citation_names_the_version() -> None:
    citation = Path(__file__).parents[2] / "CITATION.cff"
    (version,) = re.findall(r"^version: (.*)$", citation.read_text(), re.MULTILINE)
    assert version == jax_cudnn.__version__


def test_public_names_are_what_all_lists() -> None:
    program = """
import jax_cudnn
assert all(hasattr(jax_cudnn, name) for name in jax_cudnn.__all__)
assert jax_cudnn.__all__ == sorted(jax_cudnn.__all__), jax_cudnn.__all__
print(jax_cudnn.sdpa.__module__)
"""
    assert _run(program) == "jax_cudnn.ops.attention.sdpa"
