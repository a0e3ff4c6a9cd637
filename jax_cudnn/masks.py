# SPDX-License-Identifier: Apache-2.0
"""Masks for `jax_cudnn.sdpa`: which keys a query may see, as data that combines."""

from jax_cudnn import keywords as _keywords
from jax_cudnn.ops.attention.visibility.masks import (
    Additive,
    Alignment,
    Blocks,
    Causal,
    Intersection,
    Lengths,
    Mask,
    Prefix,
    Segments,
    Where,
    Window,
)
from jax_cudnn.ops.attention.visibility.packing import Packed

__all__ = [
    "Additive",
    "Alignment",
    "Blocks",
    "Causal",
    "Intersection",
    "Lengths",
    "Mask",
    "Packed",
    "Prefix",
    "Segments",
    "Where",
    "Window",
]

_keywords.hint_on(globals(), __all__)
