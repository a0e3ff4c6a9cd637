# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.conv`: checks a fused convolution's arguments and builds its graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import ConvAttributes
from jax_cudnn.graph.products.conv import CONV_FPROP
from jax_cudnn.graph.rules import broadcasts_to
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
    in_front,
    is_weak,
    options,
    refused_by_jax,
    result_dtype,
    strongly_typed,
    struct,
    sums_dtype,
    tensor,
    why_symbolic,
    why_without_graph,
)
from jax_cudnn.ops.common.fusion import Begun, Fusion, Operand
from jax_cudnn.ops.common.plain import (
    Contraction,
    Epilogue,
    check_implementation,
    run_plain,
)
from jax_cudnn.ops.common.windows import meant_sizes, refuse_pads


class Layout(NamedTuple):
    """The axes of each array that are images, channels and space, in lax's form."""

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]


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
      The result, in the layout of `dimension_numbers`. It is weakly typed as
      that of :func:`matmul` is, whatever `preferred_element_type`.

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
    x, w = as_operand("conv", "lhs", lhs), as_operand("conv", "rhs", rhs)
    epilogue = Epilogue.of(
        "conv",
        scale=scale,
        bias=bias,
        branch_scale=branch_scale,
        residual=residual,
        activation=activation,
    )
    if weak := is_weak(x, w, scale, bias, branch_scale, residual):
        x, w = strongly_typed(x), strongly_typed(w)
    problem = _problem(
        x,
        w,
        padding=padding,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        window_strides=window_strides,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
    )
    dtype = result_dtype("conv", preferred_element_type, x.dtype)
    if reason := why_plain(x, w, dtype):
        check_implementation("conv", reason, call)
        output = _plain(problem, epilogue, preferred_element_type, call, out_sharding)
    else:
        output = _fused(problem, epilogue, dtype, call, out_sharding)
    if weak and is_weak_after(activation, output):
        output = weakly_typed(output)
    return sharded_as(output, out_sharding)


class Problem(NamedTuple):
    """A convolution in lax's terms: its operands, and its options by name."""

    x: jax.Array
    w: jax.Array
    layout: Layout
    options: Mapping[str, Any]


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
        return _broadcastable(name, array, shape, problem.layout.out_spec[1])

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

    def operand(name: str, value: jax.Array | float) -> str:
        array = as_array(value, sums)
        check_dtype("conv", name, array)
        array = _broadcastable(name, array, shape, layout.out_spec[1])
        return fusion.operand(name, Operand(array, order))

    output = fusion.run(
        fusion.followed(product, epilogue, operand),
        epilogue.activation,
        shape=shape,
        dtype=rounded,
        order=order,
        options=call,
        out_sharding=out_sharding,
    ).astype(dtype)
    spatial = zip(layout.out_spec[2:], layout.lhs_spec[2:], strict=True)
    return sharded_where_free(output, problem.x, [*spatial])


def begin_conv(
    problem: Problem, dtype: np.dtype, *, is_rounded: bool = False
) -> tuple[Begun, tuple[int, ...]]:
    """Begin the graph of a convolution with a result of that dtype.

    The sums are rounded to this dtype at once, or only where the graph's result is. The
    order is that of the result's axes in the layout of the problem.
    """
    x, w, layout, _ = problem
    attributes = _attributes(problem)
    if (groups := problem.options["batch_group_count"]) > 1:
        x = _groups_to_channels(x, layout, groups)
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
    return Begun(fusion, product, rounded), orders[2]


def _order(spec: Sequence[int]) -> tuple[int, ...]:
    return tuple(spec.index(axis) for axis in range(len(spec)))


def _problem(
    x: jax.Array,
    w: jax.Array,
    *,
    window_strides: Sequence[int] | None,
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: object,
    **options: Any,
) -> Problem:
    """Check the operands and their geometry, as lax does."""
    for name, operand in (("lhs", x), ("rhs", w)):
        if operand.ndim < 2:
            raise ValueError(
                f"conv: {name} is {describe(operand)}, of rank {operand.ndim}. It must "
                "have two axes that are not spatial: of images and channels, or of "
                "out channels and channels. Reshape it."
            )
    if x.ndim != w.ndim:
        raise ValueError(
            f"conv: rhs is {describe(w)}, of rank {w.ndim}, but lhs is {describe(x)}, "
            f"of rank {x.ndim}. Both must have as many axes. Reshape one of them."
        )
    if x.dtype != w.dtype:
        raise TypeError(
            f"conv: rhs is {describe(w)} but lhs is {describe(x)}. Both must have one "
            "dtype. Convert one of them."
        )
    numbers = _three_layouts(dimension_numbers)
    if not _are_pads(options["padding"], x.ndim - 2):
        refuse_pads("conv", options["padding"], x.ndim - 2)
    options |= {
        "window_strides": _steps("window_strides", window_strides, x.ndim - 2),
        "lhs_dilation": _steps("lhs_dilation", lhs_dilation, x.ndim - 2),
        "rhs_dilation": _steps("rhs_dilation", rhs_dilation, x.ndim - 2),
        "dimension_numbers": numbers,
    }
    for name in ("feature_group_count", "batch_group_count"):
        options[name] = _groups(name, options[name])

    def lax_conv(**changes: Any) -> Any:
        return jax.eval_shape(
            lambda x, w: jax.lax.conv_general_dilated(x, w, **(options | changes)),
            struct(x),
            struct(w),
        )

    # lax checks ranks, groups and sizes against each other, in its own words.
    hint = functools.partial(_channels_last_hint, lax_conv, x.ndim, numbers)
    with refused_by_jax("conv", {"lhs": x, "rhs": w}, hint=hint):
        lax_conv()
    specs = jax.lax.conv_dimension_numbers(x.shape, w.shape, numbers)
    layout = Layout(*(tuple(map(int, spec)) for spec in specs))
    return Problem(x=x, w=w, layout=layout, options=options)


