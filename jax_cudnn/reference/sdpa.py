# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradient in jax.numpy; axis letters as in graph/sdpa.py.

Scores, softmax and sums are kept in f32 (f64 for f64). The probabilities are rounded
to the operands' dtype before they are multiplied by the values, as in flash kernels.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph.sdpa import SdpaAttributes
from jax_cudnn.graph.spec import Attributes, Tensor

Operands = Mapping[str, jax.Array]


class Weights(NamedTuple):
    """exp(logits - their maximum) of each row, their sum and their log-sum-exp.

    The sum of a row that sees no key is given as 1, its log-sum-exp is -inf.
    """

    unnormalised: jax.Array
    total: jax.Array
    stats: jax.Array
    is_dead: jax.Array


class _Softmax(NamedTuple):
    """The softmax of the logits over keys; ``stats`` is their log-sum-exp."""

    probabilities: jax.Array
    stats: jax.Array
    is_dead: jax.Array


def forward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return output and log-sum-exp; a row that sees no key gives 0 and -inf."""
    assert isinstance(attributes, SdpaAttributes)
    del outputs  # XLA removes what is not used.
    softmax = _softmax(logits(attributes, inputs))
    return {
        "output": _mix(softmax.probabilities, inputs["value"]),
        "stats": softmax.stats,
    }


def backward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the gradients, with the probabilities P computed again from the logits S.

    dV = P^T dO and dS = P (dP - rowsum(P dP) + dstats) with dP = dO V^T, then
    dQ = scale dS K, dK = scale dS^T Q, and dbias is dS summed where it broadcast.

    Kernels read the saved output and log-sum-exp; this function does not. A log-sum-exp
    far from 0 has no digits left for the number of keys, so exp(S - stats) would be too
    large by that factor. rowsum(O dO) of a rounded output would be off by its rounding.
    Only a partial gradient has to read them: they say what other keys there are.
    """
    assert isinstance(attributes, SdpaAttributes)
    return gradients(attributes, inputs, with_bias="grad_bias" in outputs)


