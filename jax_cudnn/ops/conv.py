# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.conv`: checks a fused convolution's arguments and builds its graph."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.graph import ConvAttributes
from jax_cudnn.graph.conv import output_size
from jax_cudnn.graph.rules import accumulator, broadcasts_to
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
    tensor,
)
from jax_cudnn.ops.fusion import Fusion


class _Layout(NamedTuple):
    """Which axes of the arrays are image, channels and space, in lax's form."""

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]


def conv(
    x: ArrayLike,
    w: ArrayLike,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: object = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Precision | Sequence[Precision] = None,
    preferred_element_type: object = None,
    out_sharding: object = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    scale: ArrayLike | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a convolution with what follows it, through cuDNN on NVIDIA GPUs.

    Takes what :func:`jax.lax.conv_general_dilated` takes, with the same meaning, so
    that it can stand in for it. For each image n and out channel o,

    .. math::

        \mathrm{output} = \mathrm{activation}(\mathrm{scale} \cdot (x * w)
            + \mathrm{bias} + \mathrm{residual})

    where ``*`` is cross-correlation over the window and a group's channels. All of it
    is one kernel. Sums, and what follows them, are kept in f32 (f64 for f64, i32 sums
    for 8-bit integers) and rounded once, to the result's dtype.

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's gradient
    kernels, for the operands whose gradient is asked for; forward mode and higher
    orders run the jax.numpy reference.

    Axis letters: n image, c in channels, o out channels, g groups, y one to three
    spatial axes, f those of the window.

    Args:
      x: the images, (n, c, \*y) in the layout of `dimension_numbers`; bf16, f16, f32,
        f64, f8_e4m3fn, f8_e5m2, i8 or u8.
      w: the filters, (o, c/g, \*f), of x's dtype.
      window_strides: steps of the window. Default None: 1 along each axis.
      padding: "SAME", "SAME_LOWER", "VALID" or a (low, high) pair per spatial axis,
        which may differ and may be negative. Default "VALID": none.
      lhs_dilation: zeros between elements of x, as in a transposed convolution.
        Default None: 1 along each axis, none.
      rhs_dilation: zeros between elements of w (atrous). Default None: 1.
      dimension_numbers: as for lax; channels-last ("NHWC", "HWIO", "NHWC") is what
        cuDNN computes in, other layouts are transposed around it. Default None:
        ("NCHW", "OIHW", "NCHW").
      feature_group_count: groups of channels; c for a depthwise convolution.
        Default 1.
      batch_group_count: groups of images, as for lax. Default 1.
      precision: of f32 products, as for lax. Default None:
        `jax.default_matmul_precision`. cuDNN multiplies f32 in TF32, as XLA does by
        default; for a higher precision "auto" runs XLA.
      preferred_element_type: dtype of the result. Default None: that of x, except for
        8-bit integers, which need it (lax's would wrap around).
      out_sharding: must be None, which nnx's layers pass.
      bias: (o,), or an array that broadcasts to the result. Differentiable.
      residual: added before the activation; broadcasts to the result. Differentiable.
      activation: "relu", "relu6", "leaky_relu" (slope 0.01), "elu", "gelu"
        (tanh form, as jax.nn.gelu), "gelu_exact" (erf form), "silu" or "swish",
        "tanh", "sigmoid", "softplus", or a function of one array made of pointwise
        operations, which is traced. Default None: none.
      scale: multiplies the convolution: a number, or an array () or (o,).
      implementation: "auto" (default) uses cuDNN where it has a plan and XLA
        elsewhere (why is logged at INFO by the logger "jax_cudnn"); "cudnn" raises
        where cuDNN has none; "xla" never touches cuDNN. On other platforms than CUDA
        all three run XLA. "auto" and None stand for what the scope of
        :func:`jax_cudnn.plans.using` says, if there is one.
      plan: which of cuDNN's execution plans may run it, a
        :class:`jax_cudnn.plans.PlanOptions`. Default None: what the scope of
        :func:`jax_cudnn.plans.using` says, and outside of any, each.

    Returns:
      The result, in the layout of `dimension_numbers`.

    Raises:
      ValueError: shapes or options that do not fit, an unknown activation, one that is
        not pointwise, an unknown `implementation`.
      TypeError: dtypes that are not taken or differ.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU); symbolic dimensions; operands with a
        sharding in their type.
      LibraryError: likewise, where cuDNN itself is missing or too old.

    Notes:
      docs/support.md lists which combinations cuDNN plans on which GPU. Where XLA runs
      a call on a GPU, sums over 16-bit operands are rounded to their dtype before what
      follows them, as they are in jax.lax. In the
      gradient, the cotangent of the convolution is rounded to the dtype of the
      operands before it meets them, as in XLA. What the gradient of an activation
      needs is saved in the dtype of the result.

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
    refuse_out_sharding("conv", out_sharding)
    call = options("conv", implementation, plan, precision)
    x, w = as_operand("conv", "x", x), as_operand("conv", "w", w)
    layout, attributes = _geometry(
        x,
        w,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )
    if batch_group_count > 1:
        x = _groups_to_channels(x, layout, batch_group_count)
    dtype = result_dtype(
        "conv", preferred_element_type, x.dtype, f"{describe(x)} and {describe(w)}"
    )
    orders = [_order(spec) for spec in layout]
    first, second = tensor("x", x, orders[0]), tensor("w", w, orders[1])
    sizes = (
        output_size(attributes, i, first.dims[i + 2], second.dims[i + 2])
        for i in range(x.ndim - 2)
    )
    dims = (first.dims[0], second.dims[0], *sizes)
    sums = accumulator(first.dtype, second.dtype)
    fusion = Fusion("conv", sums)
    product = fusion.writer.node(
        "conv_fprop",
        {
            "x": fusion.operand("x", x, orders[0]),
            "w": fusion.operand("w", w, orders[1]),
        },
        attributes,
        dims=dims,
        order=orders[2],
        dtype=sums,
    )
    factors: list[str | float] = []
    if isinstance(scale, int | float):
        factors.append(finite("conv", "scale", scale))
    elif scale is not None:
        array = as_operand("conv", "scale", scale)
        array = _broadcastable("scale", array, dims, orders[2], channels_only=True)
        factors.append(fusion.operand("scale", array, orders[2]))
    terms = [
        fusion.operand(
            name,
            _broadcastable(name, as_array("conv", name, value, sums), dims, orders[2]),
            orders[2],
        )
        for name, value in (("bias", bias), ("residual", residual))
        if value is not None
    ]
    value = fusion.activated(fusion.scaled(product, factors), terms, activation)
    return fusion.run(value, dtype, orders[2], call)


def _order(spec: Sequence[int]) -> tuple[int, ...]:
    return tuple(spec.index(axis) for axis in range(len(spec)))


def _geometry(
    x: jax.Array,
    w: jax.Array,
    *,
    window_strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: object,
    feature_group_count: int,
    batch_group_count: int,
) -> tuple[_Layout, ConvAttributes]:
    """Check the operands' geometry, as lax does, and say it in numbers."""
    for name, operand in (("x", x), ("w", w)):
        check_dimensions_known("conv", name, operand)
        if not 3 <= operand.ndim <= 5:
            raise ValueError(
                f"conv: {name} is {describe(operand)}, of rank {operand.ndim}. An "
                "image axis, a channel axis and one to three spatial axes are "
                "supported."
            )
        check_dtype("conv", name, operand, CONTRACTED)
    if x.dtype != w.dtype:
        raise TypeError(
            f"conv: w is {describe(w)} but x is {describe(x)}. Both must have one "
            "dtype. Convert one of them."
        )
    strides = _steps("window_strides", window_strides, x.ndim - 2)
    spread = _steps("lhs_dilation", lhs_dilation, x.ndim - 2)
    holes = _steps("rhs_dilation", rhs_dilation, x.ndim - 2)
    lax_conv = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        lhs_dilation=spread,
        rhs_dilation=holes,
        feature_group_count=_groups("feature_group_count", feature_group_count),
        batch_group_count=_groups("batch_group_count", batch_group_count),
    )
    _check_as_lax(x, w, lax_conv, dimension_numbers)
    numbers = jax.lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)  # type: ignore[arg-type]
    layout = _Layout(*(tuple(map(int, spec)) for spec in numbers))
    if isinstance(padding, str):
        window = [w.shape[axis] for axis in layout.rhs_spec[2:]]
        reach = [(f - 1) * hole + 1 for f, hole in zip(window, holes, strict=True)]
        space = [x.shape[axis] for axis in layout.lhs_spec[2:]]
        padding = jax.lax.padtype_to_pads(space, reach, strides, padding)
    attributes = ConvAttributes(
        window_strides=strides,
        padding_low=tuple(int(low) for low, _ in padding),
        padding_high=tuple(int(high) for _, high in padding),
        lhs_dilation=spread,
        rhs_dilation=holes,
    )
    return layout, attributes


