# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts: router, permutation and layer. See docs/moe.md."""

from jax_cudnn import keywords as _keywords
from jax_cudnn.ops.products.moe.layer import layer
from jax_cudnn.ops.products.moe.permutation import (
    Permutation,
    permutation,
    permute,
    unpermute,
)
from jax_cudnn.ops.products.moe.routing import Auxiliary, Routing, router

__all__ = [
    "Auxiliary",
    "Permutation",
    "Routing",
    "layer",
    "permutation",
    "permute",
    "router",
    "unpermute",
]

_keywords.hint_on(globals(), __all__)
