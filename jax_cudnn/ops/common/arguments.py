# SPDX-License-Identifier: Apache-2.0
"""Argument checks and conversions that several operations share."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import (
    Implementation,
    MatmulPrecision,
    Options,
    PlanOptions,
)
from jax_cudnn.graph import DTypeName, Tensor
from jax_cudnn.graph.rules import F8, accumulator
from jax_cudnn.lowering import (
    call_options,
    is_on_host,
    partial_axes,
    unreduced_in,
)
from jax_cudnn.reference.dtypes import dtype_name

FLOATS = ("bf16", "f16", "f32", "f64")
# The dtypes that the operands of a contraction may have.
CONTRACTED = (*FLOATS, *F8, "i8", "u8")
# A precision as JAX's operations take it: one for both operands, or one for each.
Precision = (
    str
    | jax.lax.Precision
    | jax.lax.DotAlgorithm
    | jax.lax.DotAlgorithmPreset
    | tuple[str, str]
    | tuple[jax.lax.Precision, jax.lax.Precision]
    | None
)


def describe(x: jax.Array) -> str:
    """Return dtype and shape as JAX prints them."""
    name = dtype_name(x.dtype) or str(x.dtype)
    return f"{name}[{','.join(map(str, x.shape))}]"


def each_described(**operands: jax.Array) -> str:
    """Return which operand is what, in words."""
    return " and ".join(f"{name} is {describe(x)}" for name, x in operands.items())


def in_front(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return a shape with as many 1s in front as a rank asks for, as in NumPy."""
    return (1,) * (rank - len(shape)) + shape


def known_values(x: jax.Array) -> np.ndarray | None:
    """Return an array's values; None of one that is traced or on a GPU."""
    return np.asarray(x) if is_on_host(x) else None


def options(
    op: str,
    implementation: Implementation | None,
    plan: PlanOptions | None,
    precision: Precision = None,
) -> Options:
    """Return the options of a call, completed by the settings in force at tracing."""
    if precision is None:
        # Set on the class when JAX is imported, where type checkers do not see it.
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    canonical = _canonical_precision(op, precision)
    try:
        return call_options(implementation, plan, canonical)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{op}: {error}") from None


def _canonical_precision(op: str, precision: Precision) -> MatmulPrecision:
    """Return a precision's name, the names of two that differ, or an algorithm."""
    # Checked before the pairs: an algorithm is a tuple, too.
    if precision is None or isinstance(precision, jax.lax.DotAlgorithm):
        return precision
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    if isinstance(precision, str):
        if precision == "DEFAULT":  # an algorithm by its name only
            return "default"
        if precision in _ALGORITHMS:
            return precision
    # A list is not hashable, and lax does not take one; here it is read as a pair.
    is_pair = isinstance(precision, tuple | list)
    pair = tuple(precision) if is_pair else (precision, precision)
    if len(pair) == 2 and all(map(_is_precision, pair)):
        # Not every alias is a name that jax.default_matmul_precision takes.
        first, second = (jax.lax.Precision(each).name.lower() for each in pair)
        return first if first == second else (first, second)
    raise ValueError(
        f"{op}: precision={precision!r} is not one that JAX has. Pass None, one of "
        f"{', '.join(map(repr, _PRECISIONS))}, a jax.lax.Precision, a pair of these, "
        "or a jax.lax.DotAlgorithmPreset, its name, or a jax.lax.DotAlgorithm."
    )


# The names and aliases of jax.lax.Precision.
_PRECISIONS = (
    *("default", "fastest", "bfloat16"),
    *("high", "bfloat16_3x", "tensorfloat32"),
    *("highest", "float32"),
)


_ALGORITHMS = jax.lax.DotAlgorithmPreset.__members__


def _is_precision(value: object) -> bool:
    if isinstance(value, str):
        return value in _PRECISIONS
    return isinstance(value, jax.lax.Precision)


def as_operand(op: str, name: str, value: ArrayLike) -> jax.Array:
    """Return the value as an array, or raise TypeError if it is not one."""
    try:
        if value is None or isinstance(value, str | bytes):
            raise TypeError
        array = array_of(value)
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # random keys
            raise TypeError
        return array
    except jax.errors.JAXTypeError:
        raise  # about a traced value: JAX's own message explains it
    except (TypeError, ValueError, OverflowError):
        shown = (
            "None" if value is None else f"{repr(value)[:40]} ({type(value).__name__})"
        )
        raise TypeError(
            f"{op}: {name} is {shown}. It must be an array of numbers. Pass a "
            "jax.Array, or what jnp.asarray takes."
        ) from None


