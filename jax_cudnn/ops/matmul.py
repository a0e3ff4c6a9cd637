# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.matmul` and `dot_general`: check their arguments and build the graph."""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import MatmulAttributes
from jax_cudnn.graph.rules import broadcast, broadcasts_to
from jax_cudnn.lowering import weakly_typed
from jax_cudnn.ops.activations import Activation
from jax_cudnn.ops.arguments import (
    FLOATS,
    Precision,
    as_array,
    as_factor,
    as_operand,
    check_dtype,
    describe,
    graph_dtype,
    is_weak,
    options,
    refuse_out_sharding,
    refused_by_jax,
    result_dtype,
    strongly_typed,
    sums_dtype,
    why_symbolic,
    why_without_graph,
)
from jax_cudnn.ops.fusion import Fusion
from jax_cudnn.ops.plain import Contraction, Epilogue, check_implementation, run_plain
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
    precision: Precision = None,
    preferred_element_type: object = None,
    out_sharding: object = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a matrix product with its epilogue, through cuDNN on NVIDIA GPUs.

    Shapes and broadcasting are those of :func:`jax.numpy.matmul`:

    .. math::

        \mathrm{output} = \mathrm{scale\_out} \cdot \mathrm{activation}\Big(
            \sum_r (\mathrm{scale\_a}\, a)_{mr} (\mathrm{scale\_b}\, b)_{rn}
            + \mathrm{bias} + \mathrm{residual}\Big)

    The whole formula is one kernel, except for activations that cuDNN does not have.
    Sums, and the values computed from them, are kept in f32 (f64 for f64, i32 sums for
    8-bit integers) and rounded once, to the result's dtype.

    8-bit operands beside wider ones (weight-only quantisation) are converted in the
    kernel; they never reach memory in the wider dtype. For i8 and f8 weights, "auto"
    runs XLA's kernels, which convert them in the kernel as well, until
    :func:`jax_cudnn.plans.autotune` has measured a plan of cuDNN's to be faster.
    cuDNN's first plan mostly is not (H200, cuDNN 9.19;
    docs/benchmarks/where_to_fuse.md).

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's kernels,
    for the operands whose gradient is asked for. Forward mode and higher orders run the
    jax.numpy reference.

    Axis letters: m rows, n columns, r contraction.

    Args:
      a: (..., m, r) or (r,); bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8 or u8. XLA
        runs everything else that jnp.matmul takes: other dtypes, symbolic dimensions.
      b: (..., r, n) or (r,). If the dtypes of a and b differ, they are promoted as by
        jnp.matmul; f8 beside a wider float is promoted to the wider one.
      bias: broadcasts to the result; (n,) is the usual shape. Differentiable.
      residual: broadcasts to the result; added before the activation. Differentiable.
      activation: as for :func:`jax_cudnn.conv`. Default None: none.
      scale_a: dequantises a: a number, or an array that broadcasts to a; () is one
        scale for the tensor, and (m, 1) one per row. A scale that varies along r is
        multiplied in before the product, and the scaled operand is rounded to the wider
        operand's dtype (f32 if both have 8 bits). Differentiable. Default None: 1.
      scale_b: likewise for b; (n,) or (1, n) is one scale per column.
      scale_out: multiplies the activation's result, wherever the activation is
        computed: a number, or an array that broadcasts to the result. It serves to
        quantise or to gate the result (see :func:`gated_matmul`). Differentiable.
        Default None: 1.
      precision: precision of f32 products; every value that jnp.matmul takes. Default
        None: `jax.default_matmul_precision`. cuDNN multiplies f32 in TF32, as XLA does
        on a GPU except for "highest". For "highest", and for algorithms that cuDNN does
        not have, "auto" runs XLA.
      preferred_element_type: dtype of the result. Default None: the dtype that
        jnp.matmul returns, in which sums of integers wrap around; for f8 beside a wider
        operand, the wider operand's dtype. Sums for an f64 result are kept in f64.
      out_sharding: must be None. It is accepted because nnx's layers pass it.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      (..., m, n), without m or n for an operand of rank 1. It is weakly typed if all
      operands are and `preferred_element_type` is not given.

    Raises:
      ValueError: shapes that do not fit, an unknown activation or `implementation`, an
        activation that returns anything but an array of floats of the same shape.
      TypeError: dtypes that JAX does not promote or take.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU), or no graph has such operands (raised
        at once); operands with a sharding in their type.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      docs/support.md lists which combinations cuDNN plans on which GPU. Where XLA runs
      a call on a GPU, sums over 16-bit operands are rounded to the operands' dtype
      before the epilogue, as in jax.numpy. In the gradient, the cotangent of the
      product is rounded to the dtype of 16-bit operands before it is multiplied by
      them. It is never rounded to f8: f8 operands are widened, to bf16 for a bf16
      result and otherwise to f32. For an operand that is stored transposed,
      :func:`jax_cudnn.dot_general` contracts any axes without a copy.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((5, 3, 8)), jnp.ones((8, 16))
      >>> jax_cudnn.matmul(x, w, bias=jnp.zeros(16), activation="gelu").shape
      (5, 3, 16)
    """
    refuse_out_sharding("matmul", out_sharding)
    call = options("matmul", implementation, plan, precision)
    a, b = as_operand("matmul", "a", a), as_operand("matmul", "b", b)
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ValueError(
                f"matmul: {name} is {describe(x)}. It must have one axis or more. "
                f"Multiply by a scalar with `*`, or pass it as scale_{name}."
            )
    scales = {
        name: as_factor("matmul", name, value)
        for name, value in (("scale_a", scale_a), ("scale_b", scale_b))
    }
    epilogue = Epilogue.of(
        "matmul",
        bias=bias,
        residual=residual,
        activation=activation,
        scale_out=scale_out,
    )
    weak = preferred_element_type is None and is_weak(
        *(a, b, bias, residual, scale_a, scale_b, scale_out)
    )
    if weak:
        a, b = strongly_typed(a), strongly_typed(b)
    common = _common("matmul", a, b)
    dtype = result_dtype("matmul", preferred_element_type, common.result)
    if reason := common.why_plain(dtype, a=a, b=b):
        check_implementation("matmul", reason, call)
        output = _plain_matmul(
            a, b, common, scales, epilogue, preferred_element_type, call
        )
    else:
        output = _fused_matmul(a, b, common, scales, epilogue, dtype, call)
    return weakly_typed(output) if weak else output


def _fused_matmul(
    a: jax.Array,
    b: jax.Array,
    common: "_Common",
    scales: Mapping[str, jax.Array | float | None],
    epilogue: Epilogue,
    dtype: np.dtype,
    call: Options,
) -> jax.Array:
    left, right, dropped = _as_matrices(a, b)
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
    scale_a, scale_b = scales["scale_a"], scales["scale_b"]
    problem = _Problem(
        op="matmul",
        a=_Matrix(_in_three("matmul", "a", left, a_sizes, keep=(1, 2)), _PLAIN),
        b=_Matrix(_in_three("matmul", "b", right, b_sizes, keep=(1, 2)), _PLAIN),
        sizes=(outer, rows, (n,)),
        scale_a=_scale("scale_a", scale_a, a_sizes),
        scale_b=_scale("scale_b", scale_b, b_sizes, is_vector=b.ndim == 1),
        dropped=dropped,
    )
    return _run(problem, common, epilogue, dtype, call)


def _as_matrices(
    a: jax.Array, b: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """Return vectors as matrices, and which axes of the result are there for it."""
    dropped = (*((-2,) if a.ndim == 1 else ()), *((-1,) if b.ndim == 1 else ()))
    left = a[None, :] if a.ndim == 1 else a
    return left, b[:, None] if b.ndim == 1 else b, dropped


def _plain_matmul(
    a: jax.Array,
    b: jax.Array,
    common: "_Common",
    scales: Mapping[str, jax.Array | float | None],
    epilogue: Epilogue,
    preferred: object,
    call: Options,
) -> jax.Array:
    *matrices, dropped = _as_matrices(a, b)
    rank = max(x.ndim for x in matrices)
    factors: list[jax.Array] = []
    for i, axis, (name, value) in zip((0, 1), (-1, -2), scales.items(), strict=True):
        if value is None:
            continue
        x, scale = matrices[i], jnp.asarray(value)
        if name == "scale_b" and b.ndim == 1 and scale.ndim:
            scale = scale[..., None]
        scale = jnp.reshape(scale, _padded("matmul", name, scale, x.shape))
        if scale.shape[axis] == 1:
            # The same along the sum: multiplied once, after it.
            factors.append(jnp.expand_dims(scale, tuple(range(rank - x.ndim))))
        else:
            wide = common.operands or np.dtype(np.float32)
            matrices[i] = x.astype(wide) * scale.astype(wide)
    if factors:
        epilogue = epilogue._replace(scale=functools.reduce(jnp.multiply, factors))

    def contraction(dtype: Any) -> jax.Array:
        precision: Any = call.matmul_precision
        return jnp.matmul(*matrices, precision=precision, preferred_element_type=dtype)

    def place(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        gone = () if name == "scale" else dropped
        return _undropped("matmul", name, x, shape, gone)

    if preferred is None:
        preferred = common.result
    plain = Contraction("matmul", {"a": a, "b": b}, contraction, place)
    output = run_plain(plain, preferred, epilogue)
    return jnp.squeeze(output, dropped)


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: tuple[
        tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
    ],
    precision: Precision = None,
    preferred_element_type: object = None,
    out_sharding: object = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    """Return a contraction of any axes with its epilogue, through cuDNN.

    Takes the arguments of :func:`jax.lax.dot_general`, so that it can replace that
    function, for example in Flax's dense layers. The epilogue is that of
    :func:`matmul`. The axes of an operand may be stored in any order. If its batch
    axes, its free axes and its contracted axes each lie side by side, the operand is
    read by strides; otherwise it is transposed first.

    Args:
      lhs: bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8 or u8; XLA runs everything else
        that lax takes, as for :func:`matmul`.
      rhs: likewise. If the dtypes of lhs and rhs differ, they are multiplied in the
        dtype that JAX promotes them to.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: as for :func:`matmul`.
      preferred_element_type: dtype of the result. Default None: the dtype that lax
        returns.
      out_sharding: must be None. It is accepted because nnx's layers pass it.
      bias: broadcasts to the result. Differentiable. Default None: none.
      residual: likewise, added before the activation.
      activation: as for :func:`jax_cudnn.conv`. Default None: none.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      The batch axes, the free axes of lhs, and the free axes of rhs, in this order. The
      result is weakly typed if all operands are.

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
    epilogue = Epilogue.of(
        "dot_general", bias=bias, residual=residual, activation=activation
    )
    if weak := is_weak(x, y, bias, residual):
        x, y = strongly_typed(x), strongly_typed(y)
    sums, batch = numbers = _axes(dimension_numbers)
    # jax.lax checks the axes against each other, in its own words.
    how = f", with dimension_numbers={numbers}"
    with refused_by_jax("dot_general", {"lhs": x, "rhs": y}, how=how):
        result = jax.eval_shape(lambda: jax.lax.dot_general(x, y, numbers))
    common = _common("dot_general", x, y, result.dtype)
    dtype = result_dtype("dot_general", preferred_element_type, result.dtype)
    if reason := common.why_plain(dtype, lhs=x, rhs=y):
        check_implementation("dot_general", reason, call)
        output = _plain_dot_general(
            x, y, numbers, epilogue, preferred_element_type, call
        )
    else:
        sizes = (
            tuple(x.shape[axis] for axis in batch[0]),
            tuple(x.shape[axis] for axis in _others(x.ndim, sums[0], batch[0])),
            tuple(y.shape[axis] for axis in _others(y.ndim, sums[1], batch[1])),
        )
        problem = _Problem(
            op="dot_general",
            a=_merge(x, (batch[0], _others(x.ndim, sums[0], batch[0]), sums[0])),
            b=_merge(y, (batch[1], sums[1], _others(y.ndim, sums[1], batch[1]))),
            sizes=sizes,
        )
        output = _run(problem, common, epilogue, dtype, call)
    return weakly_typed(output) if weak else output


