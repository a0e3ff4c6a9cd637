# SPDX-License-Identifier: Apache-2.0
"""Computes from seed and position which probabilities of attention dropout keeps.

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

import math

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
      seed: i32 (b or 1, 1, 1, 1).
      offset: i32 (b or 1, h or 1, 1, 1), multiples of 4. It broadcasts with the seed,
        and so does the result where these are 1.
      shape: s and t, of all queries and keys.
      rows: the queries to return, i32; None for all.
    """
    s, t = shape
    row_tiles, column_tiles = -(-s // 16), -(-t // 16)
    tile = _tiles(
        jnp.arange(row_tiles, dtype=jnp.uint32),
        jnp.arange(column_tiles, dtype=jnp.uint32),
        s,
    )
    answers = _answers(rate, seed, offset, tile, jnp.arange(8, dtype=jnp.uint32))
    if rows is None:
        rows = jnp.arange(s, dtype=jnp.int32)
    answers = jnp.take(answers, rows // 16, axis=2, mode="clip")
    # (b, h, s, column tile, half of the tile, column of the half)
    half = jnp.arange(2, dtype=jnp.int32).reshape(1, 1, 1, 1, 2, 1)
    is_kept = _is_kept(answers[:, :, :, :, None, :], rows, half)
    b, h, count = answers.shape[:3]
    return jnp.reshape(is_kept, (b, h, count, 16 * column_tiles))[..., :t]


def kept_at(
    rate: float,
    seed: jax.Array,
    offset: jax.Array,
    shape: tuple[int, ...],
    positions: tuple[jax.Array, jax.Array],
    runs: tuple[int, int],
) -> jax.Array:
    """Return, as bool (b, h, r, c), what is kept of r queries and c keys.

    Args:
      rate: as in `kept`.
      seed: as in `kept`.
      offset: as in `kept`.
      shape: as in `kept`.
      positions: those of the queries and of the keys, i32.
      runs: how many queries, and keys, follow one another from a multiple of this
        number on, in all of the positions. A multiple of 16 takes the least work.
    """
    rows, columns = positions
    r, c = rows.size, columns.size
    grain, width = math.gcd(16, runs[0]), math.gcd(16, runs[1])
    # All keys of a tile share eight counters; elsewhere each key asks for its own.
    width = width if width == 16 else 1
    lanes = columns.reshape(-1, width)[:, : min(width, 8)]
    tile = _tiles(
        _unsigned(rows[::grain] // 16), _unsigned(columns[::width] // 16), shape[0]
    )
    answers = _answers(rate, seed, offset, tile, _unsigned(lanes % 8))
    answers = jnp.repeat(answers, grain, axis=2, total_repeat_length=r)
    half = columns.reshape(1, 1, 1, c // width, -(-width // 8), min(width, 8)) // 8 % 2
    is_kept = _is_kept(answers[:, :, :, :, None, :], rows, half)
    b, h = answers.shape[:2]
    return jnp.reshape(is_kept, (b, h, r, c))


def _is_kept(answers: jax.Array, rows: jax.Array, half: jax.Array) -> jax.Array:
    """Return whether queries keep keys; axes as in the answers, (b, h, s, ...)."""
    first = (4 * (rows // 8 % 2) + rows % 2)[None, None, :, None, None, None]
    bits = first + 2 * half
    return ((answers >> bits.astype(jnp.uint32)) & np.uint32(1)) != 0


def _tiles(rows: jax.Array, columns: jax.Array, s: int) -> jax.Array:
    """Return the numbers of tiles, (row tile, column tile), of s queries in all."""
    count = jnp.asarray(-(-s // 16), jnp.uint32)  # which may be symbolic
    return columns[None, :] * count + rows[:, None]


def _answers(
    rate: float, seed: jax.Array, offset: jax.Array, tile: jax.Array, step: jax.Array
) -> jax.Array:
    """Return which of its eight numbers each counter keeps, a bit each.

    As uint32 (b, h, row tile, column tile, steps), for steps ([column tile], steps)
    from 0 to 7. It is computed once: a consumer would compute all rounds for each of
    the 32 positions that a counter serves.
    """
    b, h = jnp.broadcast_shapes(seed.shape, offset.shape)[:2]
    tile = tile[None, None, :, :, None]
    steps = jnp.reshape(step, (1, 1, 1, -1, step.shape[-1]))
    counter = _bits(offset >> 2)[..., None] + steps
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
    shape = (b, h, *tile.shape[2:4], step.shape[-1])
    return jax.lax.optimization_barrier(jnp.broadcast_to(packed, shape))


def _unsigned(x: jax.Array) -> jax.Array:
    return x.astype(jnp.uint32)


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
