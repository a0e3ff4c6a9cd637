# SPDX-License-Identifier: Apache-2.0
"""What makes environments and builds there works on bare machines, or says what lacks.

`scripts/venv.sh` installs what the tasks of the Makefile need. `cmake/find_headers.py`
looks for what the extension is compiled with.
"""

import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "venv.sh"
_HEADERS = _ROOT / "cmake" / "find_headers.py"

# Says where uv would keep its downloads, and what it was asked to do.
_UV = """#!/bin/sh
case "$1" in
  cache) [ "$CACHE" ] && echo "$CACHE" ;;
  *) echo "$UV_CACHE_DIR: $*" ;;
esac
"""


def _venv(folder: Path, cache: Path | None) -> subprocess.CompletedProcess[str]:
    """Install `numpy` in an environment that is there, with a uv that only speaks."""
    uv = folder / "made" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(_UV)
    uv.chmod(0o755)
    (folder / "made" / ".made").touch()
    environment = {"PATH": os.environ["PATH"], "CACHE": str(cache or "")}
    command = ["bash", str(_SCRIPT), "made", "python3", "numpy"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )


def test_uv_keeps_its_cache_where_it_can_be_written(tmp_path: Path) -> None:
    done = _venv(tmp_path, tmp_path / "home" / "cache")
    asked = "pip install --quiet --python made/bin/python numpy"
    assert (done.stdout, done.stderr) == (f": {asked}\n", "")


@pytest.mark.parametrize("has_home", [True, False])
def test_uv_works_where_its_cache_cannot_be_written(
    tmp_path: Path, has_home: bool
) -> None:
    (tmp_path / "file").touch()
    done = _venv(tmp_path, tmp_path / "file" / "cache" if has_home else None)
    assert done.stdout.startswith(f"{tmp_path}/build/uv-cache:")
    assert done.stderr == (
        "== uv cannot write its cache; its downloads go to build/uv-cache\n"
    )


def test_the_build_says_which_package_has_python_s_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(_HEADERS), run_name="__main__")
    assert str(stopped.value) == (
        f"{tmp_path}/Python.h is missing, which this Python's extensions are compiled "
        "with. Install Python's headers: python3-dev on Debian and Ubuntu, "
        "python3-devel on Fedora."
    )


def test_the_build_says_which_wheel_has_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(_HEADERS), run_name="__main__")
    assert str(stopped.value) == (
        "include/cudnn_frontend.h is not on sys.path; install nvidia-cudnn-frontend"
    )