def array_of(value: ArrayLike) -> jax.Array:
    """Return what `jnp.asarray` does, an array as it is.

    In an Explicit mesh, the `jnp.asarray` of JAX 0.10 fails within a vmap over another
    axis than the first: it takes the sharding of one axis for that of another.
    """
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def as_factor(op: str, name: str, value: ArrayLike | None) -> jax.Array | float | None:
    """Return a factor: an array, or a finite number, which goes into the graph."""
    if value is None:
        return None
    if isinstance(value, int | float):
        _check_finite(op, name, value)
        return value
    return as_operand(op, name, value)


def as_term(op: str, name: str, value: ArrayLike | None) -> jax.Array | float | None:
    """Return a summand: an array, or a number, which `as_array` makes an array."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        return as_operand(op, name, value)
    try:
        float(value)
    except OverflowError:
        raise ValueError(
            f"{op}: {name}={value} is too large for a float. Pass a smaller number, "
            "or an array of any values."
        ) from None
    return value


def _check_finite(op: str, name: str, value: float) -> None:
    """Raise ValueError for a number that cannot become part of the program."""
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an int that no float holds
        is_finite = False
    if not is_finite:
        raise ValueError(
            f"{op}: {name}={value} is not finite. A number is part of the program, and "
            "must be finite. Pass a finite number, or an array of any values."
        )


@contextmanager
def refused_by_jax(
    op: str,
    operands: Mapping[str, jax.Array],
    *,
    how: str = "",
    hint: Callable[[], str] = lambda: "",
) -> Iterator[None]:
    """Raise JAX's refusal of operands again, with the operation and the operands named.

    ``how`` is text about how they are combined, and follows the operands. ``hint``
    returns a sentence to add at the end, or "".
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        shown = [f"{name} {describe(x)}" for name, x in operands.items()]
        shown[0] = shown[0].replace(" ", " is ", 1)
        raise kind(f"{op}: {' and '.join(shown)}{how}: {error}{hint()}") from error


def struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, without its sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def check_dtype(
    op: str,
    name: str,
    x: jax.Array,
    *,
    also: str = "",
    advice: str = "Convert it to one of them.",
) -> None:
    """Raise TypeError unless the operand is of floats; the message tells `also`."""
    if dtype_name(x.dtype) not in FLOATS:
        raise TypeError(
            f"{op}: {name} is {describe(x)}. Supported dtypes are {', '.join(FLOATS)}"
            f"{also}. {advice}"
        )


def check_flag(op: str, name: str, value: bool) -> bool:
    """Return a bool, or raise TypeError for what is none or is not known yet."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise _not_static(op, name, value, "True or False")


def check_int(op: str, name: str, value: int) -> int:
    """Return an int, or raise TypeError for what is none or is not known yet."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    raise _not_static(op, name, value, "an int")


def check_number(op: str, name: str, value: float) -> float:
    """Return a float, or raise TypeError for what is none or is not known yet."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if is_number and not isinstance(value, bool):
        return float(value)
    raise _not_static(op, name, value, "a number")


def _not_static(op: str, name: str, value: object, what: str) -> TypeError:
    return TypeError(
        f"{op}: {name} is {type(value).__name__}. It must be {what}, since it is part "
        "of the compiled program. Under jax.jit, name it in static_argnames."
    )


def check_integers(op: str, name: str, value: ArrayLike) -> jax.Array:
    """Return an array of integers, or raise TypeError."""
    array = as_operand(op, name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{op}: {name} is {describe(array)}. It must hold integers. Convert it to "
            "int32."
        )
    return array


def clipped(array: jax.Array, largest: Any) -> jax.Array:
    """Return integers of any dtype between 0 and a size, as i32.

    They are clipped in their own dtype: a longer one would wrap.
    """
    most = int(jnp.iinfo(array.dtype).max)
    if isinstance(largest, int):
        largest = min(largest, most)
    else:  # A symbolic size.
        largest = jnp.asarray(largest, array.dtype)
    return jnp.clip(array, 0, largest).astype(jnp.int32)


def is_more(count: Any, room: Any) -> bool:
    """Whether a number of tokens is known to be more than there is room for."""
    return isinstance(count, int) and isinstance(room, int) and count > room


def result_dtype(op: str, preferred: object, default: np.dtype) -> np.dtype:
    """Return the dtype of a call's result, or raise TypeError for what is no dtype."""
    return default if preferred is None else _canonical(op, preferred)


