# SPDX-License-Identifier: Apache-2.0
"""What do importing and the doctor say if the package or JAX is incomplete?

Each test runs a copy of the package, found by Python's import, in its own process.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jax_cudnn

pytestmark = pytest.mark.once

_PACKAGE = Path(jax_cudnn.__file__).parent
_COMMAND = ("-m", "jax_cudnn", "doctor")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a source tree as it comes from git: nothing in it is compiled."""
    root = tmp_path / "tree"
    _copy(root)
    (root / "ffi").mkdir()
    (root / "pyproject.toml").touch()
    return root


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a directory of installed packages with a whole jax_cudnn in it."""
    root = tmp_path / "site"
    _copy(root)
    for file in (_PACKAGE / "native").glob("_ffi*.so"):
        (root / "jax_cudnn" / "native" / file.name).symlink_to(file)
    return root


def _copy(root: Path) -> None:
    ignored = shutil.ignore_patterns("*.so")
    shutil.copytree(_PACKAGE, root / "jax_cudnn", ignore=ignored)


def _python(
    *arguments: str, cwd: Path, path: tuple[Path, ...] = (), **environment: str
) -> tuple[int, str, str]:
    """Run Python; return its status, what it wrote, and the last line of errors."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={
            **{k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"},
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "JAX_PLATFORMS": "cpu",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    errors = result.stderr.strip().splitlines()
    return result.returncode, result.stdout, errors[-1] if errors else ""


def _told(**where: Any) -> dict[str, dict[str, str]]:
    """Return the errors that the doctor finds, by name."""
    status, data, errors = _python(*_COMMAND, "--json", **where)
    assert (status, errors) == (1, "")
    found = json.loads(data)["findings"]
    return {each["name"]: each for each in found if each["severity"] == "error"}


def test_a_source_tree_names_itself_and_the_copy_that_is_installed(
    tree: Path, site: Path
) -> None:
    what = (
        f"jax_cudnn is imported from a source tree, {tree}, in which its C++ extension "
        "is not compiled."
    )
    copy = f"A whole jax_cudnn is installed in {site}: to import that, "
    elsewhere = "run Python in another directory, or set PYTHONSAFEPATH=1."
    build = "To use the tree itself, run `make build` in it."
    program = ("-c", "import jax_cudnn; print(jax_cudnn.__file__)")
    status, _, error = _python(*program, cwd=tree, path=(site,))
    assert status == 1
    assert error == f"ImportError: {what} {copy}{elsewhere} {build}"
    _, _, error = _python(*program, cwd=site.parent, path=(tree, site))
    assert f"{copy}take {tree} off PYTHONPATH. {build}" in error
    # The advice helps.
    status, found, error = _python(*program, cwd=tree, path=(site,), PYTHONSAFEPATH="1")
    assert (status, error) == (0, "")
    assert found.strip() == str(site / "jax_cudnn" / "__init__.py")

    told = _told(cwd=tree, path=(site,))
    assert set(told) == {"no-extension"}
    assert told["no-extension"]["what"] == what
    assert told["no-extension"]["fix"] == f"{copy}{elsewhere} {build}"


def test_other_commands_say_why_they_do_not_run(tree: Path) -> None:
    status, text, error = _python(*_COMMAND[:-1], "explain", "math:sin", cwd=tree)
    assert (status, text) == (1, "")
    assert error == "`python -m jax_cudnn doctor` looks for what is wrong."


def test_an_extension_that_does_not_load_is_told(site: Path) -> None:
    (file,) = (site / "jax_cudnn" / "native").glob("_ffi*.so")
    file.unlink()
    file.write_bytes(b"no library")
    _, _, error = _python("-c", "import jax_cudnn", cwd=site)
    assert "ImportError: jax_cudnn's C++ extension does not load: " in error
    assert f"found {file.name} in {file.parent}" in error
    file.unlink()
    _, _, error = _python("-c", "import jax_cudnn", cwd=site)
    assert "ImportError: jax_cudnn's C++ extension is missing: no _ffi*.so" in error
    assert "Install it for Python 3." in error


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("RuntimeError('jaxlib version 0.1 is newer than jax')", "jax-import"),
        ("ImportError('libstdc++.so.6: version GLIBCXX_9 not found')", "jax-import"),
    ],
)
def test_the_doctor_answers_where_jax_cannot_be_imported(
    site: Path, tmp_path: Path, error: str, name: str
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "jax.py").write_text(f"raise {error}")
    told = _told(cwd=site, path=(broken,))
    assert set(told) == {name}
    assert error.split("'")[1] in told[name]["what"]


def test_the_doctor_answers_where_jax_is_not_installed(site: Path) -> None:
    # -S leaves out site-packages, where JAX is.
    status, text, errors = _python("-S", *_COMMAND, cwd=site)
    assert (status, errors) == (1, "")
    assert "error: JAX is not installed for this Python." in text


def test_a_program_that_imports_a_broken_package_fails(
    tree: Path, tmp_path: Path
) -> None:
    # Run as `python -m`, too, whose sys.argv looks like the doctor's.
    package = tmp_path / "user"
    package.mkdir()
    (package / "__init__.py").write_text("import jax_cudnn")
    (package / "__main__.py").touch()
    status, _, error = _python("-m", "user", cwd=tmp_path, path=(tree,))
    assert status == 1
    assert "ImportError: jax_cudnn is imported from a source tree" in error
