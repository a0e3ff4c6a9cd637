# SPDX-License-Identifier: Apache-2.0
"""What makes environments and builds there works on bare machines, or says what lacks.

`scripts/setup/venv.sh` installs what the tasks of the Makefile need.
`cmake/find_headers.py` looks for what the extension is compiled with.
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
_SCRIPT = _ROOT / "scripts" / "setup" / "venv.sh"
_HEADERS = _ROOT / "cmake" / "find_headers.py"

# An interpreter that makes empty environments.
_PYTHON = """#!/bin/sh
[ "$2" = venv ] && mkdir -p "$3/bin" && touch "$3/pyvenv.cfg"
"""

# Says where uv would keep its downloads, and what it was asked to do.
_UV = """#!/bin/sh
case "$1" in
  cache) [ "$CACHE" ] && echo "$CACHE" ;;
  *) echo "$UV_CACHE_DIR: $*" ;;
esac
"""


def _run(folder: Path, *command: str, **environment: str) -> tuple[int, str, str]:
    """Return the status of venv.sh, and what it prints."""
    environment["PATH"] = os.environ["PATH"]
    done = subprocess.run(
        ["bash", str(_SCRIPT), *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def _program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def _uv(folder: Path, cache: Path | None) -> tuple[int, str, str]:
    """Install `numpy` in an environment that is there, with a uv that only speaks."""
    _program(folder / "made" / "bin" / "uv", _UV)
    (folder / "made" / ".made").touch()
    return _run(folder, "made", "python3", "numpy", CACHE=str(cache or ""))


def test_uv_keeps_its_cache_where_it_can_be_written(tmp_path: Path) -> None:
    asked = "pip install --quiet --python made/bin/python numpy"
    assert _uv(tmp_path, tmp_path / "home" / "cache") == (0, f": {asked}\n", "")


@pytest.mark.parametrize("has_home", [True, False])
def test_uv_works_where_its_cache_cannot_be_written(
    tmp_path: Path, has_home: bool
) -> None:
    (tmp_path / "file").touch()
    status, said, told = _uv(tmp_path, tmp_path / "file/cache" if has_home else None)
    assert status == 0
    assert said.startswith(f"{tmp_path}/build/uv-cache: pip install")
    assert told == "== uv cannot write its cache; its downloads go to build/uv-cache\n"


def test_an_environment_of_the_user_s_is_kept(tmp_path: Path) -> None:
    theirs = tmp_path / ".venv" / "pyvenv.cfg"
    theirs.parent.mkdir()
    theirs.touch()
    python = _program(tmp_path / "python", _PYTHON)
    assert _run(tmp_path, ".venv", python) == (
        1,
        "",
        "venv.sh: .venv is there, and make did not make it. make needs the folder for "
        "an environment of its own: move or delete yours.\n",
    )
    assert theirs.exists()


def test_an_environment_that_was_half_made_is_made_again(tmp_path: Path) -> None:
    failing = _program(tmp_path / "failing", '[ "$1" = --version ]')
    python = _program(tmp_path / "python", _PYTHON)
    left = tmp_path / ".venv" / "half"
    assert _run(tmp_path, ".venv", failing)[0] == 1
    left.touch()
    assert _run(tmp_path, ".venv", python)[0] == 0
    assert not left.exists()
    left.touch()
    assert _run(tmp_path, ".venv", python)[0] == 0
    assert left.exists(), "made once"


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
