# SPDX-License-Identifier: Apache-2.0
"""Computes scales for tensors in f8, and converts tensors to f8 and back.

Pure functions of arrays. A number is its stored f8 number times the scale, as in
`jax.nn.scaled_matmul`. TransformerEngine calls this scale `scale_inv`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.graph.rules import F8
from jax_cudnn.lowering import typed_like
from jax_cudnn.ops.common.arguments import as_operand, check_flag, describe
from jax_cudnn.reference.dtypes import dtype_name, kept_rounding, saturated

_F32 = jnp.finfo(jnp.float32)


class Quantized(NamedTuple):
    """A tensor in f8, whose elements are `values` times `scale`."""

    values: jax.Array
    scale: jax.Array


export.register_namedtuple_serialization(
    Quantized, serialized_name="jax_cudnn.f8.Quantized"
)


def amax(x: ArrayLike) -> jax.Array:
    """Return the largest absolute value of an array, max|x|, as an f32 scalar.

    Args:
      x: an array of real numbers of any shape.

    Returns:
      f32, shape (); NaN if x has NaN, 0 if x is empty.

    Example:
      >>> from jax_cudnn import f8
      >>> float(f8.amax([1.0, -3.0]))
      3.0
    """
    array = _real("f8.amax", "x", x)
    return jnp.max(jnp.abs(array.astype(jnp.float32)), initial=0)


def scale_from_amax(
    amax: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    margin: int = 0,
    power_of_2: bool = False,
    previous: ArrayLike = 1.0,
) -> jax.Array:
    r"""Return the scale at which the largest number of a tensor still fits.

    .. math:: \mathrm{scale} = \mathrm{amax} \cdot 2^{\mathrm{margin}} / M

    with M the largest number of the dtype: 448 for f8_e4m3fn, 57344 for f8_e5m2.

    Args:
      amax: largest absolute values, an array of any shape, each of one tensor.
      dtype: f8_e4m3fn (default) or f8_e5m2.
      margin: how many powers of two to leave free above the largest number. Default 0.
      power_of_2: whether to round the scale up to a power of two, with which numbers
        of 16 bits are quantised without an error in the scale. Default False.
      previous: the scale for an amax that says nothing: 0 (a tensor of zeros, or of
        subnormal numbers, which a platform may take for zeros), inf or
        NaN. Broadcasts. Default 1.

    Returns:
      f32, of amax's shape, never below 2**-126 or above 2**127.

    Raises:
      TypeError: another dtype, a margin that is no int.

    Example:
      >>> from jax_cudnn import f8
      >>> float(f8.scale_from_amax(7.0))
      0.015625
    """
    op = "f8.scale_from_amax"
    dtype = check_f8(op, dtype)
    largest = _real(op, "amax", amax).astype(jnp.float32)
    known = _real(op, "previous", previous).astype(jnp.float32)
    is_telling = jnp.isfinite(largest) & (largest > 0)
    wide = jnp.where(is_telling, largest, 1)
    scale = wide * np.float32(
        2.0 ** check_margin(op, margin) / float(jnp.finfo(dtype).max)
    )
    if check_flag(op, "power_of_2", power_of_2):
        scale = jnp.clip(scale, _F32.tiny, 2.0**126)
        part, exponent = jnp.frexp(scale)
        exponent = jnp.where(part == 0.5, exponent - 1, exponent)
        scale = jnp.ldexp(jnp.ones_like(scale), exponent)
    return jnp.where(is_telling, jnp.clip(scale, _F32.tiny, 2.0**127), known)


def quantize(
    x: ArrayLike, scale: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn
) -> jax.Array:
    """Return x / scale in f8, rounded to nearest even and saturating.

    Numbers and infinities beyond the dtype's range become its largest number. NaN stays
    NaN. JAX's `astype` turns numbers that f8_e4m3fn cannot represent into NaN.

    Args:
      x: an array of real numbers.
      scale: of :func:`scale_from_amax`; a scalar, or of a shape that broadcasts.
      dtype: f8_e4m3fn (default) or f8_e5m2.

    Returns:
      An array of `dtype`, of the shape to which x and scale broadcast.

    Raises:
      TypeError: another dtype.

    Notes:
      Not to be differentiated: a cotangent in f8 has no scale. See
      :func:`jax_cudnn.f8.quantized_sdpa`.

    Example:
      >>> from jax_cudnn import f8
      >>> f8.quantize([1.0, 1000.0], 1.0).tolist()
      [1.0, 448.0]
    """
    op = "f8.quantize"
    dtype = check_f8(op, dtype)
    array, scale = _real(op, "x", x), _real(op, "scale", scale)
    return saturated(over_scale(array, scale), dtype)


def over_scale(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return x / scale in f32: what `quantize` rounds."""
    return x.astype(jnp.float32) / scale.astype(jnp.float32)


