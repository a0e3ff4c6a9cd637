# SPDX-License-Identifier: Apache-2.0
"""Computes Flax's dropout that all batch entries and heads share, with `sdpa`.

Dropout acts after the softmax: what is dropped still counts in the sum by which the
weights are divided. A mask acts before it. With the mask of the weights that are kept,
attention divides by a smaller sum, and the two log-sum-exps tell how much smaller:

    dropout(softmax(S)) V = softmax(S where kept) V * exp(L_kept - L_all) / (1 - rate)

So two calls of `sdpa` do it, the second for its log-sum-exp alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.ops.attention.visibility.masks import Mask, Where

# The fewest columns of values that need no padding.
_COLUMNS = 8


def drop_alike(
    attention: Callable[..., Any],
    operands: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array | Mask | None,
    sinks: jax.Array | None,
    *,
    rate: float,
    rng: jax.Array,
) -> jax.Array:
    """Return attention with weights dropped, the same in all batch entries and heads.

    They are those that Flax drops with this key. ``attention`` is `sdpa`, to be called
    on operands (b, s, h, d), a mask and sinks.
    """
    q, k, v = operands
    keep = Where(jax.random.bernoulli(rng, 1 - rate, (q.shape[1], k.shape[1])))
    given = Where(mask) if isinstance(mask, jax.Array) else mask
    kept = keep if given is None else given & keep
    output, lse_kept = attention(q, k, v, mask=kept, return_residual=True)
    none = jnp.zeros((*v.shape[:-1], _COLUMNS), v.dtype)
    _, lse_all = attention(q, k, none, mask=mask, sinks=sinks, return_residual=True)
    # Where no key is kept, the output is 0, and a difference of infinities is NaN.
    is_empty = jnp.isneginf(lse_kept)
    difference = jnp.where(is_empty, 0, lse_kept - lse_all)
    share = jnp.where(is_empty, 0, jnp.exp(difference)) / (1 - rate)
    return (output.astype(share.dtype) * share[..., None]).astype(output.dtype)
