# SPDX-License-Identifier: Apache-2.0
"""Packed sequences for tests: drawn rows, NumPy's answer, and a kernel's arithmetic.

`answer` loops over sequences and knows no packing. `ragged` reads and writes flat
memory through the offsets that a rewritten graph gives, as a kernel does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jax_cudnn import masks
from jax_cudnn.graph import Graph, SdpaAttributes, Tensor, sdpa_graph
from tests.attention.shared.oracle import numpy_attention, numpy_gradients


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of packed sequences: for each row, for each of n: (start, length)."""

    queries: list[list[tuple[int, int]]]
    keys: list[list[tuple[int, int]]]
    s: int
    t: int
    h: int = 4
    k: int = 2
    d: int = 5
    e: int = 3
    causal: bool = False
    window: tuple[int, int] | None = None
    from_end: bool = False
    scale: float = 0.3
    max_length: Any = field(default=None)

    @property
    def b(self) -> int:
        """How many rows there are."""
        return len(self.queries)

    def mask(self) -> masks.Mask:
        """Return it as a mask, with causality and window."""
        starts, lengths, key_starts, key_lengths = (
            np.asarray([[pair[i] for pair in row] for row in rows], np.int32)
            for rows in (self.queries, self.keys)
            for i in (0, 1)
        )
        mask: masks.Mask = masks.Packed(
            starts, key_starts, lengths, key_lengths, max_length=self.max_length
        )
        alignment: masks.Alignment = "bottom-right" if self.from_end else "top-left"
        if self.causal:
            mask = mask & masks.Causal(alignment)
        if self.window:
            mask = mask & masks.Window(*self.window, alignment)
        return mask

    def is_inside(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which queries (b, s) and keys (b, t) belong to a sequence."""
        found = [np.zeros((self.b, size), bool) for size in (self.s, self.t)]
        for inside, rows in zip(found, (self.queries, self.keys), strict=True):
            for i, row in enumerate(rows):
                for start, length in row:
                    inside[i, start : start + length] = True
        return found[0], found[1]

    def draw(self, seed: int = 0, padding: float = 0.0) -> dict[str, np.ndarray]:
        """Return query, key, value and cotangents of output and log-sum-exp."""
        rng = np.random.default_rng(seed)
        shapes = {
            "query": (self.b, self.s, self.h, self.d),
            "key": (self.b, self.t, self.k, self.d),
            "value": (self.b, self.t, self.k, self.e),
            "grad_output": (self.b, self.s, self.h, self.e),
            "grad_lse": (self.b, self.s, self.h),
        }
        found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        queries, keys = self.is_inside()
        for name, x in found.items():
            x[~(keys if name in ("key", "value") else queries)] = padding
        return {name: x.astype(np.float32) for name, x in found.items()}


def answer(rows: Rows, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return output, lse and gradients in float64, a sequence at a time."""
    found = {
        "output": np.zeros(given["grad_output"].shape),
        "lse": np.full(given["grad_lse"].shape, -np.inf),
        **{f"grad_{r}": np.zeros(given[r].shape) for r in ("query", "key", "value")},
    }
    for i, pairs in enumerate(zip(rows.queries, rows.keys, strict=True)):
        for (a, m), (c, n) in zip(*pairs, strict=True):
            if not m or not n:
                continue
            row = np.arange(m)[:, None] + (n - m if rows.from_end else 0)
            column = np.arange(n)
            sees = np.ones((m, n), bool)
            if rows.causal:
                sees &= column <= row
            if rows.window:
                sees &= (row - column <= rows.window[0]) & (
                    column - row <= rows.window[1]
                )

            def heads_first(name: str, span: slice, i: int = i) -> np.ndarray:
                return np.swapaxes(given[name][i, span][None], 1, 2)

            queries, keys = slice(a, a + m), slice(c, c + n)
            one = {
                "query": heads_first("query", queries),
                "key": heads_first("key", keys),
                "value": heads_first("value", keys),
                "mask": sees[None, None],
            }
            forward = numpy_attention(one, scale=rows.scale)
            back = numpy_gradients(
                one,
                heads_first("grad_output", queries),
                given["grad_lse"][i, queries].T[None, :, :, None],
                scale=rows.scale,
            )
            found["output"][i, queries] = np.swapaxes(forward["output"], 1, 2)[0]
            found["lse"][i, queries] = forward["stats"][0, :, :, 0].T
            for role, span in (("query", queries), ("key", keys), ("value", keys)):
                found[f"grad_{role}"][i, span] = np.swapaxes(back[role], 1, 2)[0]
    return found


def graph_of(
    rows: Rows,
    dtype: str = "f32",
    *,
    order: tuple[int, ...] = (0, 2, 1, 3),
    with_sinks: bool = False,
) -> Graph:
    """Return the forward graph of rows, with the log-sum-exp.

    With sinks, it has them and the maximum as well.
    """
    n = len(rows.queries[0])
    shapes = {
        "query": (rows.b, rows.h, rows.s, rows.d),
        "key": (rows.b, rows.k, rows.t, rows.d),
        "value": (rows.b, rows.k, rows.t, rows.e),
    }
    inputs = {
        role: Tensor(name=role, dtype=dtype, dims=dims, order=order)  # type: ignore[arg-type]
        for role, dims in shapes.items()
    }
    for role in ("query_lengths", "key_lengths", "query_starts", "key_starts"):
        inputs[role] = Tensor(
            name=role, dtype="i32", dims=(rows.b, n, 1, 1), order=(0, 1, 2, 3)
        )
    if with_sinks:
        inputs["sinks"] = Tensor(
            name="sinks", dtype="f32", dims=(1, rows.h, 1, 1), order=(0, 1, 2, 3)
        )
    attributes = SdpaAttributes(
        scale=rows.scale,
        is_causal=rows.causal,
        window=rows.window or (),
        is_bottom_right=rows.from_end,
        longest=rows.max_length or (),
    )
    return sdpa_graph(
        inputs,
        attributes=attributes,
        output_order=order,
        with_stats=True,
        with_max=with_sinks,
    )


# --- as a kernel computes it ----------------------------------------------------------


def ragged(graph: Graph, operands: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Return the results of a graph with offsets; what no sequence has is NaN."""
    (node,) = graph.nodes
    attributes: Any = node.attributes
    dims = {
        role: graph.tensor(name).dims for role, name in (*node.inputs, *node.outputs)
    }
    arrays = dict(zip(graph.inputs, operands, strict=True))
    given = {role: np.asarray(arrays[name]) for role, name in node.inputs}
    results = {
        role: np.full(int(np.prod(dims[role])), np.nan, np.float32)
        for role, _ in node.outputs
    }
    count = given["query_lengths"].size
    lengths = {r: given[f"{r}_lengths"].ravel() for r in ("query", "key")}
    assert dims["query"][3] % 8 == dims["value"][3] % 8 == 0
    most = [max(0, *lengths[r]) for r in ("query", "key")]
    assert all(x <= y for x, y in zip(most, attributes.longest, strict=True))

    def places(role: str, j: int) -> np.ndarray:
        """Return where in memory the numbers of a sequence are, (h, tokens, size)."""
        base = role.removeprefix("grad_")
        base = "stats" if base in ("max_logit", "sum_exp") else base
        kind = "key" if base in ("key", "value") else "query"
        offsets = given[f"{base}_offsets"].ravel()
        assert offsets.shape == (count + 1,)
        _, heads, _, size = dims[role]
        head, token, column = np.ogrid[:heads, : lengths[kind][j], :size]
        found = offsets[j] + (token * heads + head) * size + column
        assert found.size == 0 or found.max() < np.prod(dims[role])
        return found

    def read(role: str, j: int) -> np.ndarray:
        return np.asarray(given[role], np.float32).ravel()[places(role, j)]

    group = dims["query"][1] // dims["key"][1]
    for j in range(count):
        if not lengths["query"][j] and not lengths["key"][j]:
            continue
        query, key, value = (read(role, j) for role in ("query", "key", "value"))
        key, value = (np.repeat(x, group, axis=0) for x in (key, value))
        scores = np.float32(attributes.scale) * (query @ np.swapaxes(key, 1, 2))
        scores = np.where(_sees(attributes, *scores.shape[1:]), scores, -np.inf)
        assert np.isfinite(scores.max(-1)).all(), "a kernel would compute 0/0"
        if node.kind == "sdpa":
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            found = {
                "output": weights @ value / total,
                "stats": top + np.log(total),
                "max_logit": top,
                "sum_exp": total,
            }
        else:
            pull, output = read("grad_output", j), read("output", j)
            weights = np.exp(scores - read("stats", j))
            slopes = pull @ np.swapaxes(value, 1, 2)
            slopes = weights * (slopes - (output * pull).sum(-1, keepdims=True))
            slopes = np.float32(attributes.scale) * slopes

            def summed(x: np.ndarray) -> np.ndarray:
                return x.reshape(-1, group, *x.shape[1:]).sum(1)

            found = {
                "grad_query": slopes @ key,
                "grad_key": summed(np.swapaxes(slopes, 1, 2) @ query),
                "grad_value": summed(np.swapaxes(weights, 1, 2) @ pull),
            }
        for role, array in results.items():
            array[places(role, j)] = found[role]
    return tuple(
        jnp.asarray(results[role].reshape(graph.tensor(name).stored_shape))
        for role, name in sorted(node.outputs, key=lambda x: graph.outputs.index(x[1]))
    )


def _sees(attributes: Any, m: int, n: int) -> np.ndarray:
    row = np.arange(m)[:, None] + (n - m if attributes.is_bottom_right else 0)
    column = np.arange(n)
    sees = np.ones((m, n), bool)
    if attributes.is_causal:
        sees &= column <= row
    if attributes.window:
        left, right = attributes.window
        assert min(left, right) >= 0
        sees &= (row - column <= left) & (column - row <= right)
    return sees


# Uneven lengths, gaps, empty sequences on either side, another order than in memory.
MIXED = Rows(
    queries=[[(0, 3), (3, 0), (5, 4), (9, 1)], [(8, 3), (2, 5), (1, 1), (0, 0)]],
    keys=[[(1, 2), (3, 3), (7, 5), (12, 0)], [(0, 1), (2, 6), (9, 4), (13, 0)]],
    s=11,
    t=13,
)
SAME = Rows(
    queries=[[(0, 3), (3, 5), (8, 0), (8, 2)], [(1, 1), (4, 2), (7, 3), (0, 0)]],
    keys=[[(0, 3), (3, 5), (8, 0), (8, 2)], [(1, 1), (4, 2), (7, 3), (0, 0)]],
    s=11,
    t=11,
)
ROWS = {
    "plain": MIXED,
    "causal": replace(SAME, causal=True),
    "causal-more-queries": replace(MIXED, causal=True),
    "causal-from-end": replace(MIXED, causal=True, from_end=True),
    "window": replace(MIXED, window=(1, 0)),
    "window-both": replace(SAME, window=(2, 1), scale=-0.4),
    "window-from-end": replace(MIXED, window=(1, 1), from_end=True),
    "window-causal": replace(SAME, causal=True, window=(1, 3), scale=0.0),
    "window-apart": replace(MIXED, window=(-1, 2)),
    "one-head": replace(MIXED, h=1, k=1),
    "max-length": replace(MIXED, max_length=(5, 6)),
}


@st.composite
def any_rows(draw: st.DrawFn) -> Rows:
    """Draw rows of any sequences, with gaps and in any order."""
    n, b = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    length = st.integers(0, 5)

    def row() -> list[tuple[int, int]]:
        spans, end = [], 0
        for _ in range(n):
            start = end + draw(st.integers(0, 2))
            spans.append((start, draw(length)))
            end = sum(spans[-1])
        return draw(st.permutations(spans))

    queries, keys = ([row() for _ in range(b)] for _ in range(2))
    s, t = (
        max(sum(span) for row in rows for span in row) + draw(st.integers(0, 3))
        for rows in (queries, keys)
    )
    k = draw(st.integers(1, 2))
    return Rows(
        queries=queries,
        keys=keys,
        s=max(s, 1),
        t=max(t, 1),
        k=k,
        h=k * draw(st.integers(1, 3)),
        d=draw(st.integers(1, 9)),
        e=draw(st.integers(1, 9)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4))),
        from_end=draw(st.booleans()),
    )
