# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a convolution, and gives them one form."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.graph import ConvAttributes
from jax_cudnn.graph.rules import broadcasts_to
from jax_cudnn.ops.common.arguments import describe, in_front, refused_by_jax, struct
from jax_cudnn.ops.common.windows import meant_sizes, refuse_pads


class Layout(NamedTuple):
    """The axes of each array that are images, channels and space, in lax's form."""

    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]


class Problem(NamedTuple):
    """A convolution in lax's terms: its operands, and its options by name."""

    x: jax.Array
    w: jax.Array
    layout: Layout
    options: Mapping[str, Any]


def problem_of(
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
    numbers = three_layouts("conv", dimension_numbers)
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

    # lax checks all other sizes and groups against each other, in its own words.
    hint = functools.partial(_channels_last_hint, lax_conv, x.ndim, numbers)
    with refused_by_jax("conv", {"lhs": x, "rhs": w}, hint=hint):
        specs = jax.lax.conv_dimension_numbers(x.shape, w.shape, numbers)
        layout = Layout(*(tuple(map(int, spec)) for spec in specs))
    _check_channels(x, w, layout, options["feature_group_count"], hint)
    with refused_by_jax("conv", {"lhs": x, "rhs": w}, hint=hint):
        lax_conv()
    return Problem(x=x, w=w, layout=layout, options=options)


def _check_channels(
    x: jax.Array, w: jax.Array, layout: Layout, groups: int, hint: Callable[[], str]
) -> None:
    """Raise unless the filters are for the channels of the images."""
    axes = layout.lhs_spec[1], layout.rhs_spec[1]
    channels, taken = x.shape[axes[0]], w.shape[axes[1]]
    if groups < 1 or not (isinstance(channels, int) and isinstance(taken, int)):
        return  # lax refuses such groups, and compares symbolic dimensions
    if channels != taken * groups:
        each = f" in each group (feature_group_count={groups})" if groups > 1 else ""
        advice = hint() or " Transpose one of them, or pass other filters."
        raise ValueError(
            f"conv: lhs is {describe(x)} and rhs {describe(w)}: lhs has {channels} "
            f"channels, on axis {axes[0]}, and rhs is for {taken}, on axis {axes[1]}"
            f"{each}. lhs must have {taken * groups} channels.{advice}"
        )


def attributes_of(problem: Problem) -> ConvAttributes:
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


def three_layouts(op: str, numbers: Any) -> Any:
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
        f"{op}: dimension_numbers={numbers!r} is neither a layout for each of lhs, rhs "
        "and the result, nor one of images with N first and C second or last. "
        f"Pass for example {(first, filters, first)}."
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


def groups_to_channels(x: jax.Array, layout: Layout, groups: int) -> jax.Array:
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


def broadcastable(
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
