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
from jax_cudnn.ops.products.moe.states import LayerState, layer_state

__all__ = [
    "Auxiliary",
    "LayerState",
    "Permutation",
    "Routing",
    "layer",
    "layer_state",
    "permutation",
    "permute",
    "router",
    "unpermute",
]

_keywords.hint_on(globals(), __all__)
