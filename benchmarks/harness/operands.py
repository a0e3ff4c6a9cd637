# SPDX-License-Identifier: Apache-2.0
"""Draws operands in sets that are too large together for the GPU's cache."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.tuning.stopwatch import set_count

# Operands that are larger together are in no cache after a call: 50 MB on an H100, 60
# on an H200.
_ROTATED_BYTES = 2**28


class Operand(NamedTuple):
    """An operand of random normal numbers, or of all values of an integer dtype."""

    shape: tuple[int, ...]
    scale: float = 1.0
    mean: float = 0.0
    dtype: str = "bfloat16"


# What is drawn; arrays of numpy are the same in each set.
Given = Operand | jax.ShapeDtypeStruct | np.ndarray


def as_operand(of: Any) -> Operand:
    """Return a random operand of a type."""
    return Operand(of.shape, dtype=of.dtype.name)


def bytes_of(given: Sequence[Given]) -> int:
    """Return how many bytes operands take."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in given)


def count_of(given: Sequence[Given]) -> int:
    """Return how many sets are drawn by default."""
    return set_count(bytes_of(given))


def drawn_sets(given: Sequence[Given], count: int = 0) -> list[list[jax.Array]]:
    """Return sets, by default so many that none is read from the cache."""
    random = [
        x if isinstance(x, Operand) else as_operand(x)
        for x in given
        if not isinstance(x, np.ndarray)
    ]

    @jax.jit
    def draw(seed: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), max(len(random), 1))
        return list(map(_drawn, keys, random))

    def one(seed: int) -> list[jax.Array]:
        arrays = iter(draw(jnp.uint32(seed)))
        return [
            jnp.asarray(x) if isinstance(x, np.ndarray) else next(arrays) for x in given
        ]

    return [one(seed) for seed in range(count or count_of(given))]


class Drawn(NamedTuple):
    """Operands, and the cotangents of their results."""

    operands: list[Any]
    cotangents: list[Any]


def drawn_with_cotangents(
    operands: Sequence[Given], outputs: Sequence[jax.ShapeDtypeStruct], most: int
) -> list[Drawn]:
    """Return sets of operands and cotangents, too large together for the cache."""
    given = [*operands, *map(as_operand, outputs)]
    size, count = bytes_of([x for x in given if isinstance(x, Operand)]), 1
    if size < 2 * _ROTATED_BYTES:
        count = min(most, max(2, math.ceil(_ROTATED_BYTES / size)))
    number = len(operands)
    return [Drawn(x[:number], x[number:]) for x in drawn_sets(given, count)]


def _drawn(key: jax.Array, of: Operand) -> jax.Array:
    if jnp.issubdtype(of.dtype, jnp.integer):
        most = jnp.iinfo(of.dtype).max
        return jax.random.randint(key, of.shape, -most, most, of.dtype)
    values = jax.random.normal(key, of.shape, jnp.float32)
    return (values * of.scale + of.mean).astype(of.dtype)
