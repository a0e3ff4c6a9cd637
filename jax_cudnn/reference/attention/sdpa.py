# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradient in jax.numpy; axis letters as in graph/attention/sdpa.py.

Scores, softmax and sums are kept in f32 (f64 for f64). The probabilities are rounded
to the operands' dtype before they are multiplied by the values, as in flash kernels.
With dropout, they are those that are kept, divided by the share that is kept.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp

from jax_cudnn.graph.attention.score_mod import operands_of, read_step, result_index
from jax_cudnn.graph.attention.sdpa import SdpaAttributes
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.reference.attention import sequences
from jax_cudnn.reference.attention.dropout import kept, numbered
from jax_cudnn.reference.attention.softmax import (
    PartOfSoftmax,
    Weights,
    largest_logits,
    part_of_softmax,
    share_of_sinks,
    slopes_of_largest,
    weights_of,
)
from jax_cudnn.reference.pointwise import apply_mode

Operands = Mapping[str, jax.Array]
# A function of the scaled scores (b, h, s, t).
ScoreMod = Callable[[jax.Array], jax.Array]


def forward(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    score_mod: ScoreMod | None = None,
) -> dict[str, jax.Array]:
    """Return output, log-sum-exp, maximum and the sum of exp(logit - maximum).

    A row that sees no key gives 0, -inf, -inf and 0. A sink is part of the log-sum-exp
    and not of maximum and sum. ``score_mod`` is for functions that no graph holds; it
    takes the place of steps.
    """
    assert isinstance(attributes, SdpaAttributes)
    del outputs  # XLA removes what is not used.
    inputs = _read(attributes, inputs)
    scores = _scores(attributes, inputs)
    modified = _modified(attributes, inputs, 0) if score_mod is None else score_mod
    hidden = _hidden(attributes, inputs, modified(scores))
    softmax = weights_of(hidden, inputs.get("sinks"))
    dropped = _dropped(softmax.probabilities, attributes, _kept(attributes, inputs))
    largest = largest_logits(hidden)
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    return {
        "output": _mix(dropped, inputs["value"]),
        "stats": softmax.stats,
        "max_logit": largest,
        "sum_exp": jnp.sum(jnp.exp(hidden - shift), axis=-1, keepdims=True),
    }


