# SPDX-License-Identifier: Apache-2.0
"""Shared by the attention tests: NumPy's answer in float64, graphs, drawn cases.

`numpy_attention` and `numpy_gradients` are loops over rows, written from the formula in
the docstring of `jax_cudnn.sdpa`. They share no code and no trick with the package.
Packed sequences and caches are given to these loops a sequence at a time (packed.py and
cached.py beside this file).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jax_cudnn.graph import Graph, SdpaAttributes, Tensor, sdpa_graph

# Axis letters as everywhere in the package; distinct, and none is 1.
SIZES = {"n": 4, "b": 2, "s": 5, "t": 7, "h": 6, "k": 3, "d": 11, "e": 13}

# All ways in which a bias or mask (b, h, s, t) broadcasts, "1" for an axis of size 1.
BROADCASTS = [
    "".join(
        letter if number >> i & 1 else "1"
        for i, letter in enumerate(("b", "h", "s", "t"))
    )
    for number in range(16)
]

_PLAIN = (0, 1, 2, 3)
_BSHD = (0, 2, 1, 3)
_BASE_NAMES = {
    "query": "bhsd",
    "key": "bktd",
    "value": "bkte",
    "query_lengths": "b111",
    "key_lengths": "b111",
}


def shape_of(axes: str, sizes: Mapping[str, int] = SIZES) -> tuple[int, ...]:
    """Return the shape whose axes have the letters' sizes; "1" stands for 1."""
    return tuple(1 if letter == "1" else sizes[letter] for letter in axes)


# --- NumPy's answer -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One query row: the keys that it sees, their probabilities and log-sum-exp."""

    where: tuple[int, int, int]
    key_head: int
    seen: list[int]
    probabilities: np.ndarray
    stats: float


def _rows(
    operands: Mapping[str, Any],
    scale: float,
    is_causal: bool,
    window: tuple[int, ...] = (),
    rounds_scores: bool = False,
) -> list[Row]:
    scores_dtype = np.float32 if rounds_scores else np.float64
    query, key = operands["query"], operands["key"]
    b, h, s, _ = query.shape
    _, k, t, _ = key.shape
    extra = {
        name: np.broadcast_to(operands[name], (b, h, s, t))
        for name in ("bias", "mask")
        if name in operands
    }

    def sees(i: int, head: int, row: int, column: int) -> bool:
        if is_causal and column > row:
            return False
        if window and not -window[0] <= column - row <= window[1]:
            return False
        if "query_lengths" in operands and row >= operands["query_lengths"][i, 0, 0, 0]:
            return False
        if "key_lengths" in operands and column >= operands["key_lengths"][i, 0, 0, 0]:
            return False
        return "mask" not in extra or bool(extra["mask"][i, head, row, column])

    rows = []
    for i, head, row in np.ndindex(b, h, s):
        key_head = head // (h // k)
        seen = [j for j in range(t) if sees(i, head, row, j)]
        scores = scale * (key[i, key_head, seen] @ query[i, head, row])
        scores = scores.astype(scores_dtype)
        if "bias" in extra:
            scores = scores + extra["bias"][i, head, row, seen].astype(scores_dtype)
        scores = scores.astype(np.float64)
        sink = operands["sinks"][0, head, 0, 0] if "sinks" in operands else -np.inf
        top = max(scores.max(initial=-np.inf), sink)
        if top == -np.inf:
            seen, probabilities, stats = [], np.zeros(0), -np.inf
        else:
            weights = np.exp(scores - top)
            total = weights.sum() + np.exp(sink - top)
            probabilities = weights / total
            stats = top + np.log(total)
        rows.append(
            Row(
                where=(i, head, row),
                key_head=key_head,
                seen=seen,
                probabilities=probabilities,
                stats=stats,
            )
        )
    return rows


def _doubles(operands: Mapping[str, Any]) -> dict[str, Any]:
    return {
        role: np.asarray(x, np.float64)
        if role in ("query", "key", "value", "bias", "sinks")
        else np.asarray(x)
        for role, x in operands.items()
    }


def numpy_attention(
    operands: Mapping[str, Any],
    *,
    scale: float,
    is_causal: bool = False,
    window: tuple[int, ...] = (),
    rounds_scores: bool = False,
) -> dict[str, np.ndarray]:
    """Return output (b, h, s, e) and stats (b, h, s, 1) of logical operands by role.

    With ``rounds_scores``, scores are rounded to f32 before and after the bias is
    added, as the definition has it: beside 1e9 they lose all digits.
    """
    operands = _doubles(operands)
    b, h, s, _ = operands["query"].shape
    output = np.zeros((b, h, s, operands["value"].shape[3]))
    stats = np.zeros((b, h, s, 1))
    for row in _rows(operands, scale, is_causal, window, rounds_scores):
        values = operands["value"][row.where[0], row.key_head, row.seen]
        output[row.where] = row.probabilities @ values
        stats[row.where] = row.stats
    return {"output": output, "stats": stats}


