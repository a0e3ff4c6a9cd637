# SPDX-License-Identifier: Apache-2.0
"""Tests that two processes of four devices train Llama as one process of eight does."""

import numpy as np
import pytest

from tests.common.example_processes import on_devices
from tests.llama.processes import PACKAGES, train

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("train_llama")]

_ARGUMENTS = (
    *("--size", "tiny", "--width", "32", "--heads", "4", "--key-heads", "2"),
    *("--hidden", "48", "--context", "16", "--batch", "8", "--steps", "6"),
    *("--layers", "2", "--mesh", "fsdp=4,sequence=2", "--packed"),
)


def test_two_processes_train_as_one_does(tmp_path):
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    halves = (on_devices(4),) * 2
    two, one, resumed = train(tmp_path, _ARGUMENTS, halves, on_devices(8), 8)
    for other in (two, resumed):
        for name in other:
            np.testing.assert_allclose(
                other[name], one[name], rtol=2e-4, atol=2e-6, err_msg=name
            )
    assert len([*(tmp_path / "w").glob("*.safetensors")]) == 3
