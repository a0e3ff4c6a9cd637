# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache in jax.numpy; roles and letters as in node_kinds.json.

Pages are gathered first, which takes memory for b*m*i tokens. From there on it is the
attention of reference/attention/sdpa.py.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph.attention.cached import CachedAttributes
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.reference.attention import sdpa
from jax_cudnn.reference.attention.sequences import cut_window, farthest

Operands = Mapping[str, jax.Array]


def forward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return output and log-sum-exp; a row that sees no key gives 0 and -inf.

    A row that sees a token that the cache has no room for gives NaN, and so do its
    derivatives. A page number that is none is taken for the nearest one. Nothing of
    what lies past a length is read: it may be NaN, and its gradient is 0.
    """
    assert isinstance(attributes, CachedAttributes)
    key, value = (_per_sequence(inputs, role) for role in ("key", "value"))
    s, t = inputs["query"].shape[2], key.shape[2]
    ends = Ends.of(inputs["key_lengths"], inputs.get("query_lengths"), s, t)
    columns = jnp.arange(t, dtype=jnp.int32)
    is_inside = columns[None, None, :, None] < ends.key_lengths
    first, last = ends.band(attributes)
    columns = columns[None, None, None, :]
    given = {
        "query": inputs["query"],
        "key": jnp.where(is_inside, key, 0),
        "value": jnp.where(is_inside, value, 0),
        "mask": (first <= columns) & (columns <= last),
        "query_lengths": ends.query_lengths,
    }
    plain = attributes.without_band()
    results = sdpa.forward(plain, given, outputs)
    # A factor, so that derivatives are NaN as well.
    factor = jnp.where(ends.lost_rows(attributes), jnp.nan, 1)
    return {role: x * factor.astype(x.dtype) for role, x in results.items()}


def _per_sequence(inputs: Operands, role: str) -> jax.Array:
    """Return the keys or values of each sequence, (b, k, t, d)."""
    x = inputs[role]
    if "page_table" not in inputs:
        return x
    table = inputs["page_table"][:, 0, :, 0]
    found = jnp.swapaxes(jnp.take(x, table, axis=0, mode="clip"), 1, 2)
    b, k, m, i, d = found.shape
    return jnp.reshape(found, (b, k, m * i, d))


class Ends(NamedTuple):
    """The ends of sequences, and the positions of their queries.

    A sequence may have more tokens than the ``room`` of the cache: positions count from
    its true end. All arrays are (b, 1, 1, 1), but ``positions`` (b, 1, s, 1).
    """

    key_lengths: jax.Array
    query_lengths: jax.Array
    positions: jax.Array
    room: int

    @classmethod
    def of(
        cls,
        key_lengths: jax.Array,
        query_lengths: jax.Array | None,
        s: int,
        t: int,
        rows: jax.Array | None = None,
    ) -> "Ends":
        """Return them for lengths (b, 1, 1, 1); None stands for s queries each.

        The queries are some `rows`, or all.
        """
        keys = jnp.clip(key_lengths, 0, farthest(t))
        queries = jnp.full_like(keys, s)
        if query_lengths is not None:
            queries = jnp.clip(query_lengths, 0, s)
        rows = jnp.arange(s, dtype=jnp.int32) if rows is None else rows
        return cls(keys, queries, keys - queries + rows[None, None, :, None], t)

    @property
    def in_cache(self) -> "Ends":
        """The same without the tokens that the cache has no room for.

        These are the last ones of a sequence, so they are the last of its queries.
        """
        keys = jnp.minimum(self.key_lengths, self.room)
        queries = self.query_lengths - (self.key_lengths - keys)
        return self._replace(key_lengths=keys, query_lengths=jnp.maximum(queries, 0))

    def band(self, attributes: CachedAttributes) -> tuple[jax.Array, jax.Array]:
        """Return the first and the last key that each query sees."""
        first = jnp.zeros_like(self.positions)
        last = jnp.broadcast_to(self.key_lengths - 1, self.positions.shape)
        if attributes.is_causal:
            last = jnp.minimum(last, self.positions)
        if attributes.window:
            left, right = cut_window(attributes.window)
            first = jnp.maximum(first, self.positions - left)
            last = jnp.minimum(last, self.positions + right)
        return first, last

    def live_rows(self, attributes: CachedAttributes) -> jax.Array:
        """Return, as (b, 1, s, 1), which queries there are that see a key."""
        first, last = self.band(attributes)
        rows = self.positions - self.key_lengths + self.query_lengths
        return (first <= last) & (rows < self.query_lengths)

    def lost_rows(self, attributes: CachedAttributes) -> jax.Array:
        """Return, as (b, 1, s, 1), which queries see a key that is in no cache."""
        _, last = self.band(attributes)
        return self.live_rows(attributes) & (last >= self.room)
