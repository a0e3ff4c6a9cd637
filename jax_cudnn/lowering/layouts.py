# SPDX-License-Identifier: Apache-2.0
"""Defines a primitive that fixes in which order XLA stores an array on a GPU.

XLA chooses the layout of each array that lies between kernels, by the kernels that read
it. An array of which a kernel reads a transposed copy may so be stored transposed, and
with it all that leads to it: norms, activations, what is saved of a loop's turns.

XLA's partitioner gathers such an array on each device in JAX 0.10, and divides it from
0.11 on. Where it would be gathered, its order stays XLA's choice.
"""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from jax_cudnn.lowering import _jax

row_order_p = _jax.Primitive("cudnn_row_order")
row_order_p.multiple_results = True

# The name of XLA's call, for exports.
LAYOUT_TARGET = "LayoutConstraint"

_IS_DIVIDED = jax.__version_info__ >= (0, 11)


def in_row_order(x: jax.Array) -> jax.Array:
    """Return an array that XLA stores with its last axis contiguous, on a GPU."""
    (stored,) = row_order_p.bind(x)
    return stored


def _on_gpu(x: jax.Array) -> list[jax.Array]:
    return [with_layout_constraint(x, Layout(tuple(range(x.ndim))))]


def _lower_on_gpu(ctx: Any, x: Any) -> Any:
    is_kept = _IS_DIVIDED or _jax.partitioned_region(ctx) is None
    return _jax.lower_function(_on_gpu if is_kept else lambda x: [x])(ctx, x)


row_order_p.def_impl(lambda x: [x])
row_order_p.def_abstract_eval(lambda x: [x])
_jax.set_batching(row_order_p, lambda args, axes: (row_order_p.bind(*args), axes))
_jax.set_jvp(
    row_order_p, lambda primals, tangents: (row_order_p.bind(*primals), tangents)
)
_jax.set_lowering(row_order_p, _jax.lower_function(lambda x: [x]))
_jax.set_lowering(row_order_p, _lower_on_gpu, platform="cuda")
