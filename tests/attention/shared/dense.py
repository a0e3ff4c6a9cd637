# SPDX-License-Identifier: Apache-2.0
"""Attention by its definition, dense and in float64, with all that `sdpa` takes.

Written in a few lines of jax.numpy that share nothing with the package. Gradients are
JAX's own, of these lines.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Of a batch entry, a head, a query and a key.
Condition = Callable[[int, int, int, int], Any]


def seen_by(condition: Condition, shape: tuple[int, ...]) -> np.ndarray:
    """Return a condition as bool (b, h, s, t)."""
    found = np.zeros(shape, bool)
    for place in itertools.product(*map(range, shape)):
        found[place] = condition(*place)
    return found


def dense_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    seen: Any,
    bias: Any = None,
    sinks: Any = None,
    score_mod: Any = None,
    factors: Any = None,
    scale: Any = None,
    with_max: bool = False,
) -> tuple[jax.Array, ...]:
    """Return output (b, s, h, e) and log-sum-exp (b, s, h), and the maximum likewise.

    ``seen`` broadcasts to (b, h, s, t). ``score_mod`` is a function of all scores, with
    the axes (b, h, s, t), and ``factors`` are those that weights have after the
    softmax.
    """
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores)
    if bias is not None:
        scores = scores + jnp.asarray(bias, scores.dtype)
    # Hidden scores count nothing; with this their slopes are 0 as well.
    seen = jnp.broadcast_to(seen, scores.shape)
    scores = jnp.where(seen & (scores != -jnp.inf), scores, -jnp.inf)
    columns, largest = scores, jnp.max(scores, axis=3, initial=-jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        columns = jnp.concatenate([scores, column.astype(scores.dtype)], axis=3)
    top = jnp.max(columns, axis=3, keepdims=True, initial=-jnp.inf)
    is_dead = top == -jnp.inf
    top = jax.lax.stop_gradient(jnp.where(is_dead, 0, top))
    total = jnp.sum(jnp.exp(columns - top), axis=3, keepdims=True)
    total = jnp.where(is_dead, 1, total)
    weights = jnp.exp(scores - top) / total
    if factors is not None:
        weights = weights * factors
    output = jnp.einsum("bhst,bhte->bhse", weights, v)
    lse = jnp.where(is_dead, -jnp.inf, top + jnp.log(total))[..., 0]
    results = (output, lse, largest) if with_max else (output, lse)
    return tuple(jnp.swapaxes(x, 1, 2) for x in results)


def at_places(modify: Callable[..., Any]) -> Callable[[jax.Array], jax.Array]:
    """Return a function of all scores, given one of scores, b, h, s and t."""

    def of_all(scores: jax.Array) -> jax.Array:
        axes = map(jnp.arange, scores.shape)
        return modify(scores, *jnp.meshgrid(*axes, indexing="ij", sparse=True))

    return of_all


def with_gradients(
    function: Any,
    operands: dict[str, Any],
    cotangents: Any,
    *,
    is_jitted: bool = True,
) -> Any:
    """Return a function's results and the gradients of its operands by name."""

    def run(operands: dict[str, Any], cotangents: Any) -> Any:
        results, transpose = jax.vjp(function, operands)
        return results, transpose(cotangents)[0]

    return (jax.jit(run) if is_jitted else run)(operands, cotangents)
