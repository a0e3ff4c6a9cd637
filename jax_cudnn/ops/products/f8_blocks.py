# SPDX-License-Identifier: Apache-2.0
"""Rounds arrays to MXFP8 and NVFP4: numbers of 8 or 4 bits with a scale for each block.

Pure functions of arrays. A block is some neighbours on the last axis. A stored number
times the scale of its block, and times that of the tensor, is what it stands for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.lowering import gathered_along, splittable
from jax_cudnn.ops.common.f8_recipes import NVFP4, BlockRecipe
from jax_cudnn.reference.dtypes import saturated
from jax_cudnn.reference.products.block_scaled import dequantized

_E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)
# The magnitudes of f4_e2m1fn, by their codes.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX = _E2M1[-1]
# An exponent of f32 and f8_e8m0fnu is stored with this added. The largest byte of
# f8_e8m0fnu is NaN.
_BIAS, _E8M0_NAN = 127, 255
# How many bits the fraction of an f32 has, all of them, and that of 448, which is 0.75.
_FRACTION = 23
_FRACTION_BITS = 2**_FRACTION - 1
_OF_448 = 3 * 2 ** (_FRACTION - 2)
# The smallest exponent has no normal number in f32 and bf16, where it may become 0.
_LEAST_EXPONENT = -126
# Below it the scale of a tensor, times the smallest of a block, is no normal f32.
_LEAST_SCALE = 2.0**-100


class Blocks(NamedTuple):
    """An array rounded in blocks along its last axis, as bytes.

    ``values`` are (..., numbers) of 8 bits or (..., pairs) of 4 bits, ``scales`` are
    (..., blocks), and ``scale`` is the tensor's, of shape (), or None in MXFP8. The
    last block of an axis that blocks do not fill is filled with zeros.
    """

    values: jax.Array
    scales: jax.Array
    scale: jax.Array | None

    def read(self) -> tuple[jax.Array, jax.Array]:
        """Return the numbers and the scales of blocks in their dtypes."""
        scales = jax.lax.bitcast_convert_type(self.scales, self._scale_dtype)
        dtype = jnp.float8_e4m3fn if self.scale is None else jnp.float4_e2m1fn
        values = jax.lax.bitcast_convert_type(self.values, dtype)
        size = self.values.shape[-1] * (1 if self.scale is None else 2)
        return values.reshape(*self.values.shape[:-1], size), scales

    def dequantized(self) -> jax.Array:
        """Return what the numbers stand for, in f32."""
        wide = self.times_scales().astype(jnp.float32)
        return wide if self.scale is None else wide * self.scale

    def times_scales(self) -> jax.Array:
        """Return the numbers times the scales of their blocks, exact in bf16.

        Numbers of 4 bits are looked up: XLA gives bytes of a symbolic size no other
        dtype of another width.
        """
        scales = jax.lax.bitcast_convert_type(self.scales, self._scale_dtype)
        if self.scale is None:
            values = jax.lax.bitcast_convert_type(self.values, jnp.float8_e4m3fn)
            return dequantized(values, scales)
        *rows, pairs = self.values.shape
        codes = jnp.stack([self.values & 15, self.values >> 4], axis=-1)
        numbers = jnp.array([*_E2M1, *(-x for x in _E2M1)], jnp.bfloat16)
        return dequantized(numbers[codes.reshape(*rows, 2 * pairs)], scales)

    @property
    def _scale_dtype(self) -> np.dtype:
        is_mx = self.scale is None
        return np.dtype(jnp.float8_e8m0fnu if is_mx else jnp.float8_e4m3fn)


def in_blocks(x: jax.Array, recipe: BlockRecipe) -> Blocks:
    """Return an array rounded in blocks along its last axis."""
    *rows, count = x.shape
    blocks = -(-count // recipe.block)
    missing = blocks * recipe.block - count
    # A device has whole blocks.
    last = x.ndim - 1
    x = splittable(x, last, blocks) if missing == 0 else gathered_along(x, [last])
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(rows) + [(0, missing)])
    x = x.reshape(*rows, blocks, recipe.block)
    largest = jnp.max(jnp.abs(x), axis=-1)
    # A block with NaN or an infinity is NaN, which its scale says.
    is_finite = jnp.isfinite(largest)
    largest = jnp.where(is_finite, largest, 0)
    x = jnp.where(is_finite[..., None], x, 0)
    found = _nvfp4 if isinstance(recipe, NVFP4) else _mxfp8
    values, scales, scale = found(x, largest, is_finite)
    *rows, blocks, count = values.shape
    return Blocks(values.reshape(*rows, blocks * count), scales, scale)


def _mxfp8(
    x: jax.Array, largest: jax.Array, is_finite: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """Round to f8_e4m3fn, with powers of two as scales: rounded up, none saturates."""
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    # 448 is 1.75 * 2^8. A number of a larger fraction needs the next power of two.
    exponent = (bits >> _FRACTION) - (_BIAS + 8)
    exponent = jnp.where(bits & _FRACTION_BITS > _OF_448, exponent + 1, exponent)
    # The largest f32 has the exponent 120: the factor is a normal number as well.
    exponent = jnp.maximum(exponent, _LEAST_EXPONENT)
    factor = jax.lax.bitcast_convert_type((_BIAS - exponent) << _FRACTION, jnp.float32)
    values = saturated(x * factor[..., None], jnp.dtype(jnp.float8_e4m3fn))
    scales = jnp.where(is_finite, exponent + _BIAS, _E8M0_NAN)
    return _bytes(values), scales.astype(jnp.uint8), None


def _nvfp4(
    x: jax.Array, largest: jax.Array, is_finite: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Round to f4_e2m1fn, with scales of blocks in f8_e4m3fn, and one of the tensor."""
    # Reciprocals are written as such: XLA makes them of divisions, in some versions.
    most = jnp.max(largest, initial=0) * np.float32(1 / (_E4M3_MAX * _E2M1_MAX))
    scale = jnp.where(most > 0, jnp.maximum(most, _LEAST_SCALE), 1)
    wanted = largest * np.float32(1 / _E2M1_MAX) * (1 / scale)
    scales = saturated(wanted, jnp.dtype(jnp.float8_e4m3fn))
    step = scales.astype(jnp.float32) * scale
    # A block that is too small for a scale of its own is 0.
    factor = jnp.where(step > 0, 1 / jnp.where(step > 0, step, 1), 0)
    x = x * factor[..., None]
    scales = jnp.where(is_finite, scales, jnp.array(jnp.nan, scales.dtype))
    return _pairs(x), _bytes(scales), scale


def _pairs(x: jax.Array) -> jax.Array:
    """Return numbers rounded to f4_e2m1fn, saturating, two in a byte, the first low.

    Ties go to the even code. The highest bit of a code is the sign. With XLA's own
    conversion and packing, a program for a CPU does not compile under
    `xla_cpu_use_fusion_emitters=false` (JAX 0.10.0).
    """
    size = jnp.minimum(jnp.abs(x), _E2M1_MAX)
    above = jnp.where(size < 4, jnp.round(size) + 2, jnp.round(size / 2) + 4)
    code = jnp.where(size < 2, jnp.round(size * 2), above).astype(jnp.uint8)
    code = code | jnp.where(jnp.signbit(x), 8, 0).astype(jnp.uint8)
    pairs = code.reshape(*code.shape[:-1], code.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8)
