# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks by the definition: scores with a column of sinks beside them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def dense_with_sinks(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    bias: Any = None,
    *,
    seen: np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """Return output and log-sum-exp in float64."""
    q, k, v, sinks, bias = (
        jnp.asarray(0 if x is None else x, jnp.float64)
        for x in (query, key, value, sinks, bias)
    )
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[3] ** -0.5 + bias
    scores = jnp.where(seen, scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    every = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(every, axis=-1)[..., :-1]
    output = jnp.einsum("bhst,bthe->bshe", weights, v)
    lse = jax.nn.logsumexp(every, axis=-1)
    return output, jnp.swapaxes(lse, 1, 2)
