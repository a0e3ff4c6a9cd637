# SPDX-License-Identifier: Apache-2.0
"""Runs programs that import the examples' modules, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_on_eight_devices(
    program: str, given: Sequence[str], folder: Path, *others: str
) -> str:
    """Run a program on eight CPU devices, warnings being errors; return what it prints.

    In ``sys.argv`` it finds ``given`` as JSON, the folder, and the others.
    """
    command = ("-W", "error", "-c", program, json.dumps(given), str(folder), *others)
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=on_devices(8),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_devices(count: int) -> dict[str, str]:
    """Return the environment of a program that has so many CPU devices."""
    return _with_examples(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(count))


def on_gpus(numbers: range) -> dict[str, str]:
    """Return the environment of a program that has these GPUs, and not all memory."""
    devices = ",".join(map(str, numbers))
    return _with_examples(
        CUDA_VISIBLE_DEVICES=devices, XLA_PYTHON_CLIENT_PREALLOCATE="false"
    )


def _with_examples(**changes: str) -> dict[str, str]:
    # An empty entry would be the source tree, where the tests run.
    paths = filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH")))
    return {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(paths)}