def _attributes(problem: Problem) -> ConvAttributes:
    """Return strides, padding and dilations as numbers."""
    x, w, layout, options = problem
    strides, holes = options["window_strides"], options["rhs_dilation"]
    padding = options["padding"]
    if isinstance(padding, str):
        window = [w.shape[axis] for axis in layout.rhs_spec[2:]]
        reach = [(f - 1) * hole + 1 for f, hole in zip(window, holes, strict=True)]
        space = [x.shape[axis] for axis in layout.lhs_spec[2:]]
        padding = jax.lax.padtype_to_pads(space, reach, strides, padding)
    return ConvAttributes(
        window_strides=strides,
        padding_low=tuple(int(low) for low, _ in padding),
        padding_high=tuple(int(high) for _, high in padding),
        lhs_dilation=options["lhs_dilation"],
        rhs_dilation=holes,
    )


def _channels_last_hint(
    lax_conv: Callable[..., Any], rank: int, numbers: object
) -> str:
    """Return how to pass channels-last operands, if these are such; else ""."""
    if numbers is not None or not 3 <= rank <= 5:
        return ""
    space = "DHW"[5 - rank :]
    last = (f"N{space}C", f"{space}IO", f"N{space}C")
    try:
        lax_conv(dimension_numbers=last)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return ""
    return (
        " The default layout has channels first. For channels last, as these operands "
        f"seem to have them, pass dimension_numbers={last[0]!r}."
    )


def _three_layouts(numbers: Any) -> Any:
    """Return the layouts of three arrays, or raise TypeError for those of fewer.

    A layout alone is that of images and result. Filters then have their channels where
    the images have them.
    """
    is_some = isinstance(numbers, tuple | list) and len(numbers) in (1, 2)
    if not (isinstance(numbers, str) or is_some):
        return numbers
    first = str(numbers[0] if is_some else numbers)
    space = first.strip("NC")
    is_layout = len({*first, "I", "O"}) == len(first) + 2
    is_layout &= first in (f"N{space}C", f"NC{space}")
    if is_layout:
        filters = f"{space}IO" if first.endswith("C") else f"OI{space}"
    else:
        first, filters = "NHWC", "HWIO"
    if is_layout and space and not is_some:
        return first, filters, first
    raise TypeError(
        f"conv: dimension_numbers={numbers!r} is neither a layout for each of lhs, rhs "
        "and the result, nor one of images that begins with N and has C behind it or "
        f"last. Pass for example {(first, filters, first)}."
    )


def _are_pads(padding: Any, count: int) -> bool:
    """Whether this is a padding by name, or a pair for each axis; lax looks further."""
    try:
        return isinstance(padding, str) or list(map(len, padding)) == [2] * count
    except TypeError:
        return False


def _groups(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"conv: {name}={value!r} is not an int. Pass the number of groups."
        ) from None


def _steps(name: str, value: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return strides or dilations, 1 along each axis if they are not given."""
    if value is None:
        return (1,) * count
    try:
        steps = tuple(map(operator.index, value))
    except TypeError:
        steps = ()
    if len(steps) != count or min(steps, default=1) < 1:
        raise ValueError(
            f"conv: {name}={value!r} is not {count} ints above 0, one for each spatial "
            f"axis of lhs. Pass for example {meant_sizes(value, count, default=1)}."
        )
    return steps


def _groups_to_channels(x: jax.Array, layout: Layout, groups: int) -> jax.Array:
    """Turn groups of images into groups of channels, for the same convolution."""
    image, channel = layout.lhs_spec[:2]
    n = x.shape[image] // groups
    x = jnp.reshape(x, (*x.shape[:image], groups, n, *x.shape[image + 1 :]))
    channel += channel > image
    # The group axis becomes the slower part of the channels.
    target = channel if channel < image else channel - 1
    x = jnp.moveaxis(x, image, target)
    shape = list(x.shape)
    merged = shape[target] * shape[target + 1]
    return jnp.reshape(x, (*shape[:target], merged, *shape[target + 2 :]))


def _broadcastable(
    name: str, array: jax.Array, out: tuple[int, ...], channel: int
) -> jax.Array:
    """Return an operand with the result's rank and layout, 1 where it broadcasts.

    ``out`` is the result's shape, and ``channel`` the axis of its channels.
    """
    size = out[channel]
    if array.ndim <= 1 and array.shape in ((), (1,), (size,)):
        shape = [1] * len(out)
        shape[channel] = array.size
        return jnp.reshape(array, shape)
    padded = in_front(array.shape, len(out))
    if name == "scale" or array.ndim < 2 or not broadcasts_to(padded, out):
        taken = f"[] or [{size}], one for each out channel"
        if name != "scale":
            taken += f", or broadcast to the result's shape, [{_sizes(out)}]"
        raise ValueError(
            f"conv: {name} is {describe(array)}. Its shape must be {taken}. Reshape it."
        )
    return jnp.reshape(array, padded)


def _sizes(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