def _check_as_lax(
    x: jax.Array, w: jax.Array, lax_conv: Callable[..., Any], numbers: object
) -> None:
    """Have lax check ranks, groups and sizes against each other, and say why not."""
    shapes = [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in (x, w)]
    try:
        jax.eval_shape(functools.partial(lax_conv, dimension_numbers=numbers), *shapes)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        hint = ""
        if numbers is None and _fits(lax_conv, shapes, last := _channels_last(x.ndim)):
            hint = (
                " The default layout has channels first. For channels last, as these "
                f"operands seem to have them, pass dimension_numbers={last}."
            )
        raise kind(
            f"conv: x is {describe(x)} and w {describe(w)}: {error}{hint}"
        ) from error


def _channels_last(rank: int) -> tuple[str, str, str]:
    space = "DHW"[5 - rank :]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def _fits(
    lax_conv: Callable[..., Any], shapes: Sequence[Any], numbers: tuple[str, str, str]
) -> bool:
    try:
        jax.eval_shape(functools.partial(lax_conv, dimension_numbers=numbers), *shapes)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


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
    if len(steps) != count or min(steps) < 1:
        raise ValueError(
            f"conv: {name}={value!r} is not {count} ints above 0, one for each spatial "
            f"axis of x. Pass for example {(1,) * count}."
        )
    return steps


def _groups_to_channels(x: jax.Array, layout: _Layout, groups: int) -> jax.Array:
    """Make groups of images groups of channels, which give the same convolution."""
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
    name: str,
    array: jax.Array,
    dims: tuple[int, ...],
    order: tuple[int, ...],
    *,
    channels_only: bool = False,
) -> jax.Array:
    """Return an operand with the result's rank and layout, 1 where it broadcasts."""
    check_dimensions_known("conv", name, array)
    check_dtype("conv", name, array)
    out = tuple(dims[axis] for axis in order)
    if array.ndim <= 1 and array.shape in ((), (1,), (dims[1],)):
        shape = [1] * len(dims)
        shape[order.index(1)] = array.size
        return jnp.reshape(array, shape)
    padded = (1,) * (len(dims) - array.ndim) + array.shape
    if channels_only or array.ndim < 2 or not broadcasts_to(padded, out):
        taken = f"[] or [{dims[1]}], one for each out channel"
        if not channels_only:
            taken += f", or broadcast to the result's shape, {list(out)}"
        raise ValueError(
            f"conv: {name} is {describe(array)}. Its shape must be {taken}. Reshape it."
        )
    return jnp.reshape(array, padded)