def graph_dtype(dtype: np.dtype, *operands: str | None) -> DTypeName | None:
    """Return the dtype of the graph's result for these operands and a result `dtype`.

    For 8-bit integers and a result of integers of 32 bits or less, this is i32, the
    dtype of their sums. None if no graph has such operands or such a result.
    """
    if any(each not in CONTRACTED for each in operands):
        return None
    name = dtype_name(dtype)
    if _are_integers(*operands) and jnp.issubdtype(dtype, jnp.integer):
        return "i32" if dtype.itemsize <= 4 else None
    return name if name in (*FLOATS, *F8) else None  # type: ignore[return-value]


def sums_dtype(result: DTypeName, *operands: str | None) -> DTypeName:
    """Return the dtype of a contraction's sums: f64 for an f64 result."""
    return "f64" if result == "f64" else accumulator(*operands)  # type: ignore[arg-type]


def _are_integers(*dtypes: str | None) -> bool:
    return all(dtype in ("i8", "u8") for dtype in dtypes)


def why_symbolic(**arrays: jax.Array | None) -> str:
    """Return which array has symbolic dimensions, in a sentence; "" if none has."""
    for name, x in arrays.items():
        if x is not None and not all(isinstance(size, int) for size in x.shape):
            return (
                f"{name} has symbolic dimensions, {describe(x)}. A cuDNN plan is made "
                "for one shape."
            )
    return ""


def why_partial(out_sharding: object = None, **arrays: jax.Array) -> str:
    """Return which array devices have shares of, in a sentence; "" if none.

    So it may be with the gradients of `arrays` that their types call reduced, and with
    the result by the sharding that is asked for.
    """
    for name, x in arrays.items():
        if axes := partial_axes(x):
            return (
                f"The type of {name}, {jax.typeof(x)}, is reduced or unreduced along "
                f"{', '.join(sorted(axes))} of the mesh. Graphs give devices no shares "
                "of gradients."
            )
    if axes := unreduced_in(out_sharding):
        return (
            f"out_sharding leaves the result unreduced along {', '.join(sorted(axes))} "
            "of the mesh. Graphs give devices no shares of results."
        )
    return ""


def why_without_graph(dtype: np.dtype, **operands: jax.Array) -> str:
    """Return why no graph has operands and a result of these dtypes; "" if one has."""
    if graph_dtype(dtype, *(dtype_name(x.dtype) for x in operands.values())):
        return ""
    return (
        f"{each_described(**operands)}, and the result {dtype_name(dtype) or dtype}. "
        f"Graphs have operands of {', '.join(CONTRACTED)} and results of "
        f"{', '.join(FLOATS)}, f8_e4m3fn and f8_e5m2, or the integers that sums of i8 "
        "or u8 are."
    )


def strongly_typed(x: jax.Array) -> jax.Array:
    """Return an array that is not weakly typed; its gradient is as weak as `x` was."""
    return jax.lax.convert_element_type(x, x.dtype)


def is_weak(*values: ArrayLike | None) -> bool:
    """Whether all values that are not None are weakly typed."""
    # Python's numbers are; an array of an int may not hold it.
    given = (x for x in values if x is not None and type(x) not in (int, float))
    return all(jax.typeof(array_of(each)).weak_type for each in given)


def _canonical(op: str, dtype: object) -> np.dtype:
    """Return the dtype that arrays get: without x64, f64 is f32, with JAX's warning."""
    like: DTypeLike = dtype  # type: ignore[assignment]
    try:
        return jax.eval_shape(lambda: jnp.zeros((), like)).dtype
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: preferred_element_type={dtype!r} is not a dtype. Pass one, for "
            "example jnp.float32."
        ) from None


def tensor(
    name: str,
    stored: jax.Array,
    order: tuple[int, ...],
    sizes: tuple[int, ...] | None = None,
) -> Tensor:
    """Return the tensor of an array that stores the logical axes in `order`.

    `sizes` are theirs, as stored; by default those of the array.
    """
    dtype = dtype_name(stored.dtype)
    assert dtype is not None
    sizes = sizes or stored.shape
    dims = tuple(sizes[order.index(axis)] for axis in range(len(order)))
    return Tensor(name=name, dtype=dtype, dims=dims, order=order)  # type: ignore[arg-type]


def as_array(value: jax.Array | float, accumulator: DTypeName) -> jax.Array:
    """Return an array; a Python number is f32, or f64 beside sums in f64."""
    if isinstance(value, jax.Array):
        return value
    return jnp.asarray(value, jnp.float64 if accumulator == "f64" else jnp.float32)


def check_epsilon(op: str, value: float) -> float:
    """Return epsilon, or raise what is wrong with it."""
    number = check_number(op, "epsilon", value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"{op}: epsilon={number}. It must be finite, and 0 or more: it is added to "
            "a variance. Pass a small number such as 1e-6."
        )
    return number