def gradients(
    attributes: SdpaAttributes,
    inputs: Operands,
    *,
    with_bias: bool,
    first_row: int | jax.Array = 0,
) -> dict[str, jax.Array]:
    """Return `backward`'s gradients for rows of the queries from `first_row` on."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    grad_output = inputs["grad_output"]
    scores = logits(attributes, inputs, first_row)
    grad_probabilities = grouped_einsum("bkgse,bkte->bkgst", grad_output, value)
    if attributes.is_partial:
        probabilities, _, is_dead = _part_of_softmax(scores, inputs["stats"])
        products = inputs["output"].astype(scores.dtype) * grad_output.astype(
            scores.dtype
        )
    else:
        probabilities, _, is_dead = _softmax(scores)
        products = probabilities * grad_probabilities
    delta = jnp.sum(products, axis=-1, keepdims=True)
    if "grad_stats" in inputs:
        delta = delta - jnp.where(is_dead, 0, inputs["grad_stats"])
    grad_logits = probabilities * (grad_probabilities - delta)

    rounded = grad_logits.astype(query.dtype)
    weights = probabilities.astype(query.dtype)
    scale = jnp.asarray(attributes.scale, grad_logits.dtype)
    results = {
        "grad_query": scale * grouped_einsum("bkgst,bktd->bkgsd", rounded, key),
        "grad_key": scale * _sum_over_group("bkgst,bkgsd->bktd", rounded, query, key),
        "grad_value": _sum_over_group("bkgst,bkgse->bkte", weights, grad_output, value),
    }
    if with_bias:
        axes = [i for i, dim in enumerate(inputs["bias"].shape) if dim == 1]
        results["grad_bias"] = jnp.sum(grad_logits, axis=axes, keepdims=True)
    return results


def weights_of(logits: jax.Array) -> Weights:
    """Return the weights of the logits over keys, before they are divided."""
    # An all-masked row has maximum -inf; any finite shift keeps it at exp(-inf) = 0.
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    is_dead = total == 0
    total = jnp.where(is_dead, 1, total)
    return Weights(
        unnormalised=weights,
        total=total,
        stats=jnp.where(is_dead, -jnp.inf, top + jnp.log(total)),
        is_dead=is_dead,
    )


def _softmax(logits: jax.Array) -> _Softmax:
    weights, total, stats, is_dead = weights_of(logits)
    return _Softmax(probabilities=weights / total, stats=stats, is_dead=is_dead)


def _part_of_softmax(logits: jax.Array, stats: jax.Array) -> _Softmax:
    """Return the probabilities of these keys among all that the log-sum-exp is of."""
    is_dead = stats == -jnp.inf
    weights = jnp.exp(logits - jnp.where(is_dead, 0, stats))
    return _Softmax(
        probabilities=jnp.where(is_dead, 0, weights), stats=stats, is_dead=is_dead
    )


def logits(
    attributes: SdpaAttributes,
    inputs: Operands,
    first_row: int | jax.Array = 0,
    *,
    factor: jax.Array | None = None,
) -> jax.Array:
    """Return scale Q K^T + bias as (b, h, s, t), -inf where a key is hidden.

    A `factor` belongs to the scale.
    """
    query, key = inputs["query"], inputs["key"]
    scores = grouped_einsum("bkgsd,bktd->bkgst", query, key)
    scale = jnp.asarray(attributes.scale, scores.dtype)
    scores = scores * (scale if factor is None else scale * factor)
    if "bias" in inputs:
        scores = scores + inputs["bias"].astype(scores.dtype)
    is_visible = _visible(attributes, inputs, scores.shape, first_row)
    return scores if is_visible is None else jnp.where(is_visible, scores, -jnp.inf)


def _visible(
    attributes: SdpaAttributes,
    inputs: Operands,
    shape: tuple[int, ...],
    first_row: int | jax.Array,
) -> jax.Array | None:
    _, _, s, t = shape
    rows = first_row + jnp.arange(s, dtype=jnp.int32).reshape(1, 1, s, 1)
    columns = jnp.arange(t, dtype=jnp.int32).reshape(1, 1, 1, t)
    conditions: list[jax.Array] = []
    if attributes.is_causal:
        conditions.append(columns <= rows)
    if attributes.window:
        # Cut to what int32 holds beside any row.
        left, right = (max(-(2**30), min(x, 2**30)) for x in attributes.window)
        conditions += [rows <= columns + left, rows >= columns - right]
    if "query_lengths" in inputs:
        conditions.append(rows < inputs["query_lengths"])
    if "key_lengths" in inputs:
        conditions.append(columns < inputs["key_lengths"])
    if "mask" in inputs:
        conditions.append(inputs["mask"])
    if not conditions:
        return None
    is_visible = functools.reduce(jnp.logical_and, conditions)
    return jnp.broadcast_to(is_visible, shape)


def _mix(weights: jax.Array, value: jax.Array) -> jax.Array:
    return grouped_einsum("bkgst,bkte->bkgse", weights.astype(value.dtype), value)


def _accumulator(x: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _split_heads(x: jax.Array, key_heads: int) -> jax.Array:
    b, h, s, n = x.shape
    return jnp.reshape(x, (b, key_heads, h // max(key_heads, 1), s, n))


def grouped_einsum(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Contract x (b, h, s, .) with y (b, k, t, .), each key head serving h/k heads."""
    b, h, s, _ = x.shape
    product = jnp.einsum(
        formula,
        _split_heads(x, y.shape[1]),
        y,
        preferred_element_type=_accumulator(x),
    )
    return jnp.reshape(product, (b, h, s, product.shape[-1]))


def _sum_over_group(
    formula: str, x: jax.Array, y: jax.Array, like: jax.Array
) -> jax.Array:
    """Contract x and y, both (b, h, s, .), over s and each group of query heads."""
    k = like.shape[1]
    return jnp.einsum(
        formula,
        _split_heads(x, k),
        _split_heads(y, k),
        preferred_element_type=_accumulator(x),
    )
