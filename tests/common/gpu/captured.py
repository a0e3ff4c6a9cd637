# SPDX-License-Identifier: Apache-2.0
"""Runs a program in a process of its own, and tells what XLA put in command buffers."""

import os
import subprocess
import sys
from pathlib import Path


def run_dumped(program: str, folder: Path, **environment: str) -> str:
    """Return what a program prints; it captures all it can, and XLA dumps it."""
    flags = (
        f"--xla_dump_to={folder} --xla_dump_hlo_as_text "
        "--xla_gpu_graph_min_graph_size=1"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "XLA_FLAGS": flags, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def custom_calls(folder: Path, module: str = "") -> tuple[list[str], list[str]]:
    """Return the calls inside of command buffers, and those outside, of a dump.

    ``module`` is in the names of the programs that are meant.
    """
    dumps = folder.rglob("*thunk_sequence_after_thunk_passes.txt")
    meant = [path for path in dumps if module in path.name]
    lines = [line for path in meant for line in path.read_text().splitlines()]
    calls = [line for line in lines if "kCustomCall" in line]
    # What a command buffer holds is indented below its line.
    inside = [line for line in calls if line.startswith(" ")]
    return inside, [line for line in calls if not line.startswith(" ")]
