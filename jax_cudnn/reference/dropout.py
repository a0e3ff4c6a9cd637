# SPDX-License-Identifier: Apache-2.0
"""Which probabilities of attention does dropout keep? Seed and position say so.

The numbers are those of cuDNN's kernels, bit by bit (9.19 on an H200: forward, gradient
and their dump of the mask; all sizes, head sizes and dtypes that were tried). For query
r and key c of a batch entry and head with offset o, a multiple of 4,

    words = Philox4x32(counter = (o / 4 + c % 8, 0, tile, 0), key = (seed, sign))
    tile = (c // 16) * ceil(s / 16) + r // 16

with 7 rounds, where sign is that of the seed, 0 or 2^32 - 1. The position's number is
one half, 16 bits, of one word: of word 2 * (r // 8 % 2) + c // 8 % 2 the lower half
where r is even, and else the upper one. A probability is kept where the number is below
(1 - rate) 2^16.

r // 2 % 4 does not appear: four queries of each eight, those with even numbers and
those with odd ones, drop the same keys. Philox is by Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Numbers have 16 bits.
STEPS = 2**16
# Offsets of one batch entry and head after another: the lanes of a warp.
OFFSETS_PER_HEAD = 32

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7

Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def numbered(offset: jax.Array, b: int, h: int) -> jax.Array:
    """Return the offsets of all batch entries and heads, as (b, h, 1, 1), from one."""
    numbers = jnp.arange(b * h, dtype=jnp.int32) * np.int32(OFFSETS_PER_HEAD)
    return jnp.reshape(numbers, (b, h, 1, 1)) + offset


def kept(
    rate: float,
    seed: jax.Array,
    offset: jax.Array,
    shape: tuple[int, int],
    rows: jax.Array | None = None,
) -> jax.Array:
    """Return, as bool (b, h, s, t), which probabilities are kept.

    Args:
      rate: the share that is dropped, a multiple of 2^-16.
      seed: i32 (1, 1, 1, 1).
      offset: i32 (b, h, 1, 1), multiples of 4.
      shape: s and t, of all queries and keys.
      rows: the queries to return, i32; None for all.
    """
    s, t = shape
    row_tiles, column_tiles = -(-s // 16), -(-t // 16)
    answers = _answers(rate, seed, offset, (row_tiles, column_tiles))
    if rows is None:
        rows = jnp.arange(s, dtype=jnp.int32)
    answers = jnp.take(answers, rows // 16, axis=2, mode="clip")
    b, h, count = answers.shape[:3]
    # (b, h, s, column tile, half of the tile, column of the half)
    first = (4 * (rows // 8 % 2) + rows % 2)[None, None, :, None, None, None]
    bits = first + 2 * jnp.arange(2, dtype=jnp.int32).reshape(1, 1, 1, 1, 2, 1)
    is_kept = (answers[:, :, :, :, None, :] >> bits.astype(jnp.uint32)) & np.uint32(1)
    return jnp.reshape(is_kept, (b, h, count, 16 * column_tiles))[..., :t] != 0


def _answers(
    rate: float, seed: jax.Array, offset: jax.Array, tiles: tuple[int, int]
) -> jax.Array:
    """Return which of its eight numbers each counter keeps, a bit each.

    As uint32 (b, h, row tile, column tile, 8). It is computed once: a consumer would
    compute all rounds for each of the 32 positions that a counter serves.
    """
    b, h = offset.shape[:2]
    row_tiles, column_tiles = tiles
    count = jnp.asarray(row_tiles, jnp.uint32)  # which may be symbolic
    columns = jnp.arange(column_tiles, dtype=jnp.uint32)[None, None, None, :, None]
    rows = jnp.arange(row_tiles, dtype=jnp.uint32)[None, None, :, None, None]
    tile = columns * count + rows
    step = jnp.arange(8, dtype=jnp.uint32).reshape(1, 1, 1, 1, 8)
    counter = _bits(offset >> 2)[..., None] + step
    sign = _bits(seed >> 31)[..., None]
    zero = jnp.zeros((), jnp.uint32)
    words = philox((counter, zero, tile, zero), (_bits(seed)[..., None], sign))
    least = np.uint32(round((1 - rate) * STEPS))
    packed = zero
    for i, word in enumerate(words):
        halves = (word & np.uint32(STEPS - 1), word >> np.uint32(16))
        for j, number in enumerate(halves):
            is_kept = (number < least).astype(jnp.uint32)
            packed = packed | (is_kept << np.uint32(2 * i + j))
    packed = jnp.broadcast_to(packed, (b, h, row_tiles, column_tiles, 8))
    return jax.lax.optimization_barrier(packed)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def philox(
    counter: Words, key: tuple[jax.Array, jax.Array], rounds: int = _ROUNDS
) -> Words:
    """Return the four words of Philox4x32; all are uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(_KEY_STEPS[0]), k1 + np.uint32(_KEY_STEPS[1])
    return c0, c1, c2, c3


def _product(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
    """Return the upper and lower 32 bits of the product of 32 bits each."""
    low, high = (np.uint32(y & 0xFFFF), np.uint32(y >> 16))
    x_low, x_high = x & np.uint32(0xFFFF), x >> np.uint32(16)
    middle = x_high * low + (x_low * low >> np.uint32(16))
    upper = x_low * high + (middle & np.uint32(0xFFFF))
    top = x_high * high + (middle >> np.uint32(16)) + (upper >> np.uint32(16))
    return top, x * np.uint32(y)
