# SPDX-License-Identifier: Apache-2.0
"""Tests that plan cache, store, handle pool and log are free of races, by TSan."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.stand_ins import compile_companions, compile_cudnn, obstacle

pytestmark = pytest.mark.once

_HERE = Path(__file__).parent
_FFI = _HERE.parents[1] / "ffi"
_SOURCES = (
    "base/bytes",
    "base/log",
    "cudnn/cuda_device",
    "cudnn/cudnn_library",
    "cudnn/handle_pool",
    "keeping/build_site",
    "keeping/plan_cache",
    "keeping/plan_file",
    "keeping/plan_store",
)


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++)")
def test_threads_share_plans_and_never_a_handle(tmp_path: Path) -> None:
    compile_cudnn(tmp_path)
    compile_companions(tmp_path, devices=2)
    program = tmp_path / "race"
    sources = [
        _HERE / "programs" / "race.cc",
        *(_FFI / f"{name}.cc" for name in _SOURCES),
    ]
    command = ["g++", "-std=c++17", "-g", "-O1", "-fsanitize=thread", f"-I{_FFI}"]
    command.append('-DJAX_CUDNN_BUILDER="test"')
    subprocess.run([*command, "-o", program, *sources, "-ldl"], check=True)
    done = subprocess.run(
        [program, tmp_path, tmp_path / "above" / "store"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
