# SPDX-License-Identifier: Apache-2.0
"""Updates a layer's cache in a call, and says which tokens a new one may see.

A cache is Flax's: keys and values of all positions, and the number of those that are
there. Beyond Flax, a call may bring many tokens, and each batch entry may have its own
number of tokens.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.caches import kv_cache
from jax_cudnn.ops.attention.score_mod import ScoreMod
from jax_cudnn.ops.attention.visibility.arrays import farthest
from jax_cudnn.ops.attention.visibility.bands import NO_BOUND, is_empty
from jax_cudnn.ops.attention.visibility.masks import (
    Blocks,
    Causal,
    Intersection,
    Lengths,
    Mask,
    Prefix,
    Where,
    Window,
)
from jax_cudnn.ops.common.arguments import as_operand, clipped, describe, in_front


class Cache(NamedTuple):
    """Keys and values (..., t, k, d), and how many tokens are there: () or (...)."""

    key: jax.Array
    value: jax.Array
    index: jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """The places of a call's tokens: the n-th goes to slot ``start + n`` of the cache.

    Attributes:
      count: how many tokens the call has for each batch entry, with padding.
      start: how many there are already, () or (...) as in the cache.
      lengths: (...), how many of the new tokens are none of padding; None for all.
    """

    count: int
    start: jax.Array
    lengths: jax.Array | None

    @property
    def kept(self) -> jax.Array | int:
        """The number of tokens that are kept, (...) or one number for all entries."""
        return self.count if self.lengths is None else self.lengths

    @property
    def positions(self) -> jax.Array:
        """The tokens' places in their sequences, (count,) or (..., count)."""
        steps = jnp.arange(self.count, dtype=jnp.int32)
        steps = jnp.reshape(steps, in_front(steps.shape, self.start.ndim + 1))
        return self.start[..., None] + steps


def new_tokens(
    layer: str, cache: Cache, key: jax.Array, lengths: ArrayLike | None
) -> NewTokens:
    """Check the keys of a call against the cache, and say where they go."""
    *batch, most, heads, d = cache.key.shape
    count = key.shape[-3]
    if key.shape != (*batch, count, heads, d):
        raise ValueError(
            f"{layer}: the new keys are {describe(key)}, and the cached ones "
            f"{describe(cache.key)}. All axes but the length must be equal. Make the "
            "cache for this batch."
        )
    if count > most:
        raise ValueError(
            f"{layer}: {count} new tokens do not fit into the cache, which is for "
            f"{most}. Make a longer cache."
        )
    index = cache.index
    if index.shape not in ((), tuple(batch)):
        raise ValueError(
            f"{layer}: cache_index is {describe(index)}. It must be one number, or one "
            f"for each batch entry, shape {batch}."
        )
    start = clipped(index, farthest(most))
    if lengths is None:
        return NewTokens(count=count, start=start, lengths=None)
    own = as_operand(layer, "input_lengths", lengths)
    if not jnp.issubdtype(own.dtype, jnp.integer):
        raise TypeError(
            f"{layer}: input_lengths is {describe(own)}. Lengths must be integers. "
            "Convert them to int32."
        )
    if own.shape != tuple(batch):
        raise ValueError(
            f"{layer}: input_lengths is {describe(own)}. It must have one length for "
            f"each batch entry, shape {batch}."
        )
    if index.shape != tuple(batch):
        raise ValueError(
            f"{layer}: input_lengths was passed, and the cache has one cache_index for "
            "all batch entries. Make the cache with ragged=True in init_cache of nnx, "
            "or in a linen layer with ragged_cache=True."
        )
    return NewTokens(count=count, start=start, lengths=clipped(own, count))


def append(cache: Cache, key: jax.Array, value: jax.Array, new: NewTokens) -> Cache:
    """Return the cache with new keys and values (..., s, k, d) after the others.

    Where all entries have equally many tokens, padding is written too.
    """
    return Cache(
        key=_written(cache.key, key, new),
        value=_written(cache.value, value, new),
        index=(new.start + new.kept).astype(cache.index.dtype),
    )


def _written(rows: jax.Array, tokens: jax.Array, new: NewTokens) -> jax.Array:
    tokens = tokens.astype(rows.dtype)
    if not new.start.ndim:
        axis = rows.ndim - 3
        return jax.lax.dynamic_update_slice_in_dim(rows, tokens, new.start, axis)
    entries = math.prod(rows.shape[:-3])
    written = kv_cache.update(
        jnp.reshape(rows, (entries, *rows.shape[-3:])),
        jnp.reshape(tokens, (entries, *tokens.shape[-3:])),
        _one_each(new.start, entries),
        None if new.lengths is None else _one_each(new.lengths, entries),
    )
    return jnp.reshape(written, rows.shape)


