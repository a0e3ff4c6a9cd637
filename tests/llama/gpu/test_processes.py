# SPDX-License-Identifier: Apache-2.0
"""Tests that two processes with half of the GPUs each train Llama as one does."""

import jax
import numpy as np
import pytest

from tests.common.example_processes import on_gpus
from tests.llama.processes import PACKAGES, train

_ARGUMENTS = (
    *("--size", "tiny", "--width", "256", "--heads", "4", "--key-heads", "2"),
    *("--hidden", "512", "--context", "256", "--batch", "8", "--steps", "6"),
    *("--layers", "2", "--packed", "--dtype", "bfloat16"),
)


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp and sequence"])
def test_two_processes_train_as_one_does(mesh, tmp_path):
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    count = jax.device_count() // 2 * 2
    if count < (4 if "sequence" in mesh else 2):
        pytest.skip(f"{jax.device_count()} GPUs are too few")
    divided = f"fsdp={count // 2},sequence=2" if "sequence" in mesh else f"fsdp={count}"
    arguments = (*_ARGUMENTS, "--mesh", divided)
    first, second, both = map(
        on_gpus, (range(count // 2), range(count // 2, count), range(count))
    )
    two, one, resumed = train(tmp_path, arguments, (first, second), both, count)
    for other in (two, resumed):
        np.testing.assert_allclose(other["losses"], one["losses"], rtol=2e-3)
        for name in other:
            want = np.asarray(one[name], float)
            error = np.linalg.norm(np.asarray(other[name], float) - want)
            assert error <= 1e-2 * np.linalg.norm(want), name