def numpy_gradients(
    operands: Mapping[str, Any],
    grad_output: Any,
    grad_stats: Any = None,
    *,
    scale: float,
    is_causal: bool = False,
    window: tuple[int, ...] = (),
    rounds_scores: bool = False,
) -> dict[str, np.ndarray]:
    """Return the gradients of sum(grad_output O) + sum(grad_stats stats) by role."""
    operands = _doubles(operands)
    grad_output = np.asarray(grad_output, np.float64)
    roles = [r for r in ("query", "key", "value", "bias") if r in operands]
    gradients = {role: np.zeros(operands[role].shape) for role in roles}
    bias_shape = gradients["bias"].shape if "bias" in gradients else ()
    for row in _rows(operands, scale, is_causal, window, rounds_scores):
        i, head, position = row.where
        p, seen, group = row.probabilities, row.seen, (i, row.key_head)
        values = operands["value"][*group, seen]
        pull = values @ grad_output[row.where]
        # That of a score is its probability times this and the slope of its value.
        others = -(p @ pull)
        if grad_stats is not None:
            others = others + float(np.asarray(grad_stats)[*row.where, 0])
        slope = p * (pull + others)
        gradients["query"][row.where] = scale * slope @ operands["key"][*group, seen]
        # Each key is seen once by a row, so nothing is added to one place twice.
        gradients["value"][*group, seen] += np.outer(p, grad_output[row.where])
        query = operands["query"][row.where]
        gradients["key"][*group, seen] += scale * np.outer(slope, query)
        for j, column in enumerate(seen if "bias" in gradients else ()):
            place = (i, head, position, column)
            place = tuple(
                0 if size == 1 else index
                for index, size in zip(place, bias_shape, strict=True)
            )
            gradients["bias"][place] += slope[j]
    return gradients


def numpy_results(values: Mapping[str, Any], **options: Any) -> dict[str, np.ndarray]:
    """Return results and gradients by role, of logical operands and cotangents.

    Scores are rounded to f32, as the definition has it.
    """
    operands = {r: x for r, x in values.items() if not r.startswith("grad_")}
    cotangents = values["grad_output"], values.get("grad_stats")
    gradients = numpy_gradients(operands, *cotangents, rounds_scores=True, **options)
    return {
        **numpy_attention(operands, rounds_scores=True, **options),
        **{f"grad_{role}": x for role, x in gradients.items()},
    }


