# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.conv`: checks a fused convolution's arguments and builds its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph.products.conv import CONV_FPROP
from jax_cudnn.graph.shapes import result_dims
from jax_cudnn.lowering import (
    explicit_part,
    sharded_as,
    sharded_where_free,
    weakly_typed,
)
from jax_cudnn.ops.common.activations import Activation, is_weak_after
from jax_cudnn.ops.common.arguments import (
    Precision,
    as_array,
    as_operand,
    check_dtype,
    describe,
    graph_dtype,
    is_weak,
    options,
    result_dtype,
    strongly_typed,
    sums_dtype,
    tensor,
    why_symbolic,
    why_without_graph,
)
from jax_cudnn.ops.common.fusion import Fusion, Operand, StartedGraph
from jax_cudnn.ops.common.plain import (
    Contraction,
    Epilogue,
    check_implementation,
    run_plain,
)
from jax_cudnn.ops.products.conv_arguments import (
    Problem,
    attributes_of,
    broadcastable,
    groups_to_channels,
    problem_of,
)


def conv(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: object = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Precision = None,
    preferred_element_type: object = None,
    out_sharding: object = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    scale: ArrayLike | None = None,
    branch_scale: ArrayLike | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a convolution with its epilogue, through cuDNN on NVIDIA GPUs.

    Takes the arguments of :func:`jax.lax.conv_general_dilated` with the same meaning,
    so that it can replace that function; window_strides and padding are optional.
    For each image n and out channel o,

    .. math::

        \mathrm{output} = \mathrm{activation}\big(\mathrm{branch\_scale} \cdot
            (\mathrm{scale} \cdot (x * w) + \mathrm{bias})
            + \mathrm{residual}\big)

    where x is `lhs`, w is `rhs` and ``*`` is cross-correlation over the window and a
    group's channels. The whole formula is one kernel, except for activations that
    cuDNN does not have. Sums, and the values computed from them, are kept in f32 (f64
    for f64, i32 sums for 8-bit integers) and rounded once, to the result's dtype.

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's gradient
    kernels, for the operands whose gradient is needed. Forward mode and higher
    orders run the jax.numpy reference.

    Axis letters: n image, c in channels, o out channels, g groups, y one to three
    spatial axes, f the window's spatial axes.

    Args:
      lhs: the images, (n, c, \*y) in the layout of `dimension_numbers`; bf16, f16, f32,
        f64, f8_e4m3fn, f8_e5m2, i8 or u8. XLA runs everything else that lax takes:
        other dtypes, no spatial axis or more than three, symbolic dimensions.
      rhs: the filters, (o, c/g, \*f), of lhs's dtype.
      window_strides: steps of the window. Default None: 1 along each axis.
      padding: "SAME", "SAME_LOWER", "VALID" or a (low, high) pair per spatial axis,
        which may differ and may be negative. Default "VALID": none.
      lhs_dilation: spacing of lhs's elements, with zeros in between, as in a
        transposed convolution. Default None: 1 along each axis, no zeros.
      rhs_dilation: spacing of rhs's elements, likewise (atrous). Default None: 1.
      dimension_numbers: as for lax, or the layout of images and result alone: "NHWC"
        is ("NHWC", "HWIO", "NHWC"), the order in which cuDNN computes, and "NCHW" is
        ("NCHW", "OIHW", "NCHW"); "NWC", "NDHWC" and so on likewise. Arrays in other
        layouts are transposed before and after. Default None: channels first.
      feature_group_count: groups of channels; c for a depthwise convolution.
        Default 1.
      batch_group_count: groups of images, as for lax. Default 1.
      precision: precision of f32 convolutions; every value that lax takes. Default
        None: `jax.default_matmul_precision`. cuDNN multiplies f32 in TF32, as XLA does
        on a GPU except for "highest"; for "highest", "auto" runs XLA.
      preferred_element_type: dtype of the result. Default None: lhs's dtype, in which
        sums of integers wrap around as in lax. Sums for an f64 result are kept in f64.
      out_sharding: a `jax.sharding.NamedSharding`, or a `PartitionSpec` where a mesh is
        set: how the result is to be sharded. Default None: as the operands imply.
      bias: (o,), or an array that broadcasts to the result. Differentiable.
      residual: added before the activation; broadcasts to the result. Differentiable.
      activation: "relu", "relu6", "leaky_relu" (slope 0.01), "elu", "gelu"
        or "gelu_tanh" (tanh form, as jax.nn.gelu), "gelu_exact" or "gelu_erf" (erf
        form), "silu" or "swish", "tanh", "sigmoid", "softplus", or a function of one
        array that returns one of the same shape. A function is part of the kernel if
        each of its operations is one of cuDNN's pointwise operations with the same
        meaning. Any other function is applied to the kernel's result, before rounding,
        as JAX code (docs/performance.md; `plans.inspect` says why). Default None: none.
      scale: multiplies the convolution: a number, or an array () or (o,).
      branch_scale: multiplies the convolution with its bias, before the residual is
        added: a number, (o,), or an array that broadcasts to the result, such as one
        number for each image. It serves residual branches: layer scale, stochastic
        depth, gates of adaptive norms. Differentiable. Default None: 1.
      implementation: "auto" (default) uses cuDNN where it has a plan and XLA
        elsewhere (the logger "jax_cudnn" says why at INFO); "cudnn" raises where
        cuDNN has no plan; "xla" never touches cuDNN. On platforms other than CUDA,
        all three run XLA. Inside :func:`jax_cudnn.plans.using`, "auto" and None mean
        the implementation that is set there.
      plan: which of cuDNN's execution plans may run the call, a
        :class:`jax_cudnn.plans.PlanOptions`. Default None: the options of
        :func:`jax_cudnn.plans.using`; outside of that scope, every plan.

    Returns:
      The result, in the layout of `dimension_numbers`. It has a weak type in the cases
      in which that of :func:`matmul` has one, also with `preferred_element_type`.

    Raises:
      ValueError: shapes or options that do not fit, an unknown activation, an
        activation that returns anything but an array of floats of the same shape, an
        unknown `implementation`.
      TypeError: dtypes that differ, or that lax does not take.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU), or no graph has such operands (raised
        at once); operands whose types have shardings that
        contradict each other.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      docs/support.md lists the supported configurations by GPU. Where XLA runs
      a call on a GPU, sums over 16-bit operands are rounded to the operands' dtype
      before scale, bias, residual and activation, as in jax.lax. In the gradient, the
      cotangent of the convolution is rounded to the dtype of 16-bit operands before it
      is multiplied by them, as in XLA. It is not rounded to f8: f8 operands are
      widened, to bf16 for a bf16 result and otherwise to f32. The values that the
      gradient of an activation needs are saved in the dtype of the result.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> x = jnp.ones((2, 8, 8, 3))
      >>> w = jnp.ones((3, 3, 3, 16))
      >>> jax_cudnn.conv(
      ...     x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
      ...     bias=jnp.zeros(16), activation="gelu",
      ... ).shape
      (2, 8, 8, 16)
    """
    call = options("conv", implementation, plan, precision)
    epilogue = Epilogue.of(
        "conv",
        scale=scale,
        bias=bias,
        branch_scale=branch_scale,
        residual=residual,
        activation=activation,
    )
    given = {
        "padding": padding,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "window_strides": window_strides,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
    }
    return conv_with(
        lhs, rhs, given, epilogue, preferred_element_type, call, out_sharding
    )


def conv_with(
    lhs: ArrayLike,
    rhs: ArrayLike,
    given: Mapping[str, Any],
    epilogue: Epilogue,
    preferred: object,
    call: Options,
    out_sharding: object = None,
) -> jax.Array:
    """Return a convolution with any epilogue; ``given`` has lax's options by name."""
    x, w = as_operand("conv", "lhs", lhs), as_operand("conv", "rhs", rhs)
    terms = (value for _, _, value in epilogue.steps)
    if weak := is_weak(x, w, *terms, epilogue.scale_out):
        x, w = strongly_typed(x), strongly_typed(w)
    problem = problem_of(x, w, **given)
    dtype = result_dtype("conv", preferred, x.dtype)
    if reason := why_plain(x, w, dtype):
        check_implementation("conv", reason, call)
        output = _plain(problem, epilogue, preferred, call, out_sharding)
    else:
        output = _fused(problem, epilogue, dtype, call, out_sharding)
    if weak and is_weak_after(epilogue.activation, output):
        output = weakly_typed(output)
    return sharded_as(output, out_sharding)