def backward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the gradients, with the probabilities P computed again from the logits S.

    dV = P^T dO and dS = P (dP - rowsum(P dP) + dstats) with dP = dO V^T, then
    dQ = scale dS K, dK = scale dS^T Q, and dbias is dS summed where it broadcast. The
    cotangent of a row's maximum is added to dS where the maximum is. A sink has the
    probability p that P lacks, and the gradient p (dstats - rowsum(P dP)). With
    dropout, P in dV and dP are what is kept of them, divided by the share that is kept.
    With steps, dS is pulled back through them between dbias and dQ.

    Kernels read the saved output and log-sum-exp; this function does not. A log-sum-exp
    far from 0 has no digits left for the number of keys, so exp(S - stats) would be too
    large by that factor. rowsum(O dO) of a rounded output would be off by its rounding.
    Only a partial gradient has to read them: they say what other keys there are.
    """
    assert isinstance(attributes, SdpaAttributes)
    return gradients(attributes, inputs, wanted=outputs.keys())


def gradients(
    attributes: SdpaAttributes,
    inputs: Operands,
    *,
    wanted: Collection[str],
    first_row: int | jax.Array = 0,
    row_count: int | None = None,
    is_rare: bool = False,
) -> dict[str, jax.Array]:
    """Return `backward`'s gradients for rows of the queries from `first_row` on.

    There are `row_count` of them in all; None for those that are given. The gradients
    of bias and sinks are computed where they are `wanted`. What ``is_rare`` is to
    compile fast rather than to run fast.
    """
    # Of a row in no sequence too, whose sink is all that it has.
    every_grad_stats = inputs.get("grad_stats", 0)
    inputs = _read(attributes, inputs)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    grad_output = inputs["grad_output"]
    read = {role: inputs[role] for role in operands_of(attributes.score_mod)}
    modified, pull = jax.vjp(
        lambda scores, read: _modified(attributes, {**inputs, **read}, first_row)(
            scores
        ),
        _scores(attributes, inputs),
        read,
    )
    scores = _hidden(attributes, inputs, modified, first_row)
    # XLA weighs for long which of these belong in one kernel with the softmax.
    apart = jax.lax.optimization_barrier if is_rare else lambda x: x
    scores = apart(scores)
    is_kept = _kept(attributes, inputs, first_row, row_count)
    grad_probabilities = _of_pairs(grad_output, value)
    grad_probabilities = _dropped(grad_probabilities, attributes, is_kept)
    softmax: PartOfSoftmax | Weights
    if attributes.is_partial:
        softmax = part_of_softmax(scores, inputs["stats"])
        probabilities = softmax.probabilities
        products = inputs["output"].astype(scores.dtype) * grad_output.astype(
            scores.dtype
        )
    else:
        softmax = weights_of(scores, inputs.get("sinks"))
        probabilities = apart(softmax.probabilities)
        products = probabilities * grad_probabilities
    delta = jnp.sum(products, axis=-1, keepdims=True)
    if "grad_stats" in inputs:
        delta = delta - jnp.where(softmax.is_dead, 0, inputs["grad_stats"])
    grad_logits = probabilities * (grad_probabilities - delta)
    if "grad_max_logit" in inputs:
        grad_logits += slopes_of_largest(scores, inputs["grad_max_logit"])

    grad_scores, grad_read = pull(grad_logits)
    if attributes.score_mod or "bias" in inputs:
        is_seen = scores != -jnp.inf
    else:
        # The same, for which XLA need not read the scores once more.
        is_seen = _visible(attributes, inputs, scores.shape, first_row)
    if is_seen is not None:
        # The steps may have no finite slope where nothing is seen, in padding say, and
        # the values there may be NaN.
        grad_scores = jnp.where(is_seen, grad_scores, 0)
    rounded = grad_scores.astype(query.dtype)
    weights = _dropped(probabilities, attributes, is_kept).astype(query.dtype)
    scale = jnp.asarray(attributes.scale, grad_logits.dtype)
    results: dict[str, jax.Array] = {
        "grad_query": scale * grouped_einsum("bkgst,bktd->bkgsd", rounded, key),
        "grad_key": scale * _sum_over_group("bkgst,bkgsd->bktd", rounded, query, key),
        "grad_value": _sum_over_group("bkgst,bkgse->bkte", weights, grad_output, value),
    }
    results |= {f"grad_{role}": x for role, x in grad_read.items()}
    if "grad_bias" in wanted:
        results["grad_bias"] = summed_like(inputs["bias"], grad_logits)
    if "grad_sinks" in wanted:
        # The cotangent of a row without keys is that of its log-sum-exp alone.
        has_keys = jnp.any(scores != -jnp.inf, axis=-1, keepdims=True)
        slope = jnp.where(has_keys, -delta, every_grad_stats)
        share = share_of_sinks(inputs["sinks"], softmax.stats)
        results["grad_sinks"] = summed_like(inputs["sinks"], share * slope)
    return results


def max_gradients(
    attributes: SdpaAttributes, inputs: Operands, wanted: Collection[str]
) -> dict[str, jax.Array]:
    """Return the `wanted` gradients that the cotangent of the rows' maxima makes."""
    inputs = _read(attributes, inputs)
    roles = [role.removeprefix("grad_") for role in wanted]
    moving = {role: inputs[role] for role in roles if role not in ("value", "sinks")}

    def largest(moving: Operands) -> jax.Array:
        given = {**inputs, **moving}
        scores = _modified(attributes, given, 0)(_scores(attributes, given))
        return largest_logits(_hidden(attributes, given, scores))

    top, pull = jax.vjp(largest, moving)
    (found,) = pull(inputs["grad_max_logit"].astype(top.dtype))
    return {f"grad_{role}": x for role, x in found.items()}


def summed_like(operand: jax.Array, x: jax.Array) -> jax.Array:
    """Return the sum of x over the axes along which an operand was broadcast to it."""
    axes = [i for i, dim in enumerate(operand.shape) if dim == 1]
    return jnp.sum(x, axis=axes, keepdims=True)


def _read(attributes: SdpaAttributes, inputs: Operands) -> Operands:
    """Return the operands without what is padding, which may be NaN."""
    has_lengths = any(f"{kind}_lengths" in inputs for kind in sequences.ALONG)
    if not has_lengths and not sequences.is_packed(attributes, inputs):
        return inputs
    return sequences.without_padding(attributes, inputs)


def _kept(
    attributes: SdpaAttributes,
    inputs: Operands,
    first_row: int | jax.Array = 0,
    row_count: int | None = None,
) -> jax.Array | None:
    """Return, as bool (b, h, s, t), which probabilities are kept; None for all."""
    if "dropout_mask" in inputs:
        return inputs["dropout_mask"] != 0
    if "dropout_seed" not in inputs:
        return None
    b, h, s, _ = inputs["query"].shape
    offset = inputs["dropout_offset"]
    if not attributes.dropout_heads and offset.shape[:2] != (b, h):
        offset = numbered(offset, b, h)
    return kept(
        attributes.dropout,
        inputs["dropout_seed"],
        offset,
        (s if row_count is None else row_count, inputs["key"].shape[2]),
        first_row + jnp.arange(s, dtype=jnp.int32),
    )


def _dropped(
    x: jax.Array, attributes: SdpaAttributes, is_kept: jax.Array | None
) -> jax.Array:
    if is_kept is None:
        return x
    scale = jnp.asarray(1 / (1 - attributes.dropout), x.dtype)
    return jnp.where(is_kept, x * scale, 0)


def _scores(
    attributes: SdpaAttributes, inputs: Operands, factor: jax.Array | None = None
) -> jax.Array:
    """Return scale Q K^T as (b, h, s, t); a `factor` belongs to the scale."""
    products = _of_pairs(inputs["query"], inputs["key"])
    scale = jnp.asarray(attributes.scale, products.dtype)
    return products * (scale if factor is None else scale * factor)


