# SPDX-License-Identifier: Apache-2.0
"""What does a layer's cache hold after a call, and which of it may a new token see?

A cache is Flax's: keys and values of all positions, and the number of those that are
there. Beyond Flax, a call may bring many tokens, and each batch entry may have its own
number of tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.arguments import as_operand, describe, in_front
from jax_cudnn.ops.masks import (
    Blocks,
    Causal,
    Intersection,
    Lengths,
    Mask,
    Prefix,
    Where,
    Window,
)


class Cache(NamedTuple):
    """Keys and values (..., t, k, d), and how many tokens are there: () or (...)."""

    key: jax.Array
    value: jax.Array
    index: jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """Where the tokens of a call go: the n-th to slot ``start + n`` of the cache.

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
        """How many tokens are kept, (...) or one number for all entries."""
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
    start = index.astype(jnp.int32)
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
    # Clipped in its own dtype: a longer one would wrap.
    own = jnp.clip(own, 0, min(count, int(jnp.iinfo(own.dtype).max)))
    return NewTokens(count=count, start=start, lengths=own.astype(jnp.int32))


def append(cache: Cache, key: jax.Array, value: jax.Array, new: NewTokens) -> Cache:
    """Return the cache with new keys and values (..., s, k, d) behind the others.

    Padding is written too, where there is room for it, and overwritten by the tokens
    that come next.
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

    def write(rows: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
        return rows.at[slots].set(tokens, mode="drop", unique_indices=True)

    written = jax.vmap(write)(
        jnp.reshape(rows, (entries, *rows.shape[-3:])),
        jnp.reshape(tokens, (entries, *tokens.shape[-3:])),
        jnp.reshape(new.positions, (entries, new.count)),
    )
    return jnp.reshape(written, rows.shape)


def nan_without_room(output: jax.Array, cache: Cache, new: NewTokens) -> jax.Array:
    """Make the output NaN for batch entries whose tokens found no room in the cache."""
    has_room = new.start + new.kept <= cache.key.shape[-3]
    has_room = jnp.reshape(has_room, in_front((*has_room.shape, 1, 1, 1), output.ndim))
    return jnp.where(has_room, output, jnp.asarray(jnp.nan, output.dtype))


def visible(layer: str, mask: Mask | None, cache: Cache, new: NewTokens) -> Mask:
    """Return which slots of the cache the new tokens see, for one batch axis.

    These are the slots up to a token's own one. Bands of the mask are counted from
    there too; all else in it is of the new queries and the slots.
    """
    most = cache.key.shape[-3]
    entries = math.prod(cache.key.shape[:-3])
    parts: list[Mask] = []
    lefts: list[int] = []
    right = 0
    for part in _parts(mask):
        if isinstance(part, Prefix | Blocks):
            raise ValueError(
                f"{layer}: mask has {type(part).__name__}, and tokens are added to a "
                "cache (decode=True). There it may have Causal, Window, Lengths, "
                "Segments, Where and Additive. Pass an array instead."
            )
        if isinstance(part, Window):
            lefts += [] if part.left is None else [part.left]
            right = right if part.right is None else min(right, part.right)
        elif not isinstance(part, Causal):
            parts.append(part)
    if new.lengths is not None:
        parts.append(Lengths(query=jnp.reshape(new.lengths, (entries,))))
    if new.count == 1 and right == 0 and not lefts:
        # Lengths take no memory, and let a kernel skip the empty slots.
        parts.append(Lengths(key=_one_each(new.start + 1, entries)))
    else:
        rows = jnp.reshape(new.positions, (-1, 1, new.count, 1))
        columns = jnp.arange(most, dtype=jnp.int32).reshape(1, 1, 1, most)
        seen = columns <= rows + right
        if lefts:
            seen = seen & (columns >= rows - min(lefts))
        parts.append(Where(seen))
    return Intersection(tuple(parts))


def _one_each(numbers: jax.Array, entries: int) -> jax.Array:
    return jnp.broadcast_to(jnp.reshape(numbers, (-1,)), (entries,))


def _parts(mask: Mask | None) -> tuple[Mask, ...]:
    if mask is None:
        return ()
    return mask.parts if isinstance(mask, Intersection) else (mask,)
