# SPDX-License-Identifier: Apache-2.0
"""Describes where the sequences that share a row begin and end.

`Packed` is the mask that says it. Letters: b rows of s queries and t keys, each row
with n sequences.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.lowering import is_on_host
from jax_cudnn.ops.attention.visibility.masks import Mask, mask_class
from jax_cudnn.ops.common.arguments import as_operand, describe


@mask_class
class Packed(Mask):
    """Each row contains several sequences; a query sees the keys of its own sequence.

    Sequence j of a row has the tokens from ``offsets[j]`` to ``offsets[j + 1]``: the
    cumulative lengths, beginning with 0. Tokens of no sequence are padding. Padding is
    not read and may be NaN; its outputs and gradients are 0. A sequence may be empty.

    With lengths, sequence j has `lengths[j]` tokens from ``offsets[j]`` on. So there
    may be gaps, and the sequences may be in any order. They must not overlap: the
    results of overlapping sequences are not defined. The last of n + 1 offsets is then
    not read.

    The call that takes the mask checks offsets and lengths that are available on the
    host: those of NumPy, of Python, and of JAX on a CPU. Traced arrays and arrays on
    a GPU are not checked, since the host would have to wait for them. In these,
    tokens before the first offset belong to no sequence, an offset below an earlier
    one counts as the largest earlier one, and offsets beyond the tokens are clipped.
    If you pass lengths as offsets by mistake, outputs are 0: make masks by
    :meth:`from_lengths`.

    `is_causal`, windows, `Causal` and `Window` count positions within each sequence.
    Masks that are arrays, and a bias, count from the row's start.

    Attributes:
      query_offsets: integers (n + 1,), or (b, n + 1) for rows that differ. Also (n,) or
        (b, n) with lengths.
      key_offsets: likewise. Default None, or the same array: the sequences of the keys
        are those of the queries.
      query_lengths: integers (n,) or (b, n). Default None: up to the next offset.
      key_lengths: likewise. Default None: those of the queries if `key_offsets` is
        None, else up to the next offset.
      max_length: an int, or one for queries and one for keys: no sequence is longer.
        Tokens beyond it are padding. It is part of the program, and the kernel's launch
        and workspace grow with it. Default None: a row.
    """

    _arrays = ("query_offsets", "key_offsets", "query_lengths", "key_lengths")
    is_packing = True
    query_offsets: ArrayLike
    key_offsets: ArrayLike | None = None
    query_lengths: ArrayLike | None = None
    key_lengths: ArrayLike | None = None
    max_length: int | tuple[int, int] | None = None

    @property
    def has_same_sequences(self) -> bool:
        """Whether queries and keys have the same sequences, whatever their numbers."""
        if self.key_offsets is None:
            return self.key_lengths is None
        is_one = self.key_offsets is self.query_offsets
        return is_one and self.key_lengths is self.query_lengths

    def __post_init__(self) -> None:
        if self.max_length is not None:
            object.__setattr__(self, "max_length", _max_length(self.max_length))

    @classmethod
    def from_lengths(
        cls,
        query_lengths: ArrayLike,
        key_lengths: ArrayLike | None = None,
        *,
        max_length: int | tuple[int, int] | None = None,
    ) -> Packed:
        """Return consecutive sequences of these lengths, without gaps between them.

        Args:
          query_lengths: integers (n,), or (b, n) for rows that differ. Lengths below 0
            count as 0.
          key_lengths: likewise. Default None: as `query_lengths`.
          max_length: as in the class.
        """
        offsets = [
            None if x is None else _cumulative(name, x)
            for name, x in (
                ("query_lengths", query_lengths),
                ("key_lengths", key_lengths),
            )
        ]
        assert offsets[0] is not None
        return cls(offsets[0], offsets[1], max_length=max_length)

    @classmethod
    def from_segment_ids(
        cls,
        ids: ArrayLike,
        max_segments: int,
        *,
        padding: int | None = None,
        max_length: int | None = None,
    ) -> Packed:
        """Return the runs of equal numbers as sequences, of queries and keys alike.

        A sequence ends where the number changes, so a number that comes again later in
        the row begins another sequence; :class:`Segments` takes it for the same one.

        Args:
          ids: integers (s,) or (b, s), the segment of each token.
          max_segments: the most runs that a row has, an int. Further runs are refused
            where the host has the ids (see the class). Of ids that are traced or on a
            GPU, tokens of further runs are padding: their outputs are 0.
          padding: the number of tokens that are padding, often 0. Default None: there
            are none.
          max_length: as in the class.

        Raises:
          ValueError: ids with other axes, or with more runs than `max_segments`.
          TypeError: ids that are no integers.
        """
        array = _integers("segment ids", ids)
        if array.ndim not in (1, 2):
            raise ValueError(
                f"Packed: the segment ids are {describe(array)}. Pass one number per "
                "token, shape [length] or [batch, length]."
            )
        count = _count("max_segments", max_segments)
        if is_on_host(ids) and (found := _most_runs(np.asarray(ids), padding)) > count:
            raise ValueError(
                f"Packed: the segment ids have {found} runs in a row, but max_segments "
                f"is {count}. Raise it, or sort the ids."
            )
        rows = array if array.ndim == 2 else array[None]
        is_own = jnp.ones(rows.shape, bool) if padding is None else rows != padding
        is_first = jnp.arange(rows.shape[1], dtype=jnp.int32)[None] == 0
        is_new = is_own & ((rows != jnp.roll(rows, 1, axis=1)) | is_first)
        run = jnp.cumsum(is_new, axis=1, dtype=jnp.int32) - 1
        numbers = jnp.arange(count, dtype=jnp.int32)[None, None]
        is_in = is_own[:, :, None] & (run[:, :, None] == numbers)
        lengths = jnp.sum(is_in, axis=1, dtype=jnp.int32)
        starts = jnp.argmax(is_in, axis=1).astype(jnp.int32)
        return cls(starts, query_lengths=lengths, max_length=max_length)


def packing(
    packed: Packed, sizes: tuple[int, int, int], row_lengths: Sequence[Any]
) -> dict[str, jax.Array]:
    """Return starts and lengths of the sequences by role, each (b, n, 1, 1).

    ``sizes`` are b, s and t, and ``row_lengths`` the lengths (b, 1, 1, 1) of the rows
    of queries and of keys, or None; what is beyond them belongs to no sequence.
    """
    b, *lengths = sizes
    given = {
        "query": (packed.query_offsets, packed.query_lengths),
        "key": (packed.key_offsets, packed.key_lengths),
    }
    if packed.key_offsets is None:
        own = packed.query_lengths if packed.key_lengths is None else packed.key_lengths
        given["key"] = (packed.query_offsets, own)
    found: dict[str, jax.Array] = {}
    for kind, size, end in zip(given, lengths, row_lengths, strict=True):
        offsets, own = given[kind]
        name = "query" if packed.key_offsets is None else kind
        starts, counts = _spans(kind, f"{name}_offsets", offsets, own, size)
        if starts.shape[1] == 0:  # An empty sequence stands for none at all.
            starts = counts = jnp.zeros((starts.shape[0], 1), jnp.int32)
        most = jnp.asarray(size, jnp.int32)
        starts = jnp.clip(starts, 0, most)
        counts = jnp.clip(counts, 0, most - starts)
        if end is not None:
            counts = jnp.clip(counts, 0, jnp.maximum(end[:, :, 0, 0] - starts, 0))
        for name, x in ((f"{kind}_lengths", counts), (f"{kind}_starts", starts)):
            if x.shape[0] not in (1, b):
                raise ValueError(
                    f"Packed: there are sequences for {x.shape[0]} rows, but query has "
                    f"{b}. Pass offsets and lengths of one row, or of each."
                )
            found[name] = jnp.broadcast_to(x, (b, x.shape[1]))[:, :, None, None]
    counts = [found[f"{kind}_lengths"].shape[1] for kind in given]
    if counts[0] != counts[1]:
        raise ValueError(
            f"Packed: the queries have {counts[0]} sequences, but the keys "
            f"{counts[1]}. They must have as many; those without tokens have length 0."
        )
    return found


def longest(packed: Packed, s: int, t: int) -> tuple[int, ...]:
    """Return how many queries and keys a sequence has at most; () for whole rows."""
    if packed.max_length is None:
        return ()
    assert isinstance(packed.max_length, tuple)
    if packed.max_length[0] >= s and packed.max_length[1] >= t:
        return ()
    return packed.max_length


def _spans(
    kind: str, name: str, offsets: ArrayLike, lengths: ArrayLike | None, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return starts and lengths (b or 1, n) of sequences among so many tokens."""
    array = _rows(name, offsets)
    if lengths is None:
        if array.shape[1] < 1:
            raise ValueError(
                f"Packed: {name} is {describe(array)}. Pass n + 1 cumulative lengths "
                "for n sequences, beginning with 0."
            )
        if is_on_host(offsets):
            _check_offsets(name, np.atleast_2d(np.asarray(offsets)), size)
        array = jax.lax.cummax(jnp.maximum(array, 0), axis=1)
        return array[:, :-1], jnp.diff(array, axis=1)
    counts = _rows(f"{kind}_lengths", lengths)
    n = counts.shape[1]
    if array.shape[1] not in (n, n + 1):
        raise ValueError(
            f"Packed: {name} is {describe(array)} with {n} lengths. Pass as many "
            "offsets as lengths, or one more."
        )
    if is_on_host(offsets, lengths):
        _check_apart(kind, offsets, lengths, size)
    return array[:, :n], counts


