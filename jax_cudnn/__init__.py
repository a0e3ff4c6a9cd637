# SPDX-License-Identifier: Apache-2.0
"""NVIDIA cuDNN's graph API under JAX's transformations."""

from jax_cudnn import native as _native
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError
from jax_cudnn.ops.sdpa import sdpa

__version__ = "0.1.0"

_native.register_targets()

__all__ = ["GraphError", "LibraryError", "UnsupportedError", "__version__", "sdpa"]
