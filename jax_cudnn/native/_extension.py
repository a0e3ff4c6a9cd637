# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ extension once and tells it where wheels keep NVIDIA's libraries."""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType

from jax_cudnn.errors import LibraryError

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
        module = importlib.import_module("jax_cudnn.native._ffi")
    except ImportError as error:
        raise LibraryError(
            f"jax_cudnn's C++ extension does not load: {error}. Install a wheel for "
            "this Python and platform, or build one with `pip install .`"
        ) from error
    module.set_library_directories(library_directories())
    return module
