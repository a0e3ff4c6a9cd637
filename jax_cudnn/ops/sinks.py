# SPDX-License-Identifier: Apache-2.0
"""What does attention become when each head has a sink, a key without a value?"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.arguments import as_operand, check_dtype, describe


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
    output: jax.Array, lse: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return output (..., s, h, e) and log-sum-exp (..., s, h) with the sinks (h,).

    A sink takes its share of the softmax and adds nothing to the output. So what the
    keys have is scaled by their share, 1 / (1 + exp(sink - lse)).
    """
    sinks = jnp.expand_dims(sinks.astype(lse.dtype), tuple(range(lse.ndim - 1)))
    # A query that sees no key has the sink alone, whatever that is.
    is_dead = lse == -jnp.inf
    finite = jnp.where(is_dead, 0, lse)
    share = jnp.where(is_dead, 0, jax.nn.sigmoid(finite - sinks))
    scaled = output.astype(lse.dtype) * share[..., None]
    both = jnp.where(is_dead, sinks, jnp.logaddexp(finite, sinks))
    return scaled.astype(output.dtype), both