def _plain_dot_general(
    x: jax.Array,
    y: jax.Array,
    numbers: Any,
    epilogue: Epilogue,
    preferred: object,
    call: Options,
) -> jax.Array:
    def contraction(dtype: Any) -> jax.Array:
        precision: Any = call.matmul_precision
        return jax.lax.dot_general(x, y, numbers, precision, dtype)

    def place(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return _undropped("dot_general", name, x, shape)

    plain = Contraction("dot_general", {"lhs": x, "rhs": y}, contraction, place)
    return run_plain(plain, preferred, epilogue)


class _Common(NamedTuple):
    """The dtypes of a product.

    Both operands are converted to ``operands``; None is for 8 bits, which stay as they
    are. ``result`` is what comes out by default. ``has_graph`` is whether two operands
    of 8 bits go together.
    """

    operands: np.dtype | None
    result: np.dtype
    has_graph: bool = True

    def why_plain(self, result: np.dtype, **given: jax.Array) -> str:
        """Return why no graph has the product, in sentences; "" if one has."""
        if reason := why_symbolic(**given):
            return reason
        if not self.has_graph:
            shown = " and ".join(f"{k} is {describe(x)}" for k, x in given.items())
            return (
                f"{shown}. Two operands of 8 bits must both be i8, both u8, or both "
                "floats in a graph."
            )
        if self.operands is None:
            return why_without_graph(result, **given)
        if graph_dtype(result, dtype_name(self.operands)):
            return ""
        return why_without_graph(result, **given)


def _common(
    op: str, a: jax.Array, b: jax.Array, result: np.dtype | None = None
) -> _Common:
    """Return in which dtypes two operands are multiplied, as JAX promotes them.

    A ``result`` that is given is lax's, for which promotion is neither strict nor
    impossible.
    """
    dtypes = (a.dtype, b.dtype)
    narrow = [str(dtype) in _EIGHT_BIT for dtype in dtypes]
    floats = [dtype_name(dtype) in FLOATS for dtype in dtypes]
    if all(narrow):
        kinds = [str(dtype).partition("_")[0].rstrip("0123456789") for dtype in dtypes]
        if dtypes[0] == dtypes[1] or kinds == ["float", "float"]:
            return _Common(operands=None, result=result or dtypes[0])
    for is_narrow, is_float, dtype in zip(
        narrow, floats[::-1], dtypes[::-1], strict=True
    ):
        if is_narrow and is_float:
            # Also for f8, which JAX does not promote.
            return _Common(operands=dtype, result=result or dtype)
    dtype = _promoted(op, a, b) if result is None else _promoted_by_lax(a, b, result)
    return _Common(operands=dtype, result=result or dtype, has_graph=not all(narrow))


def _promoted_by_lax(a: jax.Array, b: jax.Array, result: np.dtype) -> np.dtype:
    try:
        with jax.numpy_dtype_promotion("standard"):
            return jnp.promote_types(a.dtype, b.dtype)
    except ValueError:  # f8 beside a complex operand
        return result


def _promoted(op: str, a: jax.Array, b: jax.Array) -> np.dtype:
    try:
        return jnp.result_type(a, b)
    except ValueError:  # JAX has an exception of its own, which is one.
        raise TypeError(
            f"{op}: a is {describe(a)} and b {describe(b)}. They must have one dtype, "
            "unless one of them has 8 bits or JAX promotes them "
            "(jax_numpy_dtype_promotion is 'strict'). Convert one of them."
        ) from None


_Axes = tuple[int, ...]


def _axes(numbers: object) -> tuple[tuple[_Axes, _Axes], tuple[_Axes, _Axes]]:
    """Return dimension_numbers as ints, or raise TypeError for what is none."""
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
    return (x_sums, y_sums), (x_batch, y_batch)


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
    a: _Matrix
    b: _Matrix
    sizes: _Sizes
    scale_a: jax.Array | float | None = None
    scale_b: jax.Array | float | None = None
    dropped: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the caller's result."""
        full = tuple(size for group in self.sizes for size in group)
        return _without(full, self.dropped)


def _run(
    problem: _Problem,
    common: _Common,
    epilogue: Epilogue,
    dtype: np.dtype,
    call: Options,
) -> jax.Array:
    op, wide = problem.op, common.operands
    a, b = (_converted(each, wide) for each in (problem.a, problem.b))
    scales = ((problem.scale_a, 2), (problem.scale_b, 1))
    if wide is None and any(
        isinstance(scale, jax.Array) and scale.shape[axis] != 1
        for scale, axis in scales
    ):
        # What such a scale gives has no 8 bits.
        wide = np.dtype(np.float32)
    names = [dtype_name(each.array.dtype) for each in (a, b)]
    rounded = graph_dtype(dtype, *names)
    if wide is not None:
        names = [dtype_name(wide)]
    assert rounded is not None, "why_plain has looked"
    sums = sums_dtype(rounded, *names)
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
        fusion.operand(name, _term(problem, name, as_array(value, sums)), _PLAIN)
        for name, value in epilogue.terms
    ]
    factor = epilogue.scale_out
    if isinstance(factor, int | float):
        factor = float(factor)
    elif factor is not None:
        factor = _term(problem, "scale_out", factor)
    output = fusion.run(
        fusion.added(fusion.scaled(product, factors), terms),
        epilogue.activation,
        shape=problem.shape,
        factor=factor,
        dtype=rounded,
        order=_PLAIN,
        options=call,
    ).astype(dtype)
    return jnp.reshape(output, problem.shape)