def nan_without_room(output: jax.Array, cache: Cache, new: NewTokens) -> jax.Array:
    """Make the output NaN for batch entries whose tokens found no room in the cache."""
    has_room = new.start + new.kept <= cache.key.shape[-3]
    has_room = jnp.reshape(has_room, in_front((*has_room.shape, 1, 1, 1), output.ndim))
    return jnp.where(has_room, output, jnp.asarray(jnp.nan, output.dtype))


class Sequences(NamedTuple):
    """Arguments of `cached_sdpa` for the new tokens, all batch axes merged into one."""

    key_value_seq_lengths: jax.Array
    query_seq_lengths: jax.Array | None
    local_window_size: tuple[int, int] | None


def sequences(mask: Mask | None, cache: Cache, new: NewTokens) -> Sequences | None:
    """Return the tokens as the last ones of sequences, where that hides what is hidden.

    It does for a mask that is made of bands. Bands that hide a token from itself are no
    windows.
    """
    left, right = _band(mask)
    if right < 0 or any(not isinstance(x, Window | Causal) for x in _parts(mask)):
        return None
    entries = math.prod(cache.key.shape[:-3])
    return Sequences(
        key_value_seq_lengths=_one_each(new.start + new.kept, entries),
        query_seq_lengths=(
            None if new.lengths is None else _one_each(new.lengths, entries)
        ),
        local_window_size=None if left is None else (left, right),
    )


def score_mod_of(score_mod: ScoreMod, cache: Cache, new: NewTokens) -> ScoreMod:
    """Return a score_mod of places in the sequence as one of the call's queries."""
    starts = _one_each(new.start, math.prod(cache.key.shape[:-3]))

    def of_call(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score_mod(score, batch, head, query + starts[batch], key)

    return of_call


def visible(layer: str, mask: Mask | None, cache: Cache, new: NewTokens) -> Mask:
    """Return which slots of the cache the new tokens see, for one batch axis.

    These are the slots up to a token's own one. Bands of the mask are counted from
    there too; all else in it is of the new queries and the slots.
    """
    most = cache.key.shape[-3]
    entries = math.prod(cache.key.shape[:-3])
    left, right = _band(mask)
    if is_empty(left, right):
        raise ValueError(
            f"{layer}: the windows of the mask show no key to any token that is added "
            f"to the cache: a token sees those before it and itself, and of these none "
            f"that is nearer than {-right} or further than {left}. {NO_BOUND}"
        )
    parts: list[Mask] = []
    for part in _parts(mask):
        if isinstance(part, Prefix | Blocks):
            raise ValueError(
                f"{layer}: mask has {type(part).__name__}, and tokens are added to a "
                "cache (decode=True). There it may have Causal, Window, Lengths, "
                "Segments, Where and Additive. Pass an array instead."
            )
        if not isinstance(part, Window | Causal):
            parts.append(part)
    if new.lengths is not None:
        parts.append(Lengths(query=_one_each(new.lengths, entries)))
    if new.count == 1 and right == 0 and left is None:
        # Lengths take no memory, and let a kernel skip the empty slots.
        parts.append(Lengths(key=_one_each(new.start + 1, entries)))
    else:
        rows = jnp.reshape(new.positions, (-1, 1, new.count, 1))
        columns = jnp.arange(most, dtype=jnp.int32).reshape(1, 1, 1, most)
        seen = columns <= rows + right
        if left is not None:
            seen = seen & (columns >= rows - left)
        parts.append(Where(seen))
    return Intersection(tuple(parts))


def _band(mask: Mask | None) -> tuple[int | None, int]:
    """Return how far a token sees to the left and to the right, by causality and mask.

    None is as far as there are tokens.
    """
    windows = [part for part in _parts(mask) if isinstance(part, Window)]
    lefts = [window.left for window in windows if window.left is not None]
    rights = [window.right for window in windows if window.right is not None]
    return min(lefts, default=None), min((0, *rights))


def _one_each(numbers: jax.Array, entries: int) -> jax.Array:
    return jnp.broadcast_to(jnp.reshape(numbers, (-1,)), (entries,))


def _parts(mask: Mask | None) -> tuple[Mask, ...]:
    if mask is None:
        return ()
    return mask.parts if isinstance(mask, Intersection) else (mask,)