def _modified(
    attributes: SdpaAttributes, inputs: Operands, first_row: int | jax.Array
) -> ScoreMod:
    """Return the function that the attributes' steps are."""
    if not attributes.score_mod:
        return lambda scores: scores

    def function(scores: jax.Array) -> jax.Array:
        _, _, s, t = scores.shape
        rows = first_row + jnp.arange(s, dtype=jnp.int32)
        values = {
            "score": scores,
            "query": rows.reshape(1, 1, s, 1),
            "key": jnp.arange(t, dtype=jnp.int32).reshape(1, 1, 1, t),
            **{role: inputs[role] for role in operands_of(attributes.score_mod)},
        }
        values = {name: x.astype(scores.dtype) for name, x in values.items()}
        results: list[jax.Array] = []
        for mode, words in map(read_step, attributes.score_mod):
            operands = (_value(word, values, results) for word in words)
            results.append(apply_mode(mode, *operands))
        return jnp.broadcast_to(results[-1], scores.shape)

    return function


def _value(
    word: str, values: Mapping[str, jax.Array], results: Sequence[jax.Array]
) -> jax.Array:
    if word in values:
        return values[word]
    index = result_index(word)
    if index is not None:
        return results[index]
    return jnp.asarray(float(word), values["score"].dtype)


def logits(
    attributes: SdpaAttributes, inputs: Operands, *, factor: jax.Array | None = None
) -> jax.Array:
    """Return scale Q K^T + bias as (b, h, s, t), -inf where a key is hidden.

    A `factor` belongs to the scale. There is no score_mod.
    """
    return _hidden(attributes, inputs, _scores(attributes, inputs, factor))


def _hidden(
    attributes: SdpaAttributes,
    inputs: Operands,
    scores: jax.Array,
    first_row: int | jax.Array = 0,
) -> jax.Array:
    """Return scores + bias as (b, h, s, t), -inf where a key is hidden."""
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
    conditions: list[jax.Array] = []
    if sequences.is_packed(attributes, inputs):
        conditions.append(sequences.visible(attributes, inputs, shape, first_row))
    else:
        conditions += _seen_positions(attributes, inputs, shape, first_row)
    if "mask" in inputs:
        conditions.append(inputs["mask"])
    if not conditions:
        return None
    is_visible = functools.reduce(jnp.logical_and, conditions)
    return jnp.broadcast_to(is_visible, shape)


def _seen_positions(
    attributes: SdpaAttributes,
    inputs: Operands,
    shape: tuple[int, ...],
    first_row: int | jax.Array,
) -> list[jax.Array]:
    """Return what causality, a window and lengths say of rows and columns."""
    lengths = {"query_lengths", "key_lengths"}.intersection(inputs)
    if not (attributes.is_causal or attributes.window or lengths):
        return []
    _, _, s, t = shape
    rows = first_row + jnp.arange(s, dtype=jnp.int32).reshape(1, 1, s, 1)
    columns = jnp.arange(t, dtype=jnp.int32).reshape(1, 1, 1, t)
    conditions: list[jax.Array] = []
    if attributes.is_causal:
        conditions.append(columns <= rows)
    if attributes.window:
        left, right = sequences.cut_window(attributes.window)
        conditions += [rows <= columns + left, rows >= columns - right]
    if "query_lengths" in inputs:
        conditions.append(rows < inputs["query_lengths"])
    if "key_lengths" in inputs:
        conditions.append(columns < inputs["key_lengths"])
    return conditions


def _mix(weights: jax.Array, value: jax.Array) -> jax.Array:
    return grouped_einsum("bkgst,bkte->bkgse", weights.astype(value.dtype), value)


def _accumulator(x: jax.Array) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _split_heads(x: jax.Array, key_heads: int) -> jax.Array:
    b, h, s, n = x.shape
    return jnp.reshape(x, (b, key_heads, h // max(key_heads, 1), s, n))


def _of_pairs(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the products of each row of x with each row of y, (b, h, s, t)."""
    products = grouped_einsum("bkgsd,bktd->bkgst", x, y)
    if x.shape[1] == y.shape[1]:
        return products
    # With the heads in groups, XLA for a GPU would reduce the products in the shape of
    # the groups, and then not see that it is a softmax.
    return jax.lax.optimization_barrier(products)


def grouped_einsum(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Contract x (b, h, s, .) with y (b, k, t, .), each key head serving h/k heads."""
    if x.shape[1] == y.shape[1]:
        formula = formula.replace("g", "")
        return jnp.einsum(formula, x, y, preferred_element_type=_accumulator(x))
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
    if x.shape[1] == k:
        formula = formula.replace("g", "")
        return jnp.einsum(formula, x, y, preferred_element_type=_accumulator(x))
    return jnp.einsum(
        formula,
        _split_heads(x, k),
        _split_heads(y, k),
        preferred_element_type=_accumulator(x),
    )
