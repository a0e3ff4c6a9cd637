# SPDX-License-Identifier: Apache-2.0
"""What the operations' argument checks have in common."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import DTypeName, Tensor
from jax_cudnn.lowering import call_options
from jax_cudnn.reference.dtypes import dtype_name

FLOATS = ("bf16", "f16", "f32", "f64")
# What the operands of a contraction may be.
CONTRACTED = (*FLOATS, "f8_e4m3fn", "f8_e5m2", "i8", "u8")
# A precision as JAX's operations take it, less the pair for each operand.
Precision = str | jax.lax.Precision | None


def describe(x: jax.Array) -> str:
    """Return dtype and shape as JAX prints them."""
    name = dtype_name(x.dtype) or str(x.dtype)
    return f"{name}[{','.join(map(str, x.shape))}]"


def options(
    op: str,
    implementation: Implementation | None,
    plan: PlanOptions | None,
    precision: Precision | Sequence[Precision] = None,
) -> Options:
    """Return the options of a call, with what is in force where it is traced."""
    # Set on the class when JAX is imported, where type checkers do not see it.
    default: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if isinstance(precision, tuple | list):
        first, *others = precision
        if any(each != first for each in others):
            raise ValueError(
                f"{op}: precision={precision!r} differs between the operands. cuDNN "
                "has one for both. Pass one."
            )
        precision = first
    assert precision is None or isinstance(precision, str | jax.lax.Precision)
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    try:
        return call_options(
            implementation, plan, default if precision is None else precision
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op}: {error}") from None


def as_operand(op: str, name: str, value: ArrayLike) -> jax.Array:
    """Return an array, or raise TypeError for what is none."""
    try:
        if value is None or isinstance(value, str | bytes):
            raise TypeError
        return jnp.asarray(value)
    except jax.errors.JAXTypeError:
        raise  # of a traced value
    except (TypeError, ValueError, OverflowError):
        shown = (
            "None" if value is None else f"{repr(value)[:40]} ({type(value).__name__})"
        )
        raise TypeError(
            f"{op}: {name} is {shown}. It must be an array of numbers. Pass a "
            "jax.Array, or what jnp.asarray takes."
        ) from None


def finite(op: str, name: str, value: float) -> float:
    """Return a number that becomes part of the program, or raise ValueError."""
    if not math.isfinite(value):
        raise ValueError(
            f"{op}: {name}={value} is not finite. A number is part of the program, and "
            "must be finite. Pass a finite number, or an array of any values."
        )
    return float(value)


def check_dimensions_known(op: str, name: str, x: jax.Array) -> None:
    """Raise UnsupportedError for the symbolic dimensions of jax.export."""
    if not all(isinstance(size, int) for size in x.shape):
        raise UnsupportedError(
            f"{op}: {name} has symbolic dimensions, {describe(x)}. A cuDNN plan is "
            "made for one shape. Export the function for each shape it is to serve."
        )


def refuse_out_sharding(op: str, out_sharding: object) -> None:
    """Raise UnsupportedError for the sharding that a result is asked to have."""
    if out_sharding is not None:
        raise UnsupportedError(
            f"{op}: out_sharding={out_sharding} was passed. A cuDNN call runs on one "
            "device's share of the operands and gives its share of the result. Make "
            "the call inside jax.shard_map, or shard its result."
        )


def check_dtype(
    op: str, name: str, x: jax.Array, taken: tuple[str, ...] = FLOATS
) -> None:
    """Raise TypeError unless the operand has one of the dtypes."""
    if dtype_name(x.dtype) not in taken:
        raise TypeError(
            f"{op}: {name} is {describe(x)}. Supported dtypes are {', '.join(taken)}. "
            "Convert it to one of them."
        )


def result_dtype(
    op: str, preferred: object, default: np.dtype, operands: str
) -> DTypeName:
    """Return the result's dtype, or raise TypeError for one that is not taken."""
    dtype = default if preferred is None else _canonical(op, preferred)
    name = dtype_name(dtype)
    taken = (*FLOATS, "i32", "f8_e4m3fn", "f8_e5m2")
    if name not in taken:
        advice = "Pass one of them as preferred_element_type."
        if preferred is None and name in ("i8", "u8"):
            advice = (
                "8-bit results would wrap around: pass preferred_element_type, "
                "for example jnp.int32, or jnp.bfloat16 with a scale."
            )
        raise TypeError(
            f"{op}: the result of {operands} would be {name or dtype}. Supported are "
            f"{', '.join(taken)}. {advice}"
        )
    if name == "i32" and dtype_name(default) not in ("i8", "u8"):
        raise TypeError(
            f"{op}: the result of {operands} would be i32. That is the dtype of sums "
            "of 8-bit integers. Pass a float as preferred_element_type."
        )
    return name  # type: ignore[return-value]


def _canonical(op: str, dtype: object) -> np.dtype:
    """Return a dtype as arrays have it: f64 is f32, with JAX's warning, without x64."""
    like: DTypeLike = dtype  # type: ignore[assignment]
    try:
        return jax.eval_shape(lambda: jnp.zeros((), like)).dtype
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: preferred_element_type={dtype!r} is not a dtype. Pass one, for "
            "example jnp.float32."
        ) from None


def tensor(name: str, stored: jax.Array, order: tuple[int, ...]) -> Tensor:
    """Return the tensor of an array whose axes are the logical ones in `order`."""
    dtype = dtype_name(stored.dtype)
    assert dtype is not None
    dims = tuple(stored.shape[order.index(axis)] for axis in range(len(order)))
    return Tensor(name=name, dtype=dtype, dims=dims, order=order)  # type: ignore[arg-type]


def as_array(op: str, name: str, value: ArrayLike, accumulator: DTypeName) -> jax.Array:
    """Return an array; a Python number is f32, or f64 beside sums in f64."""
    if isinstance(value, bool | int | float):
        return jnp.asarray(value, jnp.float64 if accumulator == "f64" else jnp.float32)
    return as_operand(op, name, value)
