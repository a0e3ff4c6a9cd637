# SPDX-License-Identifier: Apache-2.0
"""Do benchmarks and scripts import, and do the models of all kits compute the same?

Benchmarks run on a GPU, so nothing else here says that what they import is still there.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)

pytestmark = pytest.mark.once


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Last on the path, so that the package is the installed one.
    code = (
        "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, str(ROOT), *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize("name", _MODULES)
def test_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("flax", "optax", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    importlib.import_module(name)


@pytest.mark.thorough
def test_models_compute_the_same_by_each_kit(tmp_path: Path) -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    flags = ("--small", "--steps", "3", "--no-torch", "--out", str(tmp_path))
    done = _run("benchmarks.models", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    found = {(row["model"], row["what"], row["contender"]) for row in rows}
    assert len(found) == len(rows) == 26
    assert {contender for *_, contender in found} == {"plain JAX", "untuned"}
    page = (tmp_path / "models.md").read_text()
    assert all(f"| {model} |" in page for model, *_ in found)