def numpy_sdpa(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: tuple[int, ...] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what `jax_cudnn.sdpa` is to return, residual included, for full ranks."""
    given = {
        **{
            role: np.swapaxes(np.asarray(x), 1, 2)
            for role, x in (("query", query), ("key", key), ("value", value))
        },
        "bias": bias,
        "mask": mask,
        "query_lengths": query_seq_lengths,
        "key_lengths": key_value_seq_lengths,
    }
    operands = {role: np.asarray(x) for role, x in given.items() if x is not None}
    for role in ("query_lengths", "key_lengths"):
        if role in operands:
            operands[role] = operands[role].reshape(-1, 1, 1, 1)
    if scale is None:
        scale = operands["query"].shape[3] ** -0.5
    window = local_window_size or ()
    found = numpy_attention(operands, scale=scale, is_causal=is_causal, window=window)
    output, stats = found["output"], found["stats"]
    return np.swapaxes(output, 1, 2), np.swapaxes(stats[..., 0], 1, 2)


# --- layouts --------------------------------------------------------------------------


def to_logical(tensor: Tensor, stored: Any) -> np.ndarray:
    """Return a stored array with its axes in the order of ``tensor.dims``."""
    return np.transpose(np.asarray(stored), np.argsort(tensor.order))


def by_role(graph: Graph, operands: Any) -> dict[str, np.ndarray]:
    """Return the operands of a one-node graph in logical order, by role."""
    roles = {name: role for role, name in graph.nodes[0].inputs}
    return {
        roles[tensor.name]: to_logical(tensor, x)
        for tensor, x in zip(graph.input_tensors, operands, strict=True)
    }


# --- graphs ---------------------------------------------------------------------------


def attention_graph(
    *,
    sizes: Mapping[str, int] = SIZES,
    dtype: str = "f32",
    bias: str | None = None,
    bias_dtype: str | None = None,
    mask: str | None = None,
    lengths: tuple[str, ...] = (),
    scale: float = 0.3,
    is_causal: bool = False,
    window: tuple[int, ...] = (),
    with_stats: bool = False,
    with_max: bool = False,
    sinks: str | None = None,
    order: tuple[int, ...] = _BSHD,
) -> Graph:
    """Build a forward graph; ``bias``, ``mask``, ``sinks`` are axes such as "1hst"."""
    axes = {role: _BASE_NAMES[role] for role in ("query", "key", "value")}
    dtypes = dict.fromkeys(axes, dtype)
    for role, letters, its_dtype in (
        ("bias", bias, bias_dtype or dtype),
        ("mask", mask, "bool"),
        ("sinks", sinks, "f32"),
        *((role, _BASE_NAMES[role], "i32") for role in lengths),
    ):
        if letters is not None:
            axes[role], dtypes[role] = letters, its_dtype
    return sdpa_graph(
        {
            role: Tensor(
                name=role,
                dtype=dtypes[role],  # type: ignore[arg-type]
                dims=shape_of(letters, sizes),
                order=order if role in ("query", "key", "value") else _PLAIN,
            )
            for role, letters in axes.items()
        },
        attributes=SdpaAttributes(scale=scale, is_causal=is_causal, window=window),
        output_order=order,
        with_stats=with_stats,
        with_max=with_max,
    )


def backward_graph(
    forward: Graph, *, with_grad_bias: bool = True, with_grad_stats: bool = False
) -> Graph:
    """Return the gradient graph of a forward graph with stats."""
    from jax_cudnn.graph.attention.sdpa import SDPA

    assert SDPA.derivative is not None
    wanted = tuple(name != "bias" or with_grad_bias for name in forward.inputs)
    return SDPA.derivative.backward(forward, wanted, (True, with_grad_stats)).graph


def chained_graph() -> Graph:
    """Return a graph of two nodes: attention whose result is the query of a second."""
    graph = attention_graph(sizes={**SIZES, "e": SIZES["d"]})
    (first,) = graph.nodes
    second = dataclasses.replace(
        first,
        inputs=(("key", "key"), ("query", "output"), ("value", "value")),
        outputs=(("output", "final"),),
    )
    return dataclasses.replace(
        graph,
        tensors=(
            *graph.tensors,
            dataclasses.replace(graph.tensor("output"), name="final"),
        ),
        nodes=(first, second),
        outputs=("final",),
    )


def full_forward() -> Graph:
    """Return a forward graph with every operand and result."""
    return attention_graph(
        bias="1hst",
        mask="b1s1",
        lengths=("query_lengths", "key_lengths"),
        with_stats=True,
    )


def options_of(graph: Graph) -> dict[str, Any]:
    """Return what NumPy's attention is told of a graph of one node."""
    attributes: Any = graph.nodes[0].attributes
    names = ("scale", "is_causal", "window")
    return {name: getattr(attributes, name) for name in names}


# --- drawn cases ----------------------------------------------------------------------


@st.composite
def sizes(draw: st.DrawFn, largest: int = 6) -> dict[str, int]:
    """Draw the axis sizes of an attention, all at least 1."""
    size = st.integers(1, largest)
    k = draw(st.integers(1, 3))
    return {
        **{letter: draw(size) for letter in "bstde"},
        "k": k,
        "h": k * draw(st.integers(1, 3)),
    }


@st.composite
def forward_graphs(draw: st.DrawFn, dtypes: tuple[str, ...] = ("f32",)) -> Graph:
    """Draw a legal forward graph."""
    roles = ("query_lengths", "key_lengths")
    return attention_graph(
        sizes=draw(sizes()),
        dtype=draw(st.sampled_from(dtypes)),
        bias=draw(st.none() | st.sampled_from(BROADCASTS)),
        bias_dtype=draw(st.sampled_from(dtypes)),
        mask=draw(st.none() | st.sampled_from(BROADCASTS)),
        lengths=tuple(role for role in roles if draw(st.booleans())),
        scale=draw(
            st.floats(allow_nan=False, allow_infinity=False)
            if len(dtypes) > 1
            else st.sampled_from([0.3, -1.25, 0.0])
        ),
        is_causal=draw(st.booleans()),
        window=draw(st.sampled_from([(), (2, 1), (0, 0), (1, 9), (-1, 3), (3, -2)])),
        with_stats=draw(st.booleans()),
        order=draw(st.permutations((0, 1, 2, 3)).map(tuple)),
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a legal forward or gradient graph of any float dtype."""
    forward = draw(forward_graphs(dtypes=("f8_e4m3fn", "bf16", "f16", "f32", "f64")))
    if draw(st.booleans()):
        return forward
    return backward_graph(
        forward if "stats" in forward.outputs else _with_stats(forward),
        with_grad_bias=draw(st.booleans()),
        with_grad_stats=draw(st.booleans()),
    )


def _with_stats(forward: Graph) -> Graph:
    from jax_cudnn.graph.attention.sdpa import SDPA

    assert SDPA.derivative is not None
    return SDPA.derivative.with_residuals(forward, ())


def with_tensor(graph: Graph, name: str, **changes: Any) -> Graph:
    """Return the graph with one tensor changed."""
    return dataclasses.replace(
        graph,
        tensors=tuple(
            dataclasses.replace(t, **changes) if t.name == name else t
            for t in graph.tensors
        ),
    )
