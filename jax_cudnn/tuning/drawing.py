# SPDX-License-Identifier: Apache-2.0
"""Draws the random numbers that measurements run on.

XLA takes long to compile a generator of random numbers, and a measurement needs arrays
of many shapes. So NumPy draws two tables, and each array is filled from one of them: it
begins somewhere in the table, and goes around.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# A prime, so that no two rows of an array begin at the same place of a table.
_COUNT = 4_194_301
_STEP = 1_299_709


class Tables(NamedTuple):
    """Numbers in f32: of a normal distribution, and from 0 to 1."""

    normal: jax.Array
    uniform: jax.Array


@functools.cache
def tables(device: Any) -> Tables:
    """Return the tables, on a device."""
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(_COUNT, np.float32), rng.random(_COUNT, np.float32)
    return Tables(*jax.device_put(drawn, device))


def taken(table: jax.Array, number: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return an array of a table's numbers; another number is another beginning."""
    start = jnp.asarray(number, jnp.uint32) * np.uint32(_STEP) % np.uint32(_COUNT)
    place = jax.lax.iota(jnp.uint32, math.prod(shape)) + start
    found = table.at[place % np.uint32(_COUNT)].get(mode="promise_in_bounds")
    return jnp.reshape(found, shape)