def dequantize(
    values: ArrayLike, scale: ArrayLike, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Return values * scale, rounded once to a dtype.

    Args:
      values: an f8 array, of :func:`quantize`.
      scale: its scale; a scalar, or of a shape that broadcasts.
      dtype: of the result. Default f32.

    Example:
      >>> from jax_cudnn import f8
      >>> f8.dequantize(f8.quantize([6.0], 0.5), 0.5).tolist()
      [6.0]
    """
    op = "f8.dequantize"
    array, scale = _real(op, "values", values), _real(op, "scale", scale)
    array = kept_rounding(array)
    return (array.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype)


@jax.custom_jvp
def stands_for(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return what a copy of x stands for, with x's derivative."""
    del x
    return rounded


@stands_for.defjvp
def _stands_for_jvp(primals: Any, tangents: Any) -> Any:
    rounded = primals[1]
    return stands_for(*primals), typed_like(tangents[0].astype(rounded.dtype), rounded)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def undifferentiated(op: str, name: str, advice: str, x: jax.Array) -> jax.Array:
    """Return an operand of `op`, whose result in f8 has no derivative."""
    del op, name, advice
    return x


@functools.partial(undifferentiated.defjvp, symbolic_zeros=True)
def _refuse_tangents(
    op: str, name: str, advice: str, primals: Any, tangents: Any
) -> tuple[jax.Array, Any]:
    ((x,), (moved,)) = primals, tangents
    if not isinstance(moved, SymbolicZero):
        raise TypeError(
            f"{op}: it is differentiated with respect to {name}. It has no derivative: "
            f"a cotangent in f8 would need a scale of its own. {advice}"
        )
    return x, moved


def quantize_current(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    margin: int = 0,
    power_of_2: bool = False,
) -> Quantized:
    """Return an array in f8 with the scale of its own largest number.

    This is "current scaling": the array is read twice, once for its amax. The arguments
    are those of :func:`scale_from_amax`. An array of zeros, or one that has inf or NaN,
    gets the scale 1.

    Example:
      >>> from jax_cudnn import f8
      >>> x = f8.quantize_current([7.0, -3.5])
      >>> x.values.tolist(), float(x.scale)
      ([448.0, -224.0], 0.015625)
    """
    scale = scale_from_amax(amax(x), dtype, margin=margin, power_of_2=power_of_2)
    return Quantized(quantize(x, scale, dtype), scale)


def update_history(history: ArrayLike, amax: ArrayLike) -> jax.Array:
    """Return a history of amaxes with a new one in front and without the oldest.

    Args:
      history: (n, ...), the amaxes of the last n steps; zeros to begin with.
      amax: (...), that of this step, for each tensor of the history.

    Returns:
      (n, ...), f32.

    Raises:
      ValueError: shapes that do not fit.

    Example:
      >>> from jax_cudnn import f8
      >>> f8.update_history([3.0, 2.0, 9.0], 4.0).tolist()
      [4.0, 3.0, 2.0]
    """
    old = _real("f8.update_history", "history", history).astype(jnp.float32)
    new = _real("f8.update_history", "amax", amax).astype(jnp.float32)
    if old.ndim == 0 or old.shape[0] == 0 or old.shape[1:] != new.shape:
        raise ValueError(
            f"f8.update_history: history is {describe(old)} and amax {describe(new)}. "
            "A history has the axes of amax, and one of at least 1 in front of them. "
            "Begin with jnp.zeros((n, *amax.shape))."
        )
    return jnp.concatenate([new[None], old[:-1]])


def scale_from_history(
    history: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    margin: int = 0,
    power_of_2: bool = False,
    previous: ArrayLike = 1.0,
) -> jax.Array:
    """Return the scale for the largest amax of a history.

    This is "delayed scaling": the scale of this step comes from former steps, so that
    arrays are read once. Numbers that outgrow the history saturate. Amaxes of inf or
    NaN are ignored. The other arguments are those of :func:`scale_from_amax`;
    `previous` holds for a history without any amax above 0.

    Example:
      >>> from jax_cudnn import f8
      >>> float(f8.scale_from_history([3.5, 7.0, float("nan")]))
      0.015625
    """
    known = _real("f8.scale_from_history", "history", history).astype(jnp.float32)
    if known.ndim == 0:
        raise ValueError(
            f"f8.scale_from_history: history is {describe(known)}. It must have one "
            "axis in front, of the steps. See f8.update_history."
        )
    largest = jnp.max(jnp.where(jnp.isfinite(known), known, 0), axis=0, initial=0)
    return scale_from_amax(
        largest, dtype, margin=margin, power_of_2=power_of_2, previous=previous
    )


# --- checks ---------------------------------------------------------------------------


def check_f8(
    op: str,
    dtype: DTypeLike,
    *,
    name: str = "dtype",
    advice: str = "Pass jnp.float8_e4m3fn or jnp.float8_e5m2.",
) -> np.dtype:
    """Return an f8 dtype that cuDNN has, or raise TypeError."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or dtype_name(found) not in F8:
        shown = repr(dtype) if found is None else str(found)
        raise TypeError(f"{op}: {name}={shown} is not one of {', '.join(F8)}. {advice}")
    return found


def _real(op: str, name: str, value: ArrayLike) -> jax.Array:
    array = as_operand(op, name, value)
    if array.dtype == jnp.bool_ or jnp.iscomplexobj(array):
        raise TypeError(
            f"{op}: {name} is {describe(array)}. It must be an array of real numbers."
        )
    return array


def check_margin(op: str, margin: int) -> int:
    """Return a margin as an int, or raise TypeError."""
    try:
        value = operator.index(margin)
    except TypeError:  # A traced value is one of its causes.
        value = None
    if value is None or isinstance(margin, bool | np.bool_) or abs(value) > 64:
        raise TypeError(
            f"{op}: margin={margin!r} is not an int from -64 to 64. Pass the number of "
            "powers of two to leave free."
        )
    return value


def check_tensor_scale(op: str, name: str, value: ArrayLike) -> jax.Array:
    """Return a tensor's scale as f32; NaN in place of what is not above 0.

    cuDNN takes such scales and gives zeros for them (9.19 on an H200).
    """
    array = as_operand(op, name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(
        array.dtype, jnp.integer
    ):
        raise TypeError(
            f"{op}: {name} is {describe(array)}. A scale must be a real number."
        )
    if array.size != 1:
        raise TypeError(
            f"{op}: {name} is {describe(array)}. It must be one number for the whole "
            "tensor, of shape []: cuDNN has no scales by head or block on sm_90."
        )
    scale = jnp.reshape(array, ()).astype(jnp.float32)
    return jnp.where(scale > 0, scale, jnp.nan)
