# SPDX-License-Identifier: Apache-2.0
"""Checks the arrays of masks, and makes predicates of them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.visibility.bands import Bounds
from jax_cudnn.ops.attention.visibility.predicates import (
    InBand,
    InBlocks,
    InPrefix,
    Predicate,
    SameSegment,
)
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_integers,
    clipped,
    describe,
    in_front,
)
from jax_cudnn.reference.attention.sequences import FARTHEST, farthest


def segments(query: ArrayLike, key: ArrayLike | None, s: int, t: int) -> Predicate:
    """Return that a query sees the keys of its own segment."""
    query = _integers("Segments.query", query)
    key = query if key is None else _integers("Segments.key", key)
    for name, ids, size in (("query", query, s), ("key", key, t)):
        if ids.ndim not in (1, 2) or ids.shape[-1] != size:
            raise ValueError(
                f"Segments: {name} is {describe(ids)}. It must have one number per "
                f"{name}, shape [{size}] or [batch, {size}]."
            )
    return SameSegment(*(jnp.reshape(x, in_front(x.shape, 2)) for x in (query, key)))


def prefix(length: ArrayLike, t: int) -> Predicate:
    """Return that every query sees the first keys of t, and those up to itself."""
    length = _integers("Prefix.length", length)
    if length.ndim > 1:
        raise ValueError(
            f"Prefix: length is {describe(length)}. It must be one number, or one per "
            "batch entry."
        )
    return InPrefix(jnp.reshape(clipped(length, t), (-1,)))


def blocks(table: ArrayLike, size: tuple[int, ...], s: int, t: int) -> Predicate:
    """Return that a table says which blocks of keys a block of queries sees."""
    table = bools("Blocks.table", table)
    lengths = {2: s, 3: t}
    sizes = dict(zip(lengths, size, strict=True))
    for axis, length in lengths.items():
        count = -(-length // sizes[axis])
        if table.shape[axis] not in (1, count):
            raise ValueError(
                f"Blocks: table is {describe(table)}. Axis {axis} must be 1 or "
                f"{count}, the blocks of {sizes[axis]} in {length}."
            )
    return InBlocks(table, size)


def at_ends(
    band: Bounds,
    keys: jax.Array,
    queries: jax.Array,
    s: int,
    t: int,
) -> Predicate | None:
    """Return a band around the ends of caches; None if it hides nothing."""
    left, right = band
    # The last query has no key after it. All that a query sees is in the cache, or else
    # its results are NaN: so it is the last key or before it, but for a right bound
    # below 0.
    gap = 0 if right is None else max(-right, 0)
    left = None if left is None or left >= t - 1 + gap else left
    right = None if right is None or right >= s - 1 else right
    if left is None and right is None:
        return None
    bounds = (
        None if x is None else max(-FARTHEST, min(x, FARTHEST)) for x in (left, right)
    )
    return InBand(keys - queries, *bounds)


def combined(
    name: str, combine: Callable[..., jax.Array], arrays: Sequence[jax.Array]
) -> jax.Array:
    """Return what arrays of several masks are together; refuse unlike shapes."""
    try:
        jnp.broadcast_shapes(*(x.shape for x in arrays))
    except ValueError:
        shown = ", ".join(map(describe, arrays))
        raise ValueError(
            f"sdpa: {name} that are given together are {shown}, which do not broadcast "
            "to one another. Each axis must be 1 or the full size."
        ) from None
    return functools.reduce(combine, arrays)


def clipped_lengths(name: str, lengths: ArrayLike, size: int) -> jax.Array:
    """Return lengths from 0 to a size."""
    return clipped(_integers(name, lengths), size)


def bools(name: str, x: ArrayLike) -> jax.Array:
    """Return an array of bools with the axes of scores."""
    array = scores_like(name, x)
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"sdpa: {name} is {describe(array)}. It must be bool, True where a query "
            "may see a key. Pass numbers that are added to the scores as Additive."
        )
    return array


def scores_like(name: str, x: ArrayLike) -> jax.Array:
    """Return an array with the axes of scores, those that it lacks of size 1."""
    array = as_operand("sdpa", name, x)
    if array.ndim > 4:
        raise ValueError(
            f"sdpa: {name} is {describe(array)}, which does not broadcast to (batch, "
            "heads, query length, key length)."
        )
    return jnp.reshape(array, in_front(array.shape, 4))


def _integers(name: str, x: ArrayLike) -> jax.Array:
    return check_integers("sdpa", name, x)


def cache_ends(
    lengths: dict[str, jax.Array], s: int, t: int
) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of keys and queries that caches end with, (b,) or (1,).

    A sequence may have more tokens than there are keys: its true end counts.
    """
    limits = {"key_value_seq_lengths": (t, farthest(t)), "query_seq_lengths": (s, s)}
    keys, queries = (
        clipped_lengths(name, lengths[name], most)
        if name in lengths
        else jnp.full((1,), size, jnp.int32)
        for name, (size, most) in limits.items()
    )
    return keys, queries


def shortest(name: str, lengths: Sequence[ArrayLike], size: int) -> jax.Array:
    """Return the least of several lengths of each batch entry."""
    if len(lengths) == 1:
        return as_operand("sdpa", name, lengths[0])
    most = farthest(size)
    return combined(
        name, jnp.minimum, [clipped_lengths(name, x, most) for x in lengths]
    )


def shown(value: Any) -> str:
    """Return a field of a mask as a text; of an array, dtype and shape."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe(value)
    return repr(value)
