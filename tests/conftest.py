# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures of every test: strict promotion, the CPU, drawn operands."""

import functools
import gc
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import choices
from tests.attention.shared.oracle import SIZES, shape_of
from tests.common.gpuless import harness
from tests.common.without_rules import without_rules

__all__ = ["without_rules"]

# What the benchmarks define for tests, too, is found after all that is installed.
sys.path.append(str(Path(__file__).parents[1]))

# Tests, and the processes that they start, see no plans and choices of other runs.
os.environ["JAX_CUDNN_CACHE_DIR"] = "off"
# Keras reads it when it is imported, and would look for TensorFlow.
os.environ["KERAS_BACKEND"] = "jax"

# JAX keeps millions of objects: looking for garbage less often saves a fifteenth.
gc.set_threshold(200_000, 50, 100)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# For tests of programs for several devices (tests/common/devices.py); others use the
# first.
jax.config.update("jax_num_cpu_devices", 8)

# Examples are the same in every run. The first one of a shape compiles: no deadline.
hypothesis.settings.register_profile(
    "jax_cudnn", derandomize=True, deadline=None, database=None, max_examples=40
)
hypothesis.settings.register_profile(
    "sample", hypothesis.settings.get_profile("jax_cudnn"), max_examples=5
)
hypothesis.settings.load_profile("jax_cudnn")


# Folders whose tests start processes, of which each compiles for itself.
_ALONE = ("tools", "benchmarks")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --sample, with which `make test` ends in time."""
    parser.addoption(
        "--sample",
        metavar="K/N",
        help="of the cases of each test marked `sampled`, run the K-th of N random "
        "parts, the same part in every run, and at least one case; leave out tests "
        "marked `thorough`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples for a sample."""
    if config.getoption("--sample") is not None:
        hypothesis.settings.load_profile("sample")


# A file all of whose tests are marked `once`.
_ONCE = re.compile(r"^pytestmark = (?:\[[^]]*)?pytest\.mark\.once\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which `make test-newest` leaves out every test."""
    if config.option.markexpr != "not once" or collection_path.suffix != ".py":
        return None
    return bool(_ONCE.search(collection_path.read_text(encoding="utf-8"))) or None


# First, since pytest-xdist has a hook of this name that reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark the tests that need a GPU or the real cuDNN, and deal out a sample."""
    for item in items:
        if ring := _ring(item):
            item.add_marker(ring)
        elif item.path.parent.name not in _ALONE:
            # Tests of a file compile much the same: one process runs them all.
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    planned = [item for item in items if _ring(item) == "gpuless"]
    if planned and (reason := harness.missing()):
        for item in planned:
            item.add_marker(pytest.mark.skip(reason=f"gpuless: {reason}"))
    _leave_out(config, items)


def _ring(item: pytest.Item) -> str | None:
    """Return what a test needs, "gpu" or "gpuless": the name of its folder."""
    folder = item.path.parent.name
    return folder if folder in ("gpu", "gpuless") else None


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not in the sample."""
    if (sample := config.getoption("--sample")) is None:
        return
    part, parts = (int(number) for number in sample.split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--sample {sample}: it must be K/N with K from 1 to N")
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for cases in tests.values() for item in _kept(cases, part, parts)}
    config.hook.pytest_deselected(items=[each for each in items if each not in kept])
    items[:] = [each for each in items if each in kept]


def _kept(cases: list[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
    """Return the cases of a test that run: if it is sampled, those dealt to a part."""
    cases = [each for each in cases if each.get_closest_marker("thorough") is None]
    if not cases:
        return []
    if cases[0].get_closest_marker("sampled") is None:
        return cases
    dealt = [
        case for case in cases if zlib.crc32(_name(case).encode()) % parts + 1 == part
    ]
    return dealt or [cases[part % len(cases)]]


def _name(case: pytest.Item) -> str:
    """Return the file and the case, whatever folder the file is in."""
    return case.nodeid.rpartition("/")[2]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the GPU ring where there is no GPU."""
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("no CUDA device: jax.local_devices(backend='cuda') finds none")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Tell scripts/gpu_report.py which tests ended, and were not cut short."""
    if _ring(item) == "gpu":
        item.user_properties.append(("finished", "yes"))


@functools.cache
def _has_gpu() -> bool:
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return False


@pytest.fixture(autouse=True)
def _run_on_cpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Keep all tests but the GPU ring's on the CPU, also where there is a GPU.

    What they ask does not depend on how well XLA optimises for the CPU; with little
    optimisation it compiles twice as fast, and the tests compile most of the time.
    """
    is_gpu = request.node.get_closest_marker("gpu") is not None
    jax.config.update("jax_disable_most_optimizations", not is_gpu)
    if not is_gpu:
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # in its processes
    if is_gpu or not _has_gpu():
        yield
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


@pytest.fixture(autouse=True)
def _ask_for_plans(request: pytest.FixtureRequest) -> None:
    """Let tests of the real cuDNN ask whether there is a plan, not who is faster."""
    if _ring(request.node):
        request.getfixturevalue("without_rules")


@pytest.fixture(autouse=True)
def _put_choices_back() -> Iterator[None]:
    """Let no test change the measured choices that the next one finds."""
    table = choices.table()
    before, version = table.all(), table.version
    yield
    if table.version != version:
        table.clear()
        table.add(before)


@pytest.fixture
def table(_put_choices_back: None) -> choices.ChoiceTable:
    """Return the process's measured choices, emptied for this test."""
    choices.table().clear()
    return choices.table()


@pytest.fixture
def x64() -> Iterator[None]:
    """Let a test make f64 arrays."""
    with jax.enable_x64(True):
        yield


class Draw(Protocol):
    """Draws normal numbers of the shape that axis letters name ("1" for 1)."""

    def __call__(
        self, axes: str, dtype: jax.typing.DTypeLike = ..., **sizes: int
    ) -> jax.Array: ...


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Draw:
    """Return a function that draws operands, the same ones in every run of a test."""
    rng = np.random.default_rng(zlib.crc32(request.node.name.encode()))

    def normal(
        axes: str, dtype: jax.typing.DTypeLike = jnp.float32, **sizes: int
    ) -> jax.Array:
        shape = shape_of(axes, {**SIZES, **sizes})
        return jnp.asarray(np.asarray(rng.standard_normal(shape), dtype))

    return normal
