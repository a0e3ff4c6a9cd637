# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of attention over a cache or over pages, and runs its graph."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.graph import CachedAttributes, sdpa_cached_graph
from jax_cudnn.lowering import run_graph, typed_along
from jax_cudnn.ops.attention.attend import by_rows, logical, stored_order
from jax_cudnn.ops.attention.caches.kv_cache import check_page_table
from jax_cudnn.ops.attention.layouts import (
    PAGE_LAYOUTS,
    Layout,
    check_layout,
    order_of,
    sizes_in,
)
from jax_cudnn.ops.attention.operands import (
    check_groups,
    check_lengths,
    check_one_dtype,
)
from jax_cudnn.ops.attention.options import AttentionCall, TokenCounts
from jax_cudnn.ops.attention.sinks import check_sinks, with_sinks
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_dtype,
    check_flag,
    clipped,
    describe,
    is_more,
    tensor,
    why_symbolic,
)
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.reference.attention.cached import forward as attention
from jax_cudnn.reference.attention.sequences import farthest


def run_cached(
    op: str,
    query: ArrayLike,
    caches: dict[str, ArrayLike],
    lengths: ArrayLike,
    given: AttentionCall,
    *,
    page_table: ArrayLike | None = None,
    layout: str,
    return_residual: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Return what the function named `op` returns.

    `caches` are keys and values by the names of these arguments.
    """
    call = given.options(op)
    layout = check_layout(op, layout, *(PAGE_LAYOUTS if op == _PAGED else ()))
    operands = _canonicalize(
        op, query, caches, lengths, given.query_seq_lengths, page_table, layout
    )
    with on_behalf_of(op, "sdpa"):
        checked = given.attributes(
            given.visibility("sdpa"),
            TokenCounts(operands.room, operands.room),
            operands.query.shape[3],
            operands.query.dtype,
        )
    attributes = CachedAttributes(**checked.common())
    if given.query_seq_lengths is None and (attributes.is_causal or attributes.window):
        _check_room(op, operands, caches)
    sinks = check_sinks(op, given.sinks, sizes_in(layout, operands.query)[2])
    with_residual = check_flag(op, "return_residual", return_residual)
    with_stats = with_residual or sinks is not None
    output, *stats = _attend(op, operands, attributes, call, with_stats=with_stats)
    if not with_stats:
        return output
    lse = by_rows(stats[0])
    if sinks is not None:
        sinks = typed_along(sinks, lse, 2)
        output, lse = with_sinks(output, lse, sinks, layout)
    return (output, lse) if with_residual else output


class _Operands(NamedTuple):
    """The operands by their roles, as arrays; absent ones are None.

    Query, key and value have the ``layout``, with pages in place of sequences.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    page_table: jax.Array | None
    key_lengths: jax.Array
    query_lengths: jax.Array | None
    layout: Layout

    @property
    def given(self) -> dict[str, jax.Array]:
        roles = self._asdict()
        del roles["layout"]
        return {role: x for role, x in roles.items() if x is not None}

    @property
    def room(self) -> int:
        """The largest number of tokens of a sequence."""
        pages = 1 if self.page_table is None else self.page_table.shape[2]
        return sizes_in(self.layout, self.key)[1] * pages

    @property
    def orders(self) -> dict[str, tuple[int, ...]]:
        """The orders in which the arrays store their logical axes, by role."""
        return {role: stored_order(role, self.layout) for role in self.given}


_PAGED = "paged_sdpa"


def _attend(
    op: str,
    operands: _Operands,
    attributes: CachedAttributes,
    call: Options,
    *,
    with_stats: bool,
) -> list[jax.Array]:
    """Return the output in the layout and, if asked for, log-sum-exp (b, h, s, 1)."""
    given, orders = operands.given, operands.orders
    output_order = order_of(operands.layout)
    if reason := why_symbolic(**given):
        check_implementation(op, reason, call)
        results = attention(attributes, logical(given, operands.layout), {})
        output = jnp.transpose(results["output"], output_order)
        return [output.astype(operands.query.dtype), results["stats"]]
    graph = sdpa_cached_graph(
        {role: tensor(role, x, orders[role]) for role, x in given.items()},
        attributes=attributes,
        output_order=output_order,
        with_stats=with_stats,
    )
    # Where lengths and page numbers are is no one's choice: they follow the others.
    movable = given.keys() - {"query", "key", "value"}
    return run_graph(graph, list(given.values()), call, movable=movable)


# --- checks ---------------------------------------------------------------------------


def _canonicalize(
    op: str,
    query: ArrayLike,
    caches: dict[str, ArrayLike],
    lengths: ArrayLike,
    query_lengths: ArrayLike | None,
    page_table: ArrayLike | None,
    layout: Layout,
) -> _Operands:
    """Check the operands together and give each its dtype and axes."""
    given = {"query": query, **caches}
    arrays = {name: as_operand(op, name, x) for name, x in given.items()}
    q, k, v = arrays.values()
    _check_dtypes(op, arrays)
    is_paged = op == _PAGED
    checked = functools.partial(check_lengths, op, "sequence")
    _check_shapes(op, arrays, _PAGES if is_paged else _CACHE, layout)
    b, s, _, _ = sizes_in(layout, q)
    table = None
    pages, t, _, _ = sizes_in(layout, k)
    if is_paged:
        beside = f"query {describe(q)}"
        numbers = check_page_table(op, page_table, beside, b)  # type: ignore[arg-type]
        t = t * numbers.shape[1]
        table = jnp.reshape(clipped(numbers, pages - 1), (b, 1, numbers.shape[1], 1))
    return _Operands(
        query=q,
        key=k,
        value=v,
        page_table=table,
        key_lengths=checked("key_value_seq_lengths", lengths, b, farthest(t)),
        query_lengths=None
        if query_lengths is None
        else checked("query_seq_lengths", query_lengths, b, s),
        layout=layout,
    )


def _check_dtypes(op: str, arrays: dict[str, jax.Array]) -> None:
    (first, q), *others = arrays.items()
    names = ", ".join(name for name, _ in others[:-1])
    names = f"{first}, {names} and {others[-1][0]}"
    check_dtype(op, first, q, advice=f"Convert {names} to one of them.")
    check_one_dtype(op, q, **dict(others))


# What the axes of queries, and of keys and values are, tokens before heads.
_QUERY = ("sequences", "query length", "heads", "head size")
_CACHE = ("sequences", "tokens", "heads", "head size")
_PAGES = ("pages", "tokens of a page", "heads", "head size")


def _check_shapes(
    op: str, arrays: dict[str, jax.Array], axes: Sequence[str], layout: Layout
) -> None:
    (_, q), (key, k), (value, v) = arrays.items()
    shapes = ", ".join(
        f"{name} {'is ' if name == 'query' else ''}{describe(x)}"
        for name, x in arrays.items()
    )
    if layout != "bshd":
        shapes += f' (layout="{layout}")'

    def in_words(axes: Sequence[str]) -> str:
        return ", ".join(axes["bshd".index(letter)] for letter in layout)

    if q.ndim != 4:
        place = ", ".join([":"] * layout.index("s") + ["None"])
        advice = f" For one query of each sequence insert its axis: query[{place}]."
        raise ValueError(
            f"{op}: {shapes}. query must be ({in_words(_QUERY)})."
            f"{advice if q.ndim == 3 else ''}"
        )
    for name, x in ((key, k), (value, v)):
        if x.ndim != 4:
            raise ValueError(f"{op}: {shapes}. {name} must be ({in_words(axes)}).")
    of_query, of_key, of_value = (sizes_in(layout, x) for x in (q, k, v))
    for axis, what in enumerate(axes[:3]):
        if of_key[axis] != of_value[axis]:
            raise ValueError(
                f"{op}: {key} has {of_key[axis]} {what} but {value} "
                f"{of_value[axis]}: {shapes}. They must be equal."
            )
    if axes is _CACHE and of_query[0] != of_key[0]:
        raise ValueError(
            f"{op}: query has {of_query[0]} sequences but {key} {of_key[0]}: {shapes}. "
            "They must be equal."
        )
    for axis, what in enumerate(("no page", "pages without tokens")):
        if axes is _PAGES and _is_zero(of_key[axis]):
            raise ValueError(
                f"{op}: {key} has {what}: {shapes}. There must be at least one, also "
                "where all lengths are 0."
            )
    if of_query[3] != of_key[3]:
        raise ValueError(
            f"{op}: query has head size {of_query[3]} but {key} {of_key[3]}: {shapes}. "
            f"They must be equal; that of {value} may differ."
        )
    check_groups(op, of_query[2], of_key[2], shapes, f"{key} and {value}")


def _check_room(op: str, operands: _Operands, caches: dict[str, ArrayLike]) -> None:
    """Raise ValueError for more queries than tokens that there is room for."""
    (name, _), *_ = caches.items()
    query, key, table = operands.query, operands.key, operands.page_table
    s, t = (sizes_in(operands.layout, x)[1] for x in (query, key))
    shapes = f"query is {describe(query)}, {name} {describe(key)}"
    if table is not None:
        t = t * table.shape[2]
        shapes += f", with {table.shape[2]} pages of a sequence in page_table"
    if operands.layout != "bshd":
        shapes += f' (layout="{operands.layout}")'
    if is_more(s, t):
        raise ValueError(
            f"{op}: {s} queries of a sequence are tokens of it, and there is room for "
            f"{t}: {shapes}. Make room for all of them, or pass query_seq_lengths if "
            "some are padding."
        )


def _is_zero(size: object) -> bool:
    return isinstance(size, int) and size == 0  # A symbolic size is none.
