# SPDX-License-Identifier: Apache-2.0
"""Tests importing and the doctor where the package or JAX is incomplete.

Each test runs a copy of the package, found by Python's import, in its own process.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.offline import worker

pytestmark = pytest.mark.once

_PACKAGE = Path(jax_cudnn.__file__).parent
_SOURCES = Path(__file__).parents[2]
_COMMAND = ("-m", "jax_cudnn", "doctor")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a source tree as it comes from git: nothing in it is compiled."""
    root = tmp_path / "tree"
    _copy(root)
    shutil.copytree(_SOURCES / "ffi", root / "ffi")
    (root / "pyproject.toml").touch()
    return root


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a directory of installed packages with a whole jax_cudnn in it."""
    root = tmp_path / "site"
    _copy(root)
    for file in compiled():
        (root / "jax_cudnn" / file.parent.name / file.name).symlink_to(file)
    return root


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """Return a directory with all installed packages but jax_cudnn, for Python's -S."""
    root = tmp_path / "others"
    root.mkdir()
    for name in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(name)).iterdir():
            link = root / entry.name
            if "jax_cudnn" not in entry.name and not link.exists():
                link.symlink_to(entry)
    return root


def compiled() -> list[Path]:
    """Return what CMake installs: the extension and the stand-in for the driver."""
    stand_in = native.extension_directory().parent / "offline" / worker.STAND_IN
    return [*native.extension_directory().glob("_ffi*.so"), stand_in]


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


_IMPORT = ("-c", "import jax_cudnn; print(jax_cudnn.__file__)")
_ELSEWHERE = "run Python in another directory, or set PYTHONSAFEPATH=1."
_BUILD = "To use the tree itself, run pip install . (in jax_cudnn's source folder)."


def _not_compiled(tree: Path) -> str:
    return (
        f"jax_cudnn is imported from a source tree, {tree}, in which its C++ extension "
        "is not compiled."
    )


def test_a_source_tree_that_is_not_installed_says_what_to_run(
    tree: Path, others: Path
) -> None:
    status, _, error = _python("-S", *_IMPORT, cwd=tree, path=(others,))
    assert status == 1
    assert error == f"ImportError: {_not_compiled(tree)} {_BUILD}"


def test_a_source_tree_takes_the_extension_that_was_compiled_from_it(
    tree: Path, site: Path
) -> None:
    program = """
import jax_cudnn, jax, jax.numpy as jnp
from jax_cudnn import native
from jax_cudnn.offline import worker
from jax_cudnn.native import _ffi
x = jnp.ones((3, 5))
print(jax.jit(jax_cudnn.matmul)(x, x.T).shape)
print(jax_cudnn.__file__, _ffi.__file__, worker.stand_in(), sep="\\n")
"""
    (extension, stand_in) = compiled()
    status, told, error = _python("-c", program, cwd=tree, path=(site,))
    assert (status, error) == (0, "")
    assert told.splitlines() == [
        "(3, 3)",
        str(tree / "jax_cudnn" / "__init__.py"),
        str(site / "jax_cudnn" / "native" / extension.name),
        str(site / "jax_cudnn" / "offline" / stand_in.name),
    ]
    assert _python(*_COMMAND, cwd=tree, path=(site,))[0] == 0
    # The tree may be named, too, from anywhere.
    assert _python(*_IMPORT, cwd=site.parent, path=(tree, site))[0] == 0


@pytest.mark.parametrize(
    "changed", ["ffi/base/log.cc", "jax_cudnn/graph/node_kinds.json"]
)
def test_a_source_tree_refuses_an_extension_of_other_sources(
    tree: Path, site: Path, changed: str
) -> None:
    with (tree / changed).open("a") as file:
        file.write("\n")
    what = (
        f"{_not_compiled(tree)} That of the jax_cudnn in {site} was compiled from "
        "other sources than the tree has."
    )
    copy = f"A whole jax_cudnn is installed in {site}: to import that, "
    status, _, error = _python(*_IMPORT, cwd=tree, path=(site,))
    assert status == 1
    assert error == f"ImportError: {what} {copy}{_ELSEWHERE} {_BUILD}"
    _, _, error = _python(*_IMPORT, cwd=site.parent, path=(tree, site))
    assert f"{copy}take {tree} off PYTHONPATH. {_BUILD}" in error
    # The advice helps.
    status, found, error = _python(*_IMPORT, cwd=tree, path=(site,), PYTHONSAFEPATH="1")
    assert (status, error) == (0, "")
    assert found.strip() == str(site / "jax_cudnn" / "__init__.py")

    told = _told(cwd=tree, path=(site,))
    assert set(told) == {"no-extension"}
    assert told["no-extension"]["what"] == what
    assert told["no-extension"]["fix"] == f"{copy}{_ELSEWHERE} {_BUILD}"


def test_a_source_tree_says_why_an_extension_is_not_for_it(
    tree: Path, site: Path
) -> None:
    (file, _) = compiled()
    link = site / "jax_cudnn" / "native" / file.name
    link.unlink()
    link.write_bytes(b"no library")
    _, _, error = _python(*_IMPORT, cwd=tree, path=(site,))
    assert f"That of the jax_cudnn in {site} does not load: {link}: " in error
    link.rename(link.with_name("_ffi.cpython-37m-x86_64-linux-gnu.so"))
    _, _, error = _python(*_IMPORT, cwd=tree, path=(site,))
    assert f"That of the jax_cudnn in {site} is not for Python 3." in error


def test_other_commands_say_why_they_do_not_run(tree: Path, others: Path) -> None:
    command = ("-S", *_COMMAND[:-1], "explain", "math:sin")
    status, text, error = _python(*command, cwd=tree, path=(others,))
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
    tree: Path, others: Path, tmp_path: Path
) -> None:
    # Run as `python -m`, too, whose sys.argv looks like the doctor's.
    package = tmp_path / "user"
    package.mkdir()
    (package / "__init__.py").write_text("import jax_cudnn")
    (package / "__main__.py").touch()
    path = (tree, others)
    status, _, error = _python("-S", "-m", "user", cwd=tmp_path, path=path)
    assert status == 1
    assert "ImportError: jax_cudnn is imported from a source tree" in error