def _converted(matrix: _Matrix, dtype: np.dtype | None) -> _Matrix:
    """Return an operand in a dtype; 8 bits stay for the kernel to convert."""
    own = matrix.array.dtype
    # No np.dtype is looked for in a tuple with None, which NumPy takes for f64.
    if dtype is None or dtype == own or str(own) in _EIGHT_BIT:
        return matrix
    return matrix._replace(array=matrix.array.astype(dtype))


def _term(problem: _Problem, name: str, array: jax.Array) -> jax.Array:
    """Return an operand of the epilogue as (batch, rows, columns), 1 where it may."""
    op, sizes, dropped = problem.op, problem.sizes, problem.dropped
    check_dtype(op, name, array)
    full = tuple(size for group in sizes for size in group)
    return _in_three(op, name, _undropped(op, name, array, full, dropped), sizes)


def _undropped(
    op: str,
    name: str,
    array: jax.Array,
    full: tuple[int, ...],
    dropped: tuple[int, ...] = (),
) -> jax.Array:
    """Return an array with the axes of a result, 1 where it broadcasts.

    It has to broadcast to the result without the axes that are dropped.
    """
    padded = _padded(op, name, array, _without(full, dropped))
    return jnp.expand_dims(jnp.reshape(array, padded), dropped)


def _without(full: tuple[int, ...], dropped: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes without the axes that are dropped, counted from the end."""
    return tuple(size for i, size in enumerate(full, -len(full)) if i not in dropped)


def _scale(
    name: str,
    value: jax.Array | float | None,
    sizes: _Sizes,
    *,
    is_vector: bool = False,
) -> jax.Array | float | None:
    if value is None or isinstance(value, int | float):
        return value if value is None else float(value)
    check_dtype("matmul", name, value)
    if is_vector and value.ndim:
        _padded("matmul", name, value, sizes[1])
        value = value[..., None]
    return _in_three("matmul", name, value, sizes)


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
            f"[{', '.join(map(str, full))}]. Each of its axes must be 1 or that size. "
            "Reshape it."
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
