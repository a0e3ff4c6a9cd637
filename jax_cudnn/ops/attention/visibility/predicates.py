# SPDX-License-Identifier: Apache-2.0
"""Evaluates a mask's predicates for some queries and keys, by their positions.

A `Predicate` is a pytree. Its arrays are about whole sequences, in their
order, with an axis of batch entries in front, which may be 1. So each device of several
can ask for the part of a mask that belongs to its own tokens.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from jax_cudnn.graph import CachedAttributes
from jax_cudnn.ops.attention.layouts import Layout, rows_to
from jax_cudnn.reference.attention.cached import Ends
from jax_cudnn.reference.attention.sequences import (
    FARTHEST,
    PackedPositions,
    Spans,
    places,
)


class Tokens(NamedTuple):
    """Some tokens of a sequence: how many, and where. None: all of it, in order."""

    count: int
    positions: jax.Array | None = None

    @property
    def numbers(self) -> jax.Array:
        """Their positions in the sequence."""
        if self.positions is None:
            return jnp.arange(self.count, dtype=jnp.int32)
        return self.positions

    @property
    def ends(self) -> tuple[jax.Array, jax.Array]:
        """The first and the last position of some; positions ascend."""
        return self.numbers[0], self.numbers[-1]

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """Return what belongs to them of an array with an axis of tokens."""
        if self.positions is None:
            return x
        return jnp.take(x, self.positions, axis=axis, mode="clip")


class Predicate(Protocol):
    """A condition on a batch entry, a head, a query and a key."""

    def seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether queries see keys, as bool ([b], [h], queries, keys)."""
        ...

    def may_be_seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether some query may see some key: a cheap bound, bool ().

        There are some of both.
        """
        ...


_Class = TypeVar("_Class", bound=type[Any])


@dataclass_transform(frozen_default=True)
def _predicate(cls: _Class) -> _Class:
    made = dataclass(frozen=True, eq=False)(cls)
    names = [field.name for field in dataclasses.fields(made)]
    static = [name for name in names if name in made.static]
    data = [name for name in names if name not in static]
    jax.tree_util.register_dataclass(made, data_fields=data, meta_fields=static)
    return made


def _rows(numbers: jax.Array) -> jax.Array:
    return numbers[None, None, :, None]


def _columns(numbers: jax.Array) -> jax.Array:
    return numbers[None, None, None, :]


@_predicate
class SameSegment:
    """A query sees the keys of its own segment: numbers (b, s) and (b, t)."""

    static: ClassVar = ()
    query: jax.Array
    key: jax.Array

    def seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether queries see keys."""
        query, key = queries.of(self.query, 1), keys.of(self.key, 1)
        return (query[:, :, None] == key[:, None, :])[:, None]

    def may_be_seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether some query may see some key."""
        query, key = queries.of(self.query, 1), keys.of(self.key, 1)
        is_below = jnp.min(query, axis=1) <= jnp.max(key, axis=1)
        is_above = jnp.max(query, axis=1) >= jnp.min(key, axis=1)
        return jnp.any(is_below & is_above)


@_predicate
class InPrefix:
    """Every query sees the keys below a length, i32 (b,), and those up to itself."""

    static: ClassVar = ()
    length: jax.Array

    def seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether queries see keys."""
        columns = _columns(keys.numbers)
        length = jnp.reshape(self.length, (-1, 1, 1, 1))
        return (columns < length) | (columns <= _rows(queries.numbers))

    def may_be_seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether some query may see some key."""
        first, last = keys.ends[0], queries.ends[1]
        return jnp.any(first < self.length) | (first <= last)


@_predicate
class InBand:
    """A query sees the keys from `left` before its place to `right` after it.

    Its place is its position moved by an offset of the batch entry, (b,). None is no
    bound.
    """

    static: ClassVar = ("left", "right")
    offset: jax.Array
    left: int | None
    right: int | None

    def _holds(self, lowest: jax.Array, highest: jax.Array) -> jax.Array:
        """Whether key minus place is in the band for some number between both."""
        is_seen = jnp.ones((), bool)
        if self.left is not None:
            is_seen = is_seen & (highest >= -self.left)
        if self.right is not None:
            is_seen = is_seen & (lowest <= self.right)
        return is_seen

    def seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether queries see keys."""
        place = jnp.reshape(self.offset, (-1, 1, 1, 1)) + _rows(queries.numbers)
        difference = _columns(keys.numbers) - place
        return self._holds(difference, difference)

    def may_be_seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether some query may see some key."""
        (first, last), (start, end) = queries.ends, keys.ends
        lowest, highest = start - last - self.offset, end - first - self.offset
        return jnp.any(self._holds(lowest, highest))


@_predicate
class Overrun:
    """The queries that see a token which is not in the cache. Their results are NaN.

    Positions are those of `InBand`, whose bounds these are. A cache of ``room`` keys
    holds sequences of lengths (b,), with the numbers of their queries, (b,), among
    ``most`` rows.
    """

    static: ClassVar = ("left", "right", "most", "room")
    key_lengths: jax.Array
    query_lengths: jax.Array
    left: int | None
    right: int | None
    most: int
    room: int

    def put(
        self,
        queries: Tokens,
        output: jax.Array,
        rows: Sequence[jax.Array],
        layout: Layout = "bshd",
    ) -> tuple[jax.Array, ...]:
        """Return an output in its layout and numbers of rows (b, s, h), with NaN."""
        factor = jnp.where(self.lost(queries), jnp.nan, 1)[..., None]
        of_output = rows_to(layout, factor)[..., None]
        return (
            output * of_output.astype(output.dtype),
            *(x * factor.astype(x.dtype) for x in rows),
        )

    def lost(self, queries: Tokens) -> jax.Array:
        """Return which queries these are, as bool (b, s)."""
        keys, count = (
            jnp.reshape(x, (-1, 1, 1, 1))
            for x in (self.key_lengths, self.query_lengths)
        )
        ends = Ends.of(keys, count, self.most, self.room, queries.numbers)
        window = tuple(FARTHEST if x is None else x for x in (self.left, self.right))
        band = CachedAttributes(scale=1.0, is_causal=False, window=window)
        return ends.lost_rows(band)[:, 0, :, 0]


@_predicate
class InBlocks:
    """A table ([b], [h], blocks, blocks) says which keys a block of queries sees."""

    static: ClassVar = ("size",)
    table: jax.Array
    size: tuple[int, ...]

    def seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether queries see keys."""
        table = self.table
        for axis, tokens in ((2, queries), (3, keys)):
            if table.shape[axis] == 1:
                continue
            size = self.size[axis - 2]
            if tokens.positions is None:
                table = jnp.repeat(table, size, axis=axis)
                table = jax.lax.slice_in_dim(table, 0, tokens.count, axis=axis)
            else:
                blocks = tokens.positions // size
                table = jnp.take(table, blocks, axis=axis, mode="clip")
        return table

    def may_be_seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether some query may see some key."""
        return jnp.any(self.seen(queries, keys))


@_predicate
class InSequence:
    """A query sees the keys of its own sequence, within a band of places in it.

    Starts and lengths are (b, n). With `is_from_end` the places of queries count such
    that the last query has the place of the last key.
    """

    static: ClassVar = ("left", "right", "is_from_end")
    query_starts: jax.Array
    query_lengths: jax.Array
    key_starts: jax.Array
    key_lengths: jax.Array
    left: int | None = None
    right: int | None = None
    is_from_end: bool = False

    def _places(
        self, queries: Tokens, keys: Tokens
    ) -> tuple[PackedPositions, PackedPositions]:
        return (
            places(queries.numbers, Spans(self.query_starts, self.query_lengths)),
            places(keys.numbers, Spans(self.key_starts, self.key_lengths)),
        )

    def seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether queries see keys."""
        rows, columns = self._places(queries, keys)
        number = rows.number
        if self.is_from_end:
            more = self.key_lengths - self.query_lengths
            own = jnp.maximum(rows.sequence, 0)
            number = number + jnp.take_along_axis(more, own, axis=1)
        is_own = rows.sequence[:, :, None] == columns.sequence[:, None]
        is_seen = is_own & (rows.sequence >= 0)[:, :, None]
        difference = columns.number[:, None] - number[:, :, None]
        if self.left is not None:
            is_seen = is_seen & (difference >= -self.left)
        if self.right is not None:
            is_seen = is_seen & (difference <= self.right)
        return is_seen[:, None]

    def inside(self, queries: Tokens, keys: Tokens) -> tuple[jax.Array, jax.Array]:
        """Return which queries and which keys are in a sequence, bool (b, tokens)."""
        rows, columns = self._places(queries, keys)
        return rows.sequence >= 0, columns.sequence >= 0

    def may_be_seen(self, queries: Tokens, keys: Tokens) -> jax.Array:
        """Return whether some query may see some key."""

        def is_here(tokens: Tokens, starts: jax.Array, lengths: jax.Array) -> jax.Array:
            first, last = tokens.ends
            return (lengths > 0) & (starts <= last) & (starts + lengths > first)

        return jnp.any(
            is_here(queries, self.query_starts, self.query_lengths)
            & is_here(keys, self.key_starts, self.key_lengths)
        )
