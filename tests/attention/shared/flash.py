# SPDX-License-Identifier: Apache-2.0
"""Attention as a flash kernel computes it, in NumPy, for graphs that are rewritten.

The reference is the meaning of a graph, but a kernel has its own arithmetic. A kernel
keeps scores times log2(e) in f32, computes probabilities again from the log-sum-exp,
takes delta from the output that it is given, rounds its factors to the operands' dtype,
and leaves NaN where lengths hide rows. This module shares no code with the package.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph
from tests.attention.shared.dropout import numpy_numbers
from tests.attention.shared.oracle import by_role

_LOG2E, _LN2 = np.float32(np.log2(np.e)), np.float32(np.log(2))


def flash(graph: Graph, operands: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Return the results of a one-node graph of attention as the kernel gives them."""
    (node,) = graph.nodes
    given = by_role(graph, operands)
    refused = {"mask", "grad_stats", "grad_max_logit", "sinks"}
    assert not refused & set(given), "no kernel takes them"
    # Infinities and NaN are results like others here.
    with np.errstate(all="ignore"):
        scores, is_inside = _scores(node.attributes, given)
        if node.kind == "sdpa":
            found = _forward(node.attributes, given, scores, is_inside)
        else:
            found = _backward(node.attributes, given, scores, is_inside)
            if given["key"].shape[2] % 128 == 64 and "grad_bias" not in graph.outputs:
                # What cuDNN 9.19 does on an H200.
                is_low = given["stats"] < -88.7
                found["grad_query"] = np.where(is_low, np.nan, found["grad_query"])
    roles = {name: role for role, name in node.outputs}
    return tuple(
        jnp.asarray(
            np.asarray(
                np.transpose(found[roles[tensor.name]], tensor.order),
                given["query"].dtype if tensor.dtype != "f32" else jnp.float32,
            )
        )
        for tensor in graph.output_tensors
    )


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


