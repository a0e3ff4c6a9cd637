# SPDX-License-Identifier: Apache-2.0
"""Attention over caches and pages in NumPy's float64, one sequence at a time; operands.

What a query sees is written from the docstring of `jax_cudnn.cached_sdpa`, and shares
no code with the package. The loops over rows are those of oracle.py beside this file.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from jax_cudnn.graph import CachedAttributes, Graph, Tensor, sdpa_cached_graph
from tests.attention.shared.oracle import numpy_attention


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of `cached_sdpa`, or of `paged_sdpa` with the same keys in pages.

    ``page`` is the number of tokens of a page; 0 for a cache without pages. Operands
    are drawn as "bshd", and given and compared in the ``layout``.
    """

    lengths: tuple[int, ...]
    page: int = 0
    s: int = 1
    t: int = 23
    k: int = 3
    g: int = 2
    d: int = 8
    e: int = 16
    query_lengths: tuple[int, ...] | None = None
    is_causal: bool = True
    window: tuple[int, int] | None = None
    scale: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    layout: str = "bshd"

    @property
    def b(self) -> int:
        return len(self.lengths)

    @property
    def room(self) -> int:
        return -(-self.t // self.page) * self.page if self.page else self.t


def truth(
    problem: Problem,
    query: Any,
    key: Any,
    value: Any,
    sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return output (b, s, h, e) and log-sum-exp, for keys (b, t, k, d) without pages.

    Nothing past a length is read. A query that sees a token past the end of the cache
    gives NaN.
    """
    operands = {"query": query, "key": key, "value": value}
    operands = {r: np.swapaxes(np.asarray(x), 1, 2) for r, x in operands.items()}
    if sinks is not None:
        operands["sinks"] = np.asarray(sinks).reshape(1, -1, 1, 1)
    (b, h, s, d), t = operands["query"].shape, operands["key"].shape[2]
    scale = max(d, 1) ** -0.5 if problem.scale is None else problem.scale
    output = np.zeros((b, s, h, operands["value"].shape[3]))
    lse = np.full((b, s, h), -np.inf)
    for i, given in enumerate(problem.lengths):
        length = max(given, 0)
        count = s if problem.query_lengths is None else problem.query_lengths[i]
        count = min(max(count, 0), s)
        seen, is_lost = np.zeros((1, 1, s, t), bool), np.zeros(s, bool)
        for row in range(count):
            position = length - count + row
            first, last = 0, length - 1
            if problem.is_causal:
                last = min(last, position)
            if problem.window is not None:
                left, right = problem.window
                first, last = max(first, position - left), min(last, position + right)
            is_lost[row] = first <= last and last >= t
            seen[..., row, first : max(last + 1, 0)] = True
        one = {
            role: x if role == "sinks" else x[i : i + 1] for role, x in operands.items()
        }
        found = numpy_attention({**one, "mask": seen}, scale=scale)
        output[i] = np.swapaxes(found["output"], 1, 2)[0]
        lse[i] = found["stats"][0, :, :, 0].T
        output[i, is_lost] = lse[i, is_lost] = np.nan
    return output, lse


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Operands of a problem: those of the call, and the keys and values for `truth`."""

    problem: Problem
    query: jax.Array
    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    page_table: jax.Array | None
    query_lengths: jax.Array | None
    sinks: jax.Array | None
    dense: tuple[np.ndarray, np.ndarray]

    def call(self, **given: Any) -> Any:
        """Call the operation; arguments may be given anew."""
        problem = self.problem
        keyed = {
            "query_seq_lengths": self.query_lengths,
            "scale": problem.scale,
            "is_causal": problem.is_causal,
            "local_window_size": problem.window,
            "sinks": self.sinks,
            "return_residual": True,
        }
        arrays = {"query": self.query, "key": self.key, "value": self.value}
        arrays["lengths"] = self.lengths
        if self.page_table is not None:
            arrays["page_table"] = self.page_table
        arrays |= {name: given.pop(name) for name in [*arrays] if name in given}
        q, k, v, lengths = (arrays[n] for n in ("query", "key", "value", "lengths"))
        keyed |= given
        if problem.layout != "bshd":
            axes = ["bshd".index(letter) for letter in problem.layout]
            q, k, v = (jnp.transpose(x, axes) for x in (q, k, v))
            keyed["layout"] = problem.layout
        if "page_table" not in arrays:
            results = jax_cudnn.cached_sdpa(q, k, v, lengths, **keyed)
        else:
            table = arrays["page_table"]
            results = jax_cudnn.paged_sdpa(q, k, v, table, lengths, **keyed)
        if problem.layout == "bshd":
            return results
        back = [problem.layout.index(letter) for letter in "bshd"]
        return (jnp.transpose(results[0], back), *results[1:])

    @property
    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """What the call is to return."""
        return truth(self.problem, self.query, *self.dense, self.sinks)


def draw(problem: Problem, seed: int = 0, *, poison: bool = True) -> Drawn:
    """Draw operands. What lies past a length is NaN with `poison`, tables have junk."""
    rng = np.random.default_rng([seed, problem.s, problem.t, problem.page])
    dtype = jnp.dtype(problem.dtype)
    b, room, heads = problem.b, problem.room, problem.k * problem.g

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    dense = [normal(b, room, problem.k, x) for x in (problem.d, problem.e)]
    is_past = np.arange(room) >= np.asarray(problem.lengths, np.int64)[:, None]
    stored = [x.copy() for x in dense]
    if poison:
        for x in stored:
            x[is_past] = np.nan
    table = None
    if problem.page:
        each = room // problem.page
        pages = b * each + 3
        order = rng.permutation(pages)[: b * each].reshape(b, each)
        for i, x in enumerate(stored):
            all_pages = normal(pages, problem.page, *x.shape[2:])
            if poison:
                all_pages[:] = np.nan
            shape = (b, each, problem.page, *x.shape[2:])
            all_pages[order] = x.reshape(shape)
            stored[i] = all_pages
        lengths = np.asarray(problem.lengths, np.int64)[:, None]
        used = -(-lengths // problem.page)
        junk = rng.choice([-1, pages, 2**31 - 1, -(2**31), 0], order.shape)
        table = jnp.asarray(
            np.asarray(np.where(np.arange(each) < used, order, junk), jnp.int32)
        )
    return Drawn(
        problem=problem,
        query=jnp.asarray(normal(b, problem.s, heads, problem.d)),
        key=jnp.asarray(stored[0]),
        value=jnp.asarray(stored[1]),
        lengths=jnp.asarray(np.asarray(problem.lengths, np.int32)),
        page_table=table,
        query_lengths=None
        if problem.query_lengths is None
        else jnp.asarray(np.asarray(problem.query_lengths, np.int32)),
        sinks=jnp.asarray(np.asarray(rng.standard_normal(heads), jnp.float32))
        if problem.sinks
        else None,
        dense=(dense[0], dense[1]),
    )


def in_pages(problem: Problem, page: int) -> Problem:
    """Return the same problem with pages of that many tokens; 0 for none."""
    return replace(problem, page=page)


# --- graphs ---------------------------------------------------------------------------

_SIZES = {"b": 4, "s": 3, "k": 3, "g": 2, "t": 11, "p": 7, "i": 4, "m": 3}
_PLAIN = (0, 1, 2, 3)
_BSHD = (0, 2, 1, 3)


def cached_graph(
    *,
    is_paged: bool = False,
    sizes: dict[str, int] | None = None,
    d: int = 8,
    e: int = 16,
    dtype: str = "f32",
    query_lengths: bool = False,
    with_stats: bool = True,
    order: tuple[int, ...] = _BSHD,
    is_causal: bool = True,
    window: tuple[int, ...] = (),
    scale: float = 0.3,
) -> Graph:
    """Build a graph of attention over a cache."""
    n = {**_SIZES, **(sizes or {})}
    first, tokens = (n["p"], n["i"]) if is_paged else (n["b"], n["t"])
    dims = {
        "query": (n["b"], n["k"] * n["g"], n["s"], d),
        "key": (first, n["k"], tokens, d),
        "value": (first, n["k"], tokens, e),
    }
    integers = {"key_lengths": (n["b"], 1, 1, 1)}
    if is_paged:
        integers["page_table"] = (n["b"], 1, n["m"], 1)
    if query_lengths:
        integers["query_lengths"] = (n["b"], 1, 1, 1)
    tensors = {
        name: Tensor(name=name, dtype=dtype, dims=each, order=order)  # type: ignore[arg-type]
        for name, each in dims.items()
    } | {
        name: Tensor(name=name, dtype="i32", dims=each, order=_PLAIN)
        for name, each in integers.items()
    }
    attributes = CachedAttributes(scale=scale, is_causal=is_causal, window=window)
    return sdpa_cached_graph(
        tensors, attributes=attributes, output_order=order, with_stats=with_stats
    )
