# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ extension once and tells it where wheels keep NVIDIA's libraries."""

import functools
import importlib
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
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        raise LibraryError(" ".join(_diagnosis(error))) from error
    module.set_library_directories(library_directories())
    return module


def extension_problem() -> tuple[str, str]:
    """Return why the extension does not load, and what to do; empty where it does."""
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        return _diagnosis(error)
    return "", ""


# --- where it does not load -----------------------------------------------------------

_MODULE = "jax_cudnn.native._ffi"
_FILES = "_ffi*.so"
_HERE = Path(__file__).resolve().parent
# Where the package `jax_cudnn` lies.
_ROOT = _HERE.parent.parent


def _diagnosis(error: ImportError) -> tuple[str, str]:
    """Return why the extension does not load, and what to do."""
    is_source = (_ROOT / "pyproject.toml").is_file() and (_ROOT / "ffi").is_dir()
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if files := sorted(path.name for path in _HERE.glob(_FILES)):
        what = (
            f"jax_cudnn's C++ extension does not load: {error} ({python}, found "
            f"{', '.join(files)} in {_HERE})."
        )
    elif is_source:
        what = (
            f"jax_cudnn is imported from a source tree, {_ROOT}, in which its C++ "
            "extension is not compiled."
        )
    else:
        what = f"jax_cudnn's C++ extension is missing: no {_FILES} in {_HERE}."
    advice = [_advice_for_copy(copy) for copy in _other_copies()[:1]]
    if is_source:
        advice.append("To use the tree itself, run `make build` in it.")
    else:
        command = install_command(options="--force-reinstall --no-deps")
        advice.append(f"Install it for {python} and this platform: {command}.")
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