def _check_offsets(name: str, offsets: np.ndarray, size: int) -> None:
    """Refuse offsets that are no cumulative lengths of some of the tokens."""
    advice = (
        "Offsets are cumulative lengths that begin with 0, as 0, 5, 9, 12 for lengths "
        "of 5, 4 and 3. Packed.from_lengths makes them of lengths."
    )
    for row in offsets.tolist():
        while len(row) > 1 and row[-1] in (0, -1):
            row.pop()  # Data loaders fill up with these; no sequence has tokens there.
        if row[0] != 0:
            raise ValueError(
                f"Packed: {name} begins with {row[0]}. {advice} For tokens of no "
                "sequence in front, pass lengths in addition to the offsets."
            )
        for before, after in itertools.pairwise(row):
            if after < before:
                raise ValueError(
                    f"Packed: {name} has {after} after {before}, and must not "
                    f"decrease. {advice}"
                )
        if isinstance(size, int) and row[-1] > size:
            raise ValueError(
                f"Packed: {name} ends with {row[-1]}, and a row has {size} tokens. "
                f"{advice} Tokens after the last sequence are padding."
            )


def _check_apart(kind: str, offsets: ArrayLike, lengths: ArrayLike, size: int) -> None:
    """Refuse sequences that overlap, or that have tokens which a row lacks."""
    counts = np.atleast_2d(np.asarray(lengths))
    starts = np.atleast_2d(np.asarray(offsets))[:, : counts.shape[1]]
    for first, count in zip(*np.broadcast_arrays(starts, counts), strict=True):
        own = sorted(
            (int(a), int(a) + int(c))
            for a, c in zip(first, count, strict=True)
            if c > 0
        )
        for (_, end), (start, _) in itertools.pairwise(own):
            if start < end:
                raise ValueError(
                    f"Packed: the {kind} sequences overlap: one ends at token {end} "
                    f"and another begins at {start}. Each token belongs to one at most."
                )
        if own and (own[0][0] < 0 or (isinstance(size, int) and own[-1][1] > size)):
            start, end = own[0] if own[0][0] < 0 else own[-1]
            raise ValueError(
                f"Packed: a {kind} sequence has the tokens from {start} to {end}, and "
                f"a row has {size}. Packed.from_lengths puts sequences of these "
                "lengths one after another."
            )


