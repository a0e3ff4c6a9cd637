# SPDX-License-Identifier: Apache-2.0
"""Turns dropout with a random key into operands and attributes of attention."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.ops.attention.attend import Operands
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.reference.attention.dropout import OFFSETS_PER_HEAD, STEPS, numbered

# Offsets are i32, and those of all batch entries and heads follow the first one.
_MOST_HEADS = 2**30 // OFFSETS_PER_HEAD


class Dropout(NamedTuple):
    """The rate as it is applied, the seed (1, 1, 1, 1) and offsets (b, h, 1, 1)."""

    rate: float
    seed: jax.Array
    offset: jax.Array


def drawn(
    op: str, rate: float, key: ArrayLike | None, b: int, h: int
) -> Dropout | None:
    """Return what a rate and a random key mean; None where nothing is dropped."""
    applied = _applied(check_rate(op, rate))
    array = _check_key(op, key, rate)
    if array is None or not applied:
        return None
    return Dropout(applied, *_seed_and_offsets(op, array, b, h))


def with_dropout(
    op: str,
    operands: Operands,
    attributes: SdpaAttributes,
    rate: float,
    key: ArrayLike | None,
) -> tuple[Operands, SdpaAttributes]:
    """Return operands and attributes with those that dropout adds, if there is any."""
    b, _, h, _ = operands.query_sizes
    if (found := drawn(op, rate, key, b, h)) is None:
        return operands, attributes
    return (
        operands._replace(dropout_seed=found.seed, dropout_offset=found.offset),
        replace(attributes, dropout=found.rate, dropout_heads=h, dropout_batch=b),
    )


def check_rate(op: str, rate: float) -> float:
    """Return a rate of dropout as a float; raise for what is none."""
    if isinstance(rate, bool | np.bool_) or not isinstance(
        rate, int | float | np.integer | np.floating
    ):
        raise TypeError(
            f"{op}: dropout_rate is {type(rate).__name__}. It must be a number known "
            "when the program is traced, since it is part of it."
        )
    value = float(rate)
    if not 0 <= value < 1:
        raise ValueError(
            f"{op}: dropout_rate={rate} is not in [0, 1). It is the share of the "
            "attention weights that is dropped. Pass a number from 0 to below 1."
        )
    return value


def _applied(rate: float) -> float:
    """Return the rate as it is applied: a multiple of 2^-16, and 0 for none."""
    # At least one of the numbers is kept.
    return min(round(rate * STEPS), STEPS - 1) / STEPS


def _check_key(op: str, key: ArrayLike | None, rate: float) -> jax.Array | None:
    """Return the random key, or None where nothing is dropped."""
    if key is None:
        if rate:
            raise ValueError(
                f"{op}: dropout_rate is {rate} but dropout_key is None. Pass a key of "
                "jax.random.key, another one for each call, or dropout_rate=0."
            )
        return None
    array = key if isinstance(key, jax.Array) else jnp.asarray(key)
    is_typed = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if not is_typed and array.dtype != jnp.uint32:
        raise TypeError(
            f"{op}: dropout_key is {describe(array)}. It must be a key of "
            "jax.random.key (or of jax.random.PRNGKey)."
        )
    if array.ndim != (0 if is_typed else 1):
        shape = list(array.shape if is_typed else array.shape[:-1])
        raise ValueError(
            f"{op}: dropout_key has shape {shape}. It must be a single key. For a key "
            "of each example use jax.vmap over both."
        )
    return array if rate else None


def _seed_and_offsets(
    op: str, key: jax.Array, b: int, h: int
) -> tuple[jax.Array, jax.Array]:
    """Return the seed (1, 1, 1, 1) and offsets (b, h, 1, 1) of a call, both i32."""
    # A symbolic dimension does not compare; it has no plan of cuDNN's either.
    if isinstance(b * h, int) and b * h > _MOST_HEADS:
        raise ValueError(
            f"{op}: dropout takes at most {_MOST_HEADS} heads in all, but there are "
            f"{b} batch entries of {h} heads. Divide the batch."
        )
    words = jax.lax.bitcast_convert_type(_bits(key), jnp.int32)
    seed, first = words[0], words[1]
    # From 0 to 2^30, in steps of 4: a counter serves four lanes.
    first = first & np.int32(2**30 - 4)
    return jnp.reshape(seed, (1, 1, 1, 1)), numbered(first, b, h)


# Under vmap, JAX draws the bits of all of these keys from the first one.
_DEPENDING_ON_VMAP = ("rbg", "unsafe_rbg")


def _bits(key: jax.Array) -> jax.Array:
    """Return two words that follow from the key alone, also under vmap."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    key = key if is_typed else jax.random.wrap_key_data(key)
    if str(jax.random.key_impl(key)) not in _DEPENDING_ON_VMAP:
        return jax.random.bits(key, (2,), jnp.uint32)

    def hashed(words: jax.Array) -> jax.Array:
        own = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bits(own, (2,), jnp.uint32)

    first, second = jnp.reshape(jax.random.key_data(key), (2, 2))
    return hashed(hashed(first) ^ second)