def _per_query_head(given: dict[str, Any], role: str) -> np.ndarray:
    x = _wide(given[role])
    return np.repeat(x, given["query"].shape[1] // x.shape[1], axis=1)


def _scores(attributes: Any, given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores times log2(e), -inf where hidden, and which rows are inside."""
    query, key = _wide(given["query"]), _per_query_head(given, "key")
    scores = (query @ np.swapaxes(key, 2, 3)) * np.float32(attributes.scale)
    if attributes.score_mod:
        _check_score_mod(attributes, given)
        steps = [*attributes.score_mod, *attributes.score_mod_grad]
        values = _values(given, scores)
        given["steps"] = steps, values
        scores = _apply(steps[: len(attributes.score_mod)], values)
    scores = scores * _LOG2E
    if "bias" in given:
        scores = scores + _wide(given["bias"]) * _LOG2E
    rows = np.arange(scores.shape[2]).reshape(1, 1, -1, 1)
    columns = np.arange(scores.shape[3]).reshape(1, 1, 1, -1)
    is_inside = np.ones((1, 1, scores.shape[2], 1), bool)
    if attributes.is_causal:
        scores = np.where(columns <= rows, scores, -np.inf)
    if attributes.window:
        # A band with two bounds that are not negative is all that a kernel takes.
        left, right = attributes.window
        assert min(left, right) >= 0
        scores = np.where(columns >= rows - left, scores, -np.inf)
        scores = np.where(columns <= rows + right, scores, -np.inf)
    if "key_lengths" in given:
        is_inside = rows < given["query_lengths"]
        scores = np.where(columns < given["key_lengths"], scores, -np.inf)
    return scores, np.broadcast_to(is_inside, (*scores.shape[:3], 1))


def _keep(attributes: Any, given: dict[str, Any]) -> np.ndarray:
    """Return what probabilities are multiplied by after the softmax, (b, h, s, t)."""
    if "dropout_mask" in given:
        return _wide(given["dropout_mask"]) * np.float32(1 / (1 - attributes.dropout))
    (b, h, s, _), t = given["query"].shape, given["key"].shape[2]
    if "dropout_seed" not in given:
        return np.ones((b, h, s, t), np.float32)
    # The kernel is told of one number more, and does not drop that one.
    rate = attributes.dropout + 2.0**-16
    seed, offset = (int(given[f"dropout_{x}"].item()) for x in ("seed", "offset"))
    numbers = [numpy_numbers(seed, offset + 32 * i, s, t) for i in range(b * h)]
    is_kept = np.reshape(numbers, (b, h, s, t)) <= (1 - rate) * 2**16
    return is_kept.astype(np.float32) * np.float32(1 / (1 - rate))


def _forward(
    attributes: Any, given: dict[str, Any], scores: np.ndarray, is_inside: np.ndarray
) -> dict[str, np.ndarray]:
    top = scores.max(-1, keepdims=True)
    weights = np.exp2(scores - np.where(top == -np.inf, np.float32(0), top))
    total = weights.sum(-1, keepdims=True)
    kept = weights * _keep(attributes, given)
    mixed = _rounded(kept, given) @ _per_query_head(given, "value")
    output = np.where(total == 0, np.float32(0), mixed / total)
    stats = (top + np.log2(total)) * _LN2
    # Instructions for maxima leave NaN out.
    largest = np.fmax.reduce(scores, axis=-1, keepdims=True) * _LN2
    results = {
        "output": output,
        "stats": stats,
        "max_logit": largest,
        "sum_exp": total,
    }
    return {role: np.where(is_inside, x, np.nan) for role, x in results.items()}


def _backward(
    attributes: Any, given: dict[str, Any], scores: np.ndarray, is_inside: np.ndarray
) -> dict[str, np.ndarray]:
    query, grad_output = _wide(given["query"]), _wide(given["grad_output"])
    key, value = _per_query_head(given, "key"), _per_query_head(given, "value")
    is_seen = is_inside & (scores != -np.inf)
    weights = np.exp2(scores - _wide(given["stats"]) * _LOG2E)
    weights = np.where(is_seen, weights, np.float32(0))
    delta = (_wide(given["output"]) * grad_output).sum(-1, keepdims=True)
    if "dropout_mask" in given:  # What cuDNN 9.19 does on an H200.
        delta = delta * np.float32(1 / (1 - attributes.dropout))
    keep = _keep(attributes, given)
    slopes = weights * (keep * (grad_output @ np.swapaxes(value, 2, 3)) - delta)
    slopes = np.where(is_seen, slopes, np.float32(0))
    grad_output = np.where(is_inside, grad_output, np.float32(0))
    scale, full = np.float32(attributes.scale), slopes
    if attributes.score_mod:
        steps, values = given["steps"]
        slopes = _apply(steps[len(attributes.score_mod) :], {**values, "grad": slopes})
    rounded = _rounded(slopes, given)
    found = {
        "grad_query": np.where(is_inside, scale * (rounded @ key), np.nan),
        "grad_key": scale * _sum_heads(given, np.swapaxes(rounded, 2, 3) @ query),
        "grad_value": _sum_heads(
            given, np.swapaxes(_rounded(weights * keep, given), 2, 3) @ grad_output
        ),
    }
    if "bias" in given:
        axes = tuple(i for i, dim in enumerate(given["bias"].shape) if dim == 1)
        found["grad_bias"] = full.sum(axes, keepdims=True)
    return found


# --- a function of the scores ---------------------------------------------------------


def _check_score_mod(attributes: Any, given: dict[str, Any]) -> None:
    """Assert what cuDNN 9.19 is known to want of a score_mod on an H200."""
    assert not attributes.is_causal
    assert not attributes.window
    assert not {"key_lengths", "query_lengths"} & set(given)
    if "grad_output" in given:
        assert attributes.score_mod_grad
        # It fills tiles with -inf before it applies the steps.
        assert given["key"].shape[2] % 128 == 0
    rows = 0
    for role in filter(lambda each: each.startswith("mod_"), given):
        b, _, s, t = given[role].shape
        assert b == 1 or (s, t) != (1, 1), role
        assert t == 1 or s == given["query"].shape[2], role
        rows += t == 1 and s != 1
    assert rows <= 1 or "grad_output" not in given
    words = [step.split(" ") for step in attributes.score_mod]
    gradient = [step.split(" ") for step in attributes.score_mod_grad]
    for _, *read in words + gradient:  # with 9.28.1 on an H100
        assert len({*read}) == len(read), read
    assert not any("score" in others for _, _, *others in words)
    assert not any(each[1] == "-inf" for each in words)


def _values(given: dict[str, Any], scores: np.ndarray) -> dict[str, np.ndarray]:
    s, t = scores.shape[2:]
    return {
        "score": scores,
        "query": np.arange(s, dtype=np.float32).reshape(1, 1, s, 1),
        "key": np.arange(t, dtype=np.float32).reshape(1, 1, 1, t),
        **{role: _wide(x) for role, x in given.items() if role.startswith("mod_")},
    }


def _apply(steps: Sequence[str], values: dict[str, np.ndarray]) -> np.ndarray:
    """Return the last step's result; each is a value like others from then on."""
    for step in steps:
        mode, *words = step.split(" ")
        operands = [values[x] if x in values else np.float32(x) for x in words]
        count = sum(name[0] == "%" for name in values)
        values[f"%{count}"] = result = np.asarray(_MODES[mode](*operands))
    return np.broadcast_to(result, values["score"].shape)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


_MODES: dict[str, Any] = {
    "abs": np.abs,
    "add": np.add,
    "div": np.divide,
    "eq": np.equal,
    "exp": np.exp,
    "ge": np.greater_equal,
    "gt": np.greater,
    "identity": np.positive,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "select": lambda a, b, c: np.where(c, a, b),
    "sigmoid": _sigmoid,
    "sigmoid_grad": lambda ct, x: ct * _sigmoid(x) * (1 - _sigmoid(x)),
    "sub": np.subtract,
    "tanh": np.tanh,
    "tanh_grad": lambda ct, x: ct * (1 - np.tanh(x) ** 2),
}


def _rounded(x: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    return _wide(x.astype(given["query"].dtype))


def _sum_heads(given: dict[str, Any], x: np.ndarray) -> np.ndarray:
    b, h, t, n = x.shape
    k = given["key"].shape[1]
    return x.reshape(b, k, h // k, t, n).sum(2)
