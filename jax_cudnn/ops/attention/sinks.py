# SPDX-License-Identifier: Apache-2.0
"""Adds a sink, a key without a value, to each head of attention.

The sink takes its share of the softmax, so the output of the keys is scaled by theirs.
With L the log-sum-exp of keys and sink, O the output, dL and dO their cotangents, the
gradient of a sink is the sum over rows of exp(sink - L) (dL - rowsum(O dO)).

Attention's node has them as an operand. These functions are for attention without such
a node: over a cache, and over several devices.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.layouts import Layout, rows_to
from jax_cudnn.ops.common.arguments import as_operand, check_dtype, describe
from jax_cudnn.reference.attention.softmax import (
    output_products,
    share_and_sum,
    share_of_sinks,
)


def check_sinks(op: str, sinks: ArrayLike | None, heads: int) -> jax.Array | None:
    """Return the sinks of the query heads as an array, or None for none."""
    if sinks is None:
        return None
    array = as_operand(op, "sinks", sinks)
    check_dtype(op, "sinks", array, advice="Convert them to f32.")
    if array.shape != (heads,):
        raise ValueError(
            f"{op}: sinks is {describe(array)}. It must have one number per query "
            f"head, shape [{heads}]."
        )
    return array


def with_sinks(
    output: jax.Array, lse: jax.Array, sinks: jax.Array, layout: Layout = "bshd"
) -> tuple[jax.Array, jax.Array]:
    """Return the output in its layout and log-sum-exp (..., s, h) with the sinks.

    The sinks are (h,), or one for each row, which broadcast to the log-sum-exp.
    """
    share, both = share_and_sum(lse, _like_rows(sinks, lse))
    scaled = output.astype(lse.dtype) * rows_to(layout, share)[..., None]
    return scaled.astype(output.dtype), both


def _like_rows(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """Return sinks with the axes and the dtype of the log-sum-exp."""
    return jnp.expand_dims(sinks.astype(lse.dtype), tuple(range(lse.ndim - sinks.ndim)))


def sink_slopes(
    sinks: jax.Array,
    *,
    output: jax.Array,
    lse: jax.Array,
    grad_output: jax.Array,
    grad_lse: jax.Array | None,
) -> jax.Array:
    """Return the gradient of each row's sink, as the log-sum-exp (b, s, h).

    The sinks are (h,), or broadcast to this. Output and log-sum-exp are with them.
    """
    wide = _like_rows(sinks, lse)
    rows = (lse[..., None], jnp.broadcast_to(wide, lse.shape)[..., None])
    slope = -output_products(output, grad_output, *rows)[..., 0]
    if grad_lse is not None:
        slope = slope + grad_lse
    return share_of_sinks(wide, lse) * slope
