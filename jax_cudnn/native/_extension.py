# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ extension once and tells it where wheels keep NVIDIA's libraries.

A source tree in which nothing is compiled takes the extension of an installed copy of
the package, if that was compiled from the same sources. So `pip install .` is enough to
run Python in the tree, too, where the tree comes before what is installed.
"""

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from jax_cudnn.errors import LibraryError, install_command

# Where NVIDIA's wheels put shared libraries, below a directory on sys.path. The full
# cuDNN comes before the small one, which has the runtime-compiled engines only.
_WHEEL_DIRECTORIES = (
    "nvidia/cudnn/lib",
    "nvidia/cudnn_jit/lib",
    "nvidia/cu13/lib",
    "nvidia/cublas/lib",
    "nvidia/cuda_nvrtc/lib",
    "nvidia/cuda_runtime/lib",
)


def library_directories() -> list[str]:
    """Return the existing directories of NVIDIA's wheels, in the order to search."""
    found: dict[str, None] = {}
    for entry in sys.path:
        if not (Path(entry) / "nvidia").is_dir():
            continue
        for name in _WHEEL_DIRECTORIES:
            directory = Path(entry) / name
            if directory.is_dir():
                found[str(directory)] = None
    return list(found)


@functools.cache
def extension() -> ModuleType:
    """Return the C++ extension; opens neither cuDNN nor CUDA."""
    try:
        module = _load()
    except ImportError as error:
        raise LibraryError(" ".join(_diagnosis(error))) from error
    module.set_library_directories(library_directories())
    return module


def extension_directory() -> Path:
    """Return the folder of the extension, which need not be that of this module."""
    return Path(str(extension().__file__)).parent


def extension_problem() -> tuple[str, str]:
    """Return why the extension does not load, and what to do; empty where it does."""
    try:
        _load()
    except ImportError as error:
        return _diagnosis(error)
    return "", ""


_MODULE = "jax_cudnn.native._ffi"
_FILES = "_ffi*.so"
_HERE = Path(__file__).resolve().parent
# Where the package `jax_cudnn` lies.
_ROOT = _HERE.parent.parent


def _load() -> ModuleType:
    """Import the extension: the package's own or, in a source tree, an installed one.

    Raises:
      ImportError: there is none, or it does not load.
    """
    try:
        return importlib.import_module(_MODULE)
    except ImportError:
        copies = _other_copies()
        if not copies or not _is_source() or _own_files():
            raise
    module = _of_copy(copies[0])
    sys.modules[_MODULE] = module
    return module


# --- a source tree with the extension of an installed copy ----------------------------


class _UnfitCopyError(ImportError):
    """The extension of an installed copy is not one for this source tree."""


def _is_source() -> bool:
    return (_ROOT / "pyproject.toml").is_file() and (_ROOT / "ffi").is_dir()


def _own_files() -> list[str]:
    return sorted(path.name for path in _HERE.glob(_FILES))


def _of_copy(copy: Path) -> ModuleType:
    """Return the extension of an installed copy, if it is what the tree would compile.

    The tree's Python is used with it, so that the versions need not be compared.
    """
    folder = copy / "jax_cudnn" / "native"
    spec = importlib.machinery.PathFinder.find_spec(_MODULE, [str(folder)])
    if spec is None or spec.loader is None:
        raise _UnfitCopyError(f"is not for {_python()}")
    table = Path("jax_cudnn", "graph", "node_kinds.json")  # compiled in
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        is_same_table = (copy / table).read_bytes() == (_ROOT / table).read_bytes()
    except (ImportError, OSError) as error:
        raise _UnfitCopyError(f"does not load: {error}") from error
    if module.build_info()["builder"] != _sources_digest() or not is_same_table:
        raise _UnfitCopyError("was compiled from other sources than the tree has")
    return module


def _sources_digest() -> str:
    """Return the digest of the tree's C++ sources, as CMakeLists.txt computes it."""
    sources = _ROOT / "ffi"
    paths = sorted(map(str, [*sources.glob("*/*.cc"), *sources.glob("*/*.h")]))
    digests = (hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths)
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


# --- where it does not load -----------------------------------------------------------


def _python() -> str:
    return f"Python {sys.version_info.major}.{sys.version_info.minor}"


def _diagnosis(error: ImportError) -> tuple[str, str]:
    """Return why the extension does not load, and what to do."""
    copies = _other_copies()[:1]
    if files := _own_files():
        what = (
            f"jax_cudnn's C++ extension does not load: {error} ({_python()}, found "
            f"{', '.join(files)} in {_HERE})."
        )
    elif _is_source():
        what = (
            f"jax_cudnn is imported from a source tree, {_ROOT}, in which its C++ "
            "extension is not compiled."
        )
        if isinstance(error, _UnfitCopyError):
            what += f" That of the jax_cudnn in {copies[0]} {error}."
    else:
        what = f"jax_cudnn's C++ extension is missing: no {_FILES} in {_HERE}."
    advice = [_advice_for_copy(copy) for copy in copies]
    if _is_source():
        advice.append(f"To use the tree itself, run {install_command()}.")
    else:
        command = install_command(options="--force-reinstall --no-deps")
        advice.append(f"Install it for {_python()} and this platform: {command}.")
    return what, " ".join(advice)


def _advice_for_copy(copy: Path) -> str:
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(entry and Path(entry).resolve() == _ROOT for entry in named):
        how = f"take {_ROOT} off PYTHONPATH"
    else:
        how = "run Python in another directory, or set PYTHONSAFEPATH=1"
    return f"A whole jax_cudnn is installed in {copy}: to import that, {how}."


def _other_copies() -> list[Path]:
    """Return where on sys.path there are copies of the package with an extension."""
    entries = dict.fromkeys(Path(entry).resolve() for entry in sys.path)
    return [
        entry
        for entry in entries
        if entry != _ROOT and any((entry / "jax_cudnn" / "native").glob(_FILES))
    ]
