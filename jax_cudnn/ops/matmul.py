# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.matmul` and `dot_general`: check their arguments and build the graph."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import MatmulAttributes
from jax_cudnn.graph.rules import accumulator, broadcast, broadcasts_to
from jax_cudnn.ops.activations import Activation
from jax_cudnn.ops.arguments import (
    CONTRACTED,
    Precision,
    as_array,
    as_operand,
    check_dimensions_known,
    check_dtype,
    describe,
    finite,
    options,
    refuse_out_sharding,
    result_dtype,
)
from jax_cudnn.ops.fusion import Fusion
from jax_cudnn.reference.dtypes import dtype_name

_EIGHT_BIT = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_PLAIN = (0, 1, 2)


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    scale_out: ArrayLike | None = None,
    precision: Precision | Sequence[Precision] = None,
    preferred_element_type: object = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a matrix product with what follows it, through cuDNN on NVIDIA GPUs.

    Shapes and broadcasting are those of :func:`jax.numpy.matmul`:

    .. math::

        \mathrm{output} = \mathrm{scale\_out} \cdot \mathrm{activation}\Big(
            \sum_r (\mathrm{scale\_a}\, a)_{mr} (\mathrm{scale\_b}\, b)_{rn}
            + \mathrm{bias} + \mathrm{residual}\Big)

    All of it is one kernel. Sums, and what follows them, are kept in f32 (f64 for f64,
    i32 sums for 8-bit integers) and rounded once, to the result's dtype. Operands of 8
    bits beside wider ones (weight-only quantisation) are converted in the kernel; they
    never reach memory in the wider dtype. For i8 and f8 weights "auto" takes XLA's
    kernels, which do so as well, until :func:`jax_cudnn.plans.autotune` has measured a
    plan of cuDNN's to be faster: its first one mostly is not (H200, cuDNN 9.19;
    docs/benchmarks/where_to_fuse.md).

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's kernels,
    for the operands whose gradient is asked for; forward mode and higher orders run the
    jax.numpy reference.

    Axis letters: m rows, n columns, r contraction.

    Args:
      a: (..., m, r) or (r,); bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8 or u8.
      b: (..., r, n) or (r,), of a's dtype, or one of the two of 8 bits.
      bias: broadcasts to the result; (n,) is the usual one. Differentiable.
      residual: likewise, added before the activation. Differentiable.
      activation: as for :func:`jax_cudnn.conv`. Default None: none.
      scale_a: dequantises a: a number, or an array that broadcasts to a, () per tensor
        or (m, 1) per row. One that varies along r is multiplied in before the product
        and rounded to the wider operand's dtype (f32 where both have 8 bits).
        Differentiable. Default None: 1.
      scale_b: likewise for b; (n,) or (1, n) is per column.
      scale_out: multiplies what the activation returns, in the same kernel: a number
        or an array that broadcasts to the result, to quantise it or to gate it (see
        :func:`gated_matmul`). Differentiable. Default None: 1.
      precision: of f32 products, as for jnp.matmul. Default None:
        `jax.default_matmul_precision`. cuDNN multiplies f32 in TF32, as XLA does by
        default; for a higher precision "auto" runs XLA.
      preferred_element_type: dtype of the result. Default None: that of the wider
        operand; for two operands of 8-bit integers it has to be given.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      (..., m, n), without m or n for an operand of rank 1.

    Raises:
      ValueError: shapes that do not fit, an unknown activation or `implementation`.
      TypeError: dtypes that are not taken or differ.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU); symbolic dimensions; operands with a
        sharding in their type.
      LibraryError: likewise, where cuDNN itself is missing or too old.

    Notes:
      docs/support.md lists which combinations cuDNN plans on which GPU. Where XLA runs
      a call on a GPU, sums over 16-bit operands are rounded to their dtype before what
      follows them, as they are in jax.numpy. For an operand that is stored transposed,
      :func:`jax_cudnn.dot_general` contracts any axes without a copy.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((5, 3, 8)), jnp.ones((8, 16))
      >>> jax_cudnn.matmul(x, w, bias=jnp.zeros(16), activation="gelu").shape
      (5, 3, 16)
    """
    call = options("matmul", implementation, plan, precision)
    a, b = as_operand("matmul", "a", a), as_operand("matmul", "b", b)
    for name, x in (("a", a), ("b", b)):
        check_dimensions_known("matmul", name, x)
        if x.ndim == 0:
            raise ValueError(
                f"matmul: {name} is {describe(x)}. It must have one axis or more. "
                f"Multiply by a scalar with `*`, or pass it as scale_{name}."
            )
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"matmul: a is {describe(a)} and b {describe(b)}. The last axis of a must "
            "be as long as the last but one of b (the only one, of rank 1). Transpose "
            "or reshape one of them."
        )
    try:
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except ValueError:
        raise ValueError(
            f"matmul: a is {describe(a)} and b {describe(b)}. Their batch axes, all "
            "but the last two, must broadcast. Reshape one of them."
        ) from None
    m, r, n = left.shape[-2], left.shape[-1], right.shape[-1]
    # Without a batch of its own, b serves all rows of a as one matrix.
    is_shared = math.prod(right.shape[:-2]) == 1
    outer, rows = ((), (*batch, m)) if is_shared else (batch, (m,))
    a_sizes = (outer, rows, (r,))
    b_sizes = (right.shape[:-2] if is_shared else batch, (r,), (n,))
    problem = _Problem(
        op="matmul",
        given=(a, b),
        a=_Matrix(_in_three("matmul", "a", left, a_sizes, keep=(1, 2)), _PLAIN),
        b=_Matrix(_in_three("matmul", "b", right, b_sizes, keep=(1, 2)), _PLAIN),
        sizes=(outer, rows, (n,)),
        scale_a=_scale("scale_a", scale_a, a_sizes),
        scale_b=_scale("scale_b", scale_b, b_sizes, is_vector=b.ndim == 1),
        scale_out=scale_out,
        dropped=(*((-2,) if a.ndim == 1 else ()), *((-1,) if b.ndim == 1 else ())),
    )
    output = _run(problem, bias, residual, activation, preferred_element_type, call)
    shape = (*batch, *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ()))
    return jnp.reshape(output, shape)


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: tuple[
        tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
    ],
    precision: Precision | Sequence[Precision] = None,
    preferred_element_type: object = None,
    *,
    out_sharding: object = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    """Return a contraction of any axes with what follows it, through cuDNN.

    Takes what :func:`jax.lax.dot_general` takes, so that it can stand in for it, in
    Flax's dense layers for one. The epilogue is that of :func:`matmul`. The axes of an
    operand may lie in any order: where its batch, free and contracted axes each lie
    side by side, it is read by strides; else it is transposed first.

    Args:
      lhs: bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8 or u8.
      rhs: of lhs's dtype, or one of the two of 8 bits.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: as for :func:`matmul`.
      preferred_element_type: as for :func:`matmul`.
      out_sharding: must be None, which nnx's layers pass.
      bias: broadcasts to the result. Differentiable. Default None: none.
      residual: likewise, added before the activation.
      activation: as for :func:`jax_cudnn.conv`. Default None: none.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      The batch axes, the free axes of lhs, and those of rhs, in this order.

    Raises:
      ValueError, TypeError, UnsupportedError, LibraryError: as :func:`matmul`.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((5, 3, 8)), jnp.ones((16, 8))
      >>> jax_cudnn.dot_general(x, w, (((2,), (1,)), ((), ()))).shape
      (5, 3, 16)
    """
    refuse_out_sharding("dot_general", out_sharding)
    call = options("dot_general", implementation, plan, precision)
    x = as_operand("dot_general", "lhs", lhs)
    y = as_operand("dot_general", "rhs", rhs)
    for name, operand in (("lhs", x), ("rhs", y)):
        check_dimensions_known("dot_general", name, operand)
    (x_sums, y_sums), (x_batch, y_batch) = _axes(x, y, dimension_numbers)
    x_free = _others(x.ndim, x_sums, x_batch)
    y_free = _others(y.ndim, y_sums, y_batch)
    sizes = (
        tuple(x.shape[axis] for axis in x_batch),
        tuple(x.shape[axis] for axis in x_free),
        tuple(y.shape[axis] for axis in y_free),
    )
    problem = _Problem(
        op="dot_general",
        given=(x, y),
        a=_merge(x, (x_batch, x_free, x_sums)),
        b=_merge(y, (y_batch, y_sums, y_free)),
        sizes=sizes,
    )
    return _run(problem, bias, residual, activation, preferred_element_type, call)


_Axes = tuple[int, ...]


def _axes(
    x: jax.Array, y: jax.Array, numbers: object
) -> tuple[tuple[_Axes, _Axes], tuple[_Axes, _Axes]]:
    """Return dimension_numbers as ints; jax.lax checks them, in its own words."""
    try:
        (x_sums, y_sums), (x_batch, y_batch) = (
            tuple(tuple(map(operator.index, axes)) for axes in pair)
            for pair in numbers  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):
        raise TypeError(
            f"dot_general: dimension_numbers={numbers!r} is not ((lhs contracting, rhs "
            "contracting), (lhs batch, rhs batch)), each a sequence of ints. Pass for "
            "example (((1,), (0,)), ((), ())) for the product of two matrices."
        ) from None
    found = (x_sums, y_sums), (x_batch, y_batch)
    shapes = (jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in (x, y))
    try:
        jax.eval_shape(lambda x, y: jax.lax.dot_general(x, y, found), *shapes)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"dot_general: lhs is {describe(x)} and rhs {describe(y)}, with "
            f"dimension_numbers={found}: {error}"
        ) from error
    return found


# Sizes of the axes that are merged into batch, rows and columns of a matrix.
_Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class _Matrix(NamedTuple):
    """An operand of rank 3, its axes stored in `order` of (batch, rows, columns)."""

    array: jax.Array
    order: tuple[int, ...]


class _Problem(NamedTuple):
    """A product of two matrices; `sizes` are the axes of the result.

    ``dropped`` are those of size 1 that the caller, whose operand is a vector, has not.
    """

    op: str
    given: tuple[jax.Array, jax.Array]
    a: _Matrix
    b: _Matrix
    sizes: _Sizes
    scale_a: jax.Array | float | None = None
    scale_b: jax.Array | float | None = None
    scale_out: ArrayLike | None = None
    dropped: tuple[int, ...] = ()


def _run(
    problem: _Problem,
    bias: ArrayLike | None,
    residual: ArrayLike | None,
    activation: Activation | None,
    preferred: object,
    call: Options,
) -> jax.Array:
    op, sizes = problem.op, problem.sizes
    a, b, wide = _promote(problem)
    dtype = result_dtype(
        op,
        preferred,
        a.array.dtype if wide is None else wide,
        " and ".join(map(describe, problem.given)),
    )
    scales = ((problem.scale_a, 2), (problem.scale_b, 1))
    if wide is None and any(
        isinstance(scale, jax.Array) and scale.shape[axis] != 1
        for scale, axis in scales
    ):
        # What such a scale gives has no 8 bits.
        wide = np.dtype(np.float32)
    names = [dtype_name(each.array.dtype) for each in (a, b)]
    sums = accumulator(*names) if wide is None else accumulator(dtype_name(wide))  # type: ignore[arg-type]
    fusion = Fusion(op, sums)
    writer = fusion.writer
    sides = {"a": fusion.operand("a", *a), "b": fusion.operand("b", *b)}
    factors: list[str | float] = []
    for role, axis, scale in (("a", 2, problem.scale_a), ("b", 1, problem.scale_b)):
        if isinstance(scale, int | float):
            factors.append(scale)
        elif scale is not None:
            name = fusion.operand(f"scale_{role}", scale, _PLAIN)
            if scale.shape[axis] == 1:
                # The same along the sum: multiplied once, after it.
                factors.append(name)
            else:
                sides[role] = fusion.scaled(sides[role], [name])
        if wide is not None:
            sides[role] = writer.cast(sides[role], dtype_name(wide))  # type: ignore[arg-type]
    first, second = (writer[name].dims for name in sides.values())
    product = writer.node(
        "matmul",
        sides,
        MatmulAttributes(),
        dims=(*broadcast(first[:1], second[:1]), first[1], second[2]),
        order=_PLAIN,
        dtype=sums,
    )
    terms = [
        fusion.operand(
            name, _term(problem, name, as_array(op, name, value, sums)), _PLAIN
        )
        for name, value in (("bias", bias), ("residual", residual))
        if value is not None
    ]
    value = fusion.activated(fusion.scaled(product, factors), terms, activation)
    last = problem.scale_out
    if isinstance(last, int | float):
        value = fusion.scaled(value, [finite(op, "scale_out", last)])
    elif last is not None:
        term = _term(problem, "scale_out", as_operand(op, "scale_out", last))
        value = fusion.scaled(value, [fusion.operand("scale_out", term, _PLAIN)])
    output = fusion.run(value, dtype, _PLAIN, call)
    return jnp.reshape(output, tuple(size for group in sizes for size in group))


def _promote(problem: _Problem) -> tuple[_Matrix, _Matrix, np.dtype | None]:
    """Return the operands and the dtype that both take part in, None for 8 bits."""
    op, a, b = problem.op, problem.a, problem.b
    names = ("lhs", "rhs") if op == "dot_general" else ("a", "b")
    for name, array in zip(names, problem.given, strict=True):
        check_dtype(op, name, array, CONTRACTED)
    first, second = map(describe, problem.given)
    shown = f"{names[0]} is {first} and {names[1]} {second}"
    narrow = [str(each.array.dtype) in _EIGHT_BIT for each in (a, b)]
    if all(narrow):
        kinds = [str(each.array.dtype).partition("_")[0] for each in (a, b)]
        if kinds[0] != kinds[1]:
            raise TypeError(
                f"{op}: {shown}. Two operands of 8 bits must both be i8, both u8, or "
                "both floats. Convert one of them."
            )
        return a, b, None
    if any(narrow):
        return a, b, (b if narrow[0] else a).array.dtype
    try:
        dtype = jnp.result_type(a.array, b.array)
    except ValueError:  # JAX has an exception of its own, which is one.
        raise TypeError(
            f"{op}: {shown}. They must have one dtype, unless one of them has 8 bits "
            "or JAX promotes them (jax_numpy_dtype_promotion is 'strict'). Convert one "
            "of them."
        ) from None
    return *(each._replace(array=each.array.astype(dtype)) for each in (a, b)), dtype  # type: ignore[return-value]


def _term(problem: _Problem, name: str, array: jax.Array) -> jax.Array:
    """Return an operand of the epilogue as (batch, rows, columns), 1 where it may."""
    op, sizes, dropped = problem.op, problem.sizes, problem.dropped
    check_dimensions_known(op, name, array)
    check_dtype(op, name, array)
    if dropped:
        full = [size for group in sizes for size in group]
        kept = [size for i, size in enumerate(full, -len(full)) if i not in dropped]
        padded = _padded(op, name, array, tuple(kept))
        array = jnp.expand_dims(jnp.reshape(array, padded), dropped)
    return _in_three(op, name, array, sizes)


def _scale(
    name: str, value: ArrayLike | None, sizes: _Sizes, *, is_vector: bool = False
) -> jax.Array | float | None:
    if value is None or isinstance(value, int | float):
        return value if value is None else finite("matmul", name, value)
    array = as_operand("matmul", name, value)
    check_dimensions_known("matmul", name, array)
    check_dtype("matmul", name, array)
    if is_vector and array.ndim:
        _padded("matmul", name, array, sizes[1])
        array = array[..., None]
    return _in_three("matmul", name, array, sizes)


def _in_three(
    op: str, name: str, array: jax.Array, sizes: _Sizes, keep: tuple[int, ...] = ()
) -> jax.Array:
    """Merge an array's axes into three, each 1 where the array broadcasts along it.

    The groups in `keep` take the array's own sizes, and are broadcast if need be.
    """
    full = tuple(size for group in sizes for size in group)
    padded = _padded(op, name, array, full)
    shape: list[int] = []
    merged: list[int] = []
    for i, group in enumerate(sizes):
        own = padded[len(shape) : len(shape) + len(group)]
        shape += group if i in keep or any(size != 1 for size in own) else own
        merged.append(math.prod(shape[len(shape) - len(group) :]))
    return jnp.reshape(jnp.broadcast_to(jnp.reshape(array, padded), shape), merged)


def _padded(
    op: str, name: str, array: jax.Array, full: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the array's shape with leading 1s, or raise ValueError."""
    padded = (1,) * (len(full) - array.ndim) + array.shape
    if not broadcasts_to(padded, full):
        raise ValueError(
            f"{op}: {name} is {describe(array)}, which does not broadcast to "
            f"{list(full)}. Each of its axes must be 1 or that size. Reshape it."
        )
    return padded


def _others(rank: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        axis for axis in range(rank) if not any(axis in each for each in taken)
    )


def _merge(x: jax.Array, groups: _Sizes) -> _Matrix:
    """Merge groups of axes into three; those that lie side by side are not moved."""
    # The groups in the order in which they are stored; empty ones first.
    order = sorted(range(3), key=lambda i: min(groups[i], default=-1))
    axes = [axis for i in order for axis in groups[i]]
    if axes != list(range(x.ndim)):
        order = [0, 1, 2]
        x = jnp.transpose(x, [axis for group in groups for axis in group])
        groups = _consecutive(groups)
    sizes = [math.prod(x.shape[axis] for axis in groups[i]) for i in order]
    return _Matrix(jnp.reshape(x, sizes), tuple(order))


def _consecutive(groups: _Sizes) -> _Sizes:
    starts = np.cumsum([0, *map(len, groups)])
    return tuple(  # type: ignore[return-value]
        tuple(range(start, start + len(group)))
        for start, group in zip(starts, groups, strict=False)
    )