def _most_runs(ids: np.ndarray, padding: int | None) -> int:
    """Return how many runs of equal ids a row has at most."""
    rows = np.atleast_2d(ids)
    is_new = np.ones(rows.shape, bool)
    is_new[:, 1:] = rows[:, 1:] != rows[:, :-1]
    if padding is not None:
        is_new &= rows != padding
    return int(np.max(np.sum(is_new, axis=1), initial=0))


def _rows(name: str, x: ArrayLike) -> jax.Array:
    array = _integers(name, x)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"Packed: {name} is {describe(array)}. Pass numbers for all rows, or one "
            "row of them per batch entry."
        )
    if array.dtype != jnp.int32:
        info = jnp.iinfo(array.dtype)
        if info.max > 2**31 - 1:
            array = jnp.minimum(array, 2**31 - 1)
        array = array.astype(jnp.int32)
    return array if array.ndim == 2 else array[None]


def _cumulative(name: str, lengths: ArrayLike) -> jax.Array | np.ndarray:
    array = _rows(name, lengths)
    if is_on_host(lengths):  # Their sums stay there, where they are checked.
        counts = np.atleast_2d(np.asarray(lengths)).astype(np.int64)
        sums = np.cumsum(np.maximum(counts, 0), axis=1)
        return np.pad(np.minimum(sums, 2**31 - 1), ((0, 0), (1, 0))).astype(np.int32)
    ends = jnp.cumsum(jnp.maximum(array, 0), axis=1, dtype=jnp.int32)
    return jnp.pad(ends, ((0, 0), (1, 0)))


def _integers(name: str, x: ArrayLike) -> jax.Array:
    array = as_operand("sdpa", f"Packed: {name}", x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"Packed: {name} is {describe(array)}. They must be integers. Convert them "
            "to int32."
        )
    return array


def _max_length(value: Any) -> tuple[int, int]:
    sizes = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(sizes) != 2:
        raise ValueError(
            f"Packed: max_length is {value!r}. Pass an int, or one for queries and one "
            "for keys."
        )
    return (_count("max_length", sizes[0]), _count("max_length", sizes[1]))


def _count(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:  # A traced value is one of its causes.
        raise TypeError(
            f"Packed: {name} is {value!r}. Pass an int that is known when the program "
            "is traced, since it is part of it."
        ) from None
    if number < 1:
        raise ValueError(f"Packed: {name} is {number}. Pass an int above 0.")
    return number
