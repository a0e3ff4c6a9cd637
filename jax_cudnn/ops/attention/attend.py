# SPDX-License-Identifier: Apache-2.0
"""Runs attention's graph on operands that are checked, as `jax_cudnn.sdpa` has them."""

import itertools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes, Tensor, sdpa_graph
from jax_cudnn.lowering import (
    axes_in,
    explicit_mesh,
    explicit_spec,
    gathered_along,
    run_graph,
    sharded_where_free,
    typed_as,
)
from jax_cudnn.ops.attention.layouts import Layout, order_of, sizes_in
from jax_cudnn.ops.attention.qkv import Qkv
from jax_cudnn.ops.common.arguments import tensor

_PLAIN = (0, 1, 2, 3)


class Operands(NamedTuple):
    """The operands with a batch axis; absent ones are None.

    Query, key and value have the ``layout``; the others do not depend on it. Where all
    three are in ``qkv``, these are their types only.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    query_lengths: jax.Array | None
    key_lengths: jax.Array | None
    query_starts: jax.Array | None = None
    key_starts: jax.Array | None = None
    dropout_seed: jax.Array | None = None
    dropout_offset: jax.Array | None = None
    # 1 where a probability is kept, in place of seed and offset.
    dropout_mask: jax.Array | None = None
    # What a score_mod reads: graph/attention/score_mod.py.
    mod_a: jax.Array | None = None
    mod_b: jax.Array | None = None
    mod_c: jax.Array | None = None
    mod_d: jax.Array | None = None
    # (1, h, 1, 1), a score of one more key for each head.
    sinks: jax.Array | None = None
    layout: Layout = "bshd"
    qkv: Qkv | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], layout: Layout = "bshd") -> "Operands":
        """Return those of a mapping by role; what else is in it is left out.

        Query, key and value are arrays.
        """
        roles = {role: given.get(role) for role in cls._fields}
        return cls(**{**roles, "layout": layout, "qkv": None})

    @property
    def given(self) -> dict[str, jax.Array]:
        """The arrays that are there, by role."""
        roles = self._asdict()
        del roles["layout"]
        if (qkv := roles.pop("qkv")) is not None:
            for role in ("query", "key", "value"):
                del roles[role]
            roles = {"qkv": qkv.array, **roles}
        return {role: x for role, x in roles.items() if x is not None}

    @property
    def may_hide_keys(self) -> bool:
        """Whether some array may hide keys; a bias does with -inf."""
        roles = ("bias", "mask", "query_lengths", "key_lengths")
        return any(getattr(self, role) is not None for role in roles)

    @property
    def apart(self) -> "Operands":
        """The same with query, key and value as arrays of their own."""
        if self.qkv is None:
            return self
        query, key, value = self.qkv.apart()
        return self._replace(query=query, key=key, value=value, qkv=None)

    @property
    def query_sizes(self) -> tuple[int, int, int, int]:
        """Batch size, count of queries, query heads and head size."""
        return sizes_in(self.layout, self.query)

    @property
    def key_count(self) -> int:
        """The number of keys of a batch entry."""
        return sizes_in(self.layout, self.key)[1]


def attend_by_rows(
    operands: Operands,
    attributes: SdpaAttributes,
    call: Options,
    *,
    with_lse: bool,
    with_max: bool = False,
) -> tuple[jax.Array, ...]:
    """Return the output in the layout; log-sum-exp and maximum (b, s, h) if asked for.

    Queries, keys and values in one array stay there, but for an array without elements.
    """
    if operands.qkv is not None and not operands.qkv.array.size:
        operands = operands.apart
    output, *rows = attend(
        operands, attributes, call, with_stats=with_lse, with_max=with_max
    )
    return (output, *map(by_rows, rows))


def attend(
    operands: Operands,
    attributes: SdpaAttributes,
    call: Options,
    *,
    with_stats: bool,
    with_max: bool = False,
) -> list[jax.Array]:
    """Return the output in the layout; log-sum-exp and maximum if asked for.

    These two are (b, h, s, 1).
    """
    if operands.qkv is None:
        operands = _with_heads_of_devices(operands)
    given, qkv = operands.given, operands.qkv
    tensors = {} if qkv is None else {"qkv": qkv.tensor()}
    graph = sdpa_graph(
        {**tensors, **sdpa_tensors(given, operands.layout)},
        attributes=attributes,
        output_order=order_of(operands.layout),
        query_heads=operands.query_sizes[2],
        with_stats=with_stats,
        with_max=with_max,
    )
    arrays = [*given.values()]
    if qkv is not None:
        return run_graph(graph, arrays, call)
    wanted = _sharding_of_query(given)
    output, *rows = run_graph(graph, arrays, call, wanted=wanted)
    axes = [(i, i) for i in range(output.ndim - 1)]
    return [sharded_where_free(output, given["query"], axes), *rows]


def _with_heads_of_devices(operands: Operands) -> Operands:
    """Return operands with a key head for each device that has query heads by its type.

    Where several devices share a key head, each gets a copy of it. The name of an axis
    of a mesh does not say which of them these are.
    """
    query, axis = operands.query, operands.layout.index("h")
    names = axes_in(explicit_spec(query)[axis])
    if not names:
        return operands
    sizes, heads = explicit_mesh([query]).shape, operands.key.shape[axis]
    counts = [*itertools.accumulate((sizes[name] for name in names), operator.mul)]
    is_shared = counts[-1] % max(heads, 1) == 0 and query.shape[axis] % counts[-1] == 0
    if not is_shared or heads in (0, 1, *counts):
        return operands

    def others(x: jax.Array) -> set[str]:
        entries = (e for i, e in enumerate(explicit_spec(x)) if i != axis)
        return {name for entry in entries for name in axes_in(entry)}

    def of_devices(x: jax.Array) -> jax.Array:
        whole = gathered_along(x, (axis,))
        spec = [*explicit_spec(whole)]
        spec[axis] = names
        repeated = jnp.repeat(whole, counts[-1] // heads, axis)
        return typed_as(repeated, spec, like=[query])

    if not (others(operands.key) | others(operands.value)).isdisjoint(names):
        return operands
    return operands._replace(
        key=of_devices(operands.key), value=of_devices(operands.value)
    )


def _sharding_of_query(given: Mapping[str, jax.Array]) -> tuple[Any, ...]:
    """Return how the output's axes that are not of size 1 are sharded: as queries are.

    This decides where keys or values are sharded otherwise, as in JAX's products.
    """
    query = given["query"]
    shape = (*query.shape[:-1], given["value"].shape[-1])
    spec = (*explicit_spec(query)[:-1], None)
    return tuple(e for e, size in zip(spec, shape, strict=True) if size != 1)


def sdpa_tensors(
    operands: Mapping[str, jax.Array], layout: Layout = "bshd"
) -> dict[str, Tensor]:
    """Return the tensors of operands by role, in the operands' order."""
    return {
        role: tensor(role, x, stored_order(role, layout))
        for role, x in operands.items()
        if role != "qkv"
    }


def stored_order(role: str, layout: Layout = "bshd") -> tuple[int, ...]:
    """Return the order in which an operand or result stores (b, h, s, d)."""
    return order_of(layout) if role in _WITH_LAYOUT else _PLAIN


def logical(
    operands: Mapping[str, jax.Array], layout: Layout = "bshd"
) -> dict[str, jax.Array]:
    """Return operands with their axes in the order (b, h, s, d), as references do."""
    orders = {role: stored_order(role, layout) for role in operands}
    return {
        role: jnp.transpose(x, [orders[role].index(axis) for axis in range(4)])
        for role, x in operands.items()
    }


_WITH_LAYOUT = ("query", "key", "value", "output", "grad_output")


def of_rows(x: jax.Array) -> jax.Array:
    """Return numbers of rows, (b, s, h), as graphs have them, (b, h, s, 1)."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def by_rows(x: jax.Array) -> jax.Array:
    """Return numbers of rows, (b, h, s, 1), as (b, s, h)."""
    return jnp.swapaxes(x[..., 0], 1, 2)