def why_plain(x: jax.Array, w: jax.Array, dtype: np.dtype) -> str:
    """Return why no graph can hold the convolution, in sentences; "" if one can."""
    if reason := why_symbolic(lhs=x, rhs=w):
        return reason
    if not 3 <= x.ndim <= 5:
        return (
            f"lhs is {describe(x)} and rhs {describe(w)}. cuDNN's convolutions have "
            "one to three spatial axes."
        )
    return why_without_graph(dtype, lhs=x, rhs=w)


def _plain(
    problem: Problem,
    epilogue: Epilogue,
    preferred: object,
    call: Options,
    out_sharding: Any,
) -> jax.Array:
    where = explicit_part(out_sharding)

    def contraction(dtype: Any) -> jax.Array:
        return jax.lax.conv_general_dilated(
            problem.x,
            problem.w,
            precision=call.matmul_precision,  # type: ignore[arg-type]
            preferred_element_type=dtype,
            out_sharding=where,
            **problem.options,
        )

    def place(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return broadcastable(name, array, shape, problem.layout.out_spec[1])

    operands = {"lhs": problem.x, "rhs": problem.w}
    plain = Contraction("conv", operands, contraction, place)
    return run_plain(plain, preferred, epilogue)


def _fused(
    problem: Problem,
    epilogue: Epilogue,
    dtype: np.dtype,
    call: Options,
    out_sharding: object,
) -> jax.Array:
    (fusion, product, rounded), order = begin_conv(problem, dtype)
    layout, sums = problem.layout, fusion.writer.accumulator
    dims = fusion.writer[product].dims
    shape = tuple(dims[axis] for axis in order)

    def placed(name: str, value: jax.Array | float) -> Operand:
        array = as_array(value, sums)
        check_dtype("conv", name, array)
        array = broadcastable(name, array, shape, layout.out_spec[1])
        return Operand(array, order)

    def operand(name: str, value: jax.Array | float) -> str:
        return fusion.operand(name, placed(name, value))

    factor = epilogue.scale_out
    output = fusion.run(
        fusion.followed(product, epilogue, operand),
        epilogue.activation,
        shape=shape,
        factor=None if factor is None else placed("scale_out", factor),
        gate=epilogue.gate,
        dtype=rounded,
        order=order,
        options=call,
        out_sharding=out_sharding,
    ).astype(dtype)
    spatial = zip(layout.out_spec[2:], layout.lhs_spec[2:], strict=True)
    return sharded_where_free(output, problem.x, [*spatial])


def begin_conv(
    problem: Problem, dtype: np.dtype, *, is_rounded: bool = False
) -> tuple[StartedGraph, tuple[int, ...]]:
    """Begin the graph of a convolution with a result of that dtype.

    The sums are rounded to this dtype at once, or only where the graph's result is. The
    order is that of the result's axes in the layout of the problem.
    """
    x, w, layout, _ = problem
    attributes = attributes_of(problem)
    if (groups := problem.options["batch_group_count"]) > 1:
        x = groups_to_channels(x, layout, groups)
    orders = [_order(spec) for spec in layout]
    first, second = tensor("x", x, orders[0]), tensor("w", w, orders[1])
    given = {"x": first, "w": second}
    dims = result_dims(CONV_FPROP.row, "output", given, attributes)
    rounded = graph_dtype(dtype, first.dtype)
    assert rounded is not None, "why_plain has looked"
    sums = sums_dtype(rounded, first.dtype)
    fusion = Fusion("conv", sums)
    product = fusion.writer.node(
        "conv_fprop",
        {
            "x": fusion.operand("x", Operand(x, orders[0])),
            "w": fusion.operand("w", Operand(w, orders[1])),
        },
        attributes,
        dims=dims,
        order=orders[2],
        dtype=rounded if is_rounded else sums,
    )
    return StartedGraph(fusion, product, rounded), orders[2]


def _order(spec: Sequence[int]) -> tuple[int, ...]:
    return tuple(spec.index(axis) for axis in range(len(spec)))
