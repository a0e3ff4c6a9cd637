# SPDX-License-Identifier: Apache-2.0
"""`scripts/venv.sh`, which installs what the tasks of the Makefile need."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

_SCRIPT = Path(__file__).parents[2] / "scripts" / "venv.sh"

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
