# SPDX-License-Identifier: Apache-2.0
"""Tests that a profiler sees each launch under the name of its operation."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.processes import run_python

pytestmark = pytest.mark.gpu

_PROGRAM = """
import jax
import jax.numpy as jnp
import jax_cudnn

x = jnp.ones((2, 65, 4, 64), jnp.bfloat16)
a = jnp.ones((64, 72), jnp.float16)

@jax.jit
def run(x, a):
    return (
        jax_cudnn.sdpa(x, x, x, implementation="cudnn"),
        jax_cudnn.matmul(a.T, a, activation="relu", implementation="cudnn"),
    )

jax.block_until_ready(run(x, a))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
def test_a_range_is_named_after_its_operation(tmp_path: Path) -> None:
    listener = tmp_path / "listener.so"
    source = Path(__file__).with_name("nvtx_listener.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", listener, source], check=True)
    ranges = tmp_path / "ranges"
    run_python(
        _PROGRAM,
        NVTX_INJECTION64_PATH=str(listener),
        NVTX_RANGES=str(ranges),
        # The memory is that of the process that runs the tests.
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    lines = [line for line in ranges.read_text().splitlines() if " jax_cudnn" in line]
    names = {line.split()[2] for line in lines if line.startswith("push")}
    assert {name.split("+")[0] for name in names} == {"sdpa", "matmul"}
    # Ranges of one thread do not overlap here: each ends before the next begins.
    assert [line.split()[0] for line in lines] == ["push", "pop"] * (len(lines) // 2)
