# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.group_norm` and `jax_cudnn.instance_norm`: norms over positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.lowering import splittable
from jax_cudnn.ops.common.arguments import check_int, describe
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.ops.norms.call import (
    Norm,
    check_axes,
    check_axis,
    check_factor,
    given,
)
from jax_cudnn.ops.norms.options import NormCall, NormOptions, OneResultOptions

# Stored (n, y, g, c) or (n, g, c, y) for logical (n, g, c, y).
_LAST = (0, 3, 1, 2)
_FIRST = (0, 1, 2, 3)


@overload
def group_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    groups: int,
    channel_axis: int = ...,
    batch_axes: int | Sequence[int] = ...,
    return_statistics: Literal[False] = ...,
    **options: Unpack[OneResultOptions],
) -> jax.Array: ...


@overload
def group_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    groups: int,
    channel_axis: int = ...,
    batch_axes: int | Sequence[int] = ...,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, ...]: ...


@takes(NormCall, NormOptions)
def group_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    groups: int,
    channel_axis: int = -1,
    batch_axes: int | Sequence[int] = 0,
    **options: Unpack[NormOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return x normalised over groups of channels, through cuDNN on NVIDIA GPUs.

    With s = x + residual, and E the mean over the channels of a group at all positions
    of an image,

    .. math::

        \mathrm{mean} = E\, s, \qquad
        \mathrm{rstd} = 1 / \sqrt{E (s - \mathrm{mean})^2 + \mathrm{epsilon}} \\
        \mathrm{output} = \mathrm{activation}\big(
            (s - \mathrm{mean}) \cdot \mathrm{rstd} \cdot \mathrm{scale}
            + \mathrm{bias}\big)

    This is what `flax.nnx.GroupNorm` computes. Dtypes and transformations are those of
    :func:`layer_norm`.

    Axis letters: n images, y positions, g groups, c channels of a group.

    Args:
      x: (n, \*y, g c); bf16, f16, f32 or f64. There need not be positions.
      scale: (g c,), one for each channel. Default None: 1.
      bias: likewise. Default None: 0.
      groups: g, a divisor of the number of channels. As many as there are channels is
        :func:`instance_norm`.
      channel_axis: the axis of x that has the channels. Default -1. The last axis and
        the one directly after `batch_axes` are read in place; any other axis is moved
        to the end first.
      batch_axes: the axes of the images, one or several. Default 0. All others are
        positions.
      **options: as in :class:`NormCall`.

    Returns:
      The output, with x's shape. With `residual` or `return_statistics` a tuple of the
      output, the sum with `residual`, and mean and rstd with `return_statistics`: f32
      (f64 for f64), (\*n, g).

    Raises:
      ValueError: a number of groups that does not divide the channels, and as
        :func:`layer_norm`.
      TypeError, UnsupportedError, LibraryError: as :func:`layer_norm`.

    Notes:
      cuDNN has no group norm. Under "cudnn" one with several channels in a group is a
      layer norm of the groups, stored as rows; XLA multiplies by scale and adds bias
      afterwards, from the rounded result. In the one size that was timed, in f32 on an
      H200, it took twice as long as XLA's code
      (docs/internals/measured/random_norms.md).

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> jax_cudnn.group_norm(jnp.ones((2, 5, 5, 6)), jnp.ones(6), groups=3).shape
      (2, 5, 5, 6)
    """
    norm = Norm.of("group_norm", x, **options)
    return _of_groups(norm, scale, bias, groups, channel_axis, batch_axes)


@overload
def instance_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    channel_axis: int = ...,
    batch_axes: int | Sequence[int] = ...,
    return_statistics: Literal[False] = ...,
    **options: Unpack[OneResultOptions],
) -> jax.Array: ...


@overload
def instance_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    channel_axis: int = ...,
    batch_axes: int | Sequence[int] = ...,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, ...]: ...


@takes(NormCall, NormOptions)
def instance_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    channel_axis: int = -1,
    batch_axes: int | Sequence[int] = 0,
    **options: Unpack[NormOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return x normalised over the positions of an image, each channel by itself.

    This is :func:`group_norm` with as many groups as channels, and what
    `flax.linen.InstanceNorm` computes. cuDNN has a kernel for it.

    Axis letters: n images, y positions, g channels.

    Args:
      x: (n, \*y, g); bf16, f16, f32 or f64.
      scale: (g,). Default None: 1.
      bias: (g,). Default None: 0.
      channel_axis: as for :func:`group_norm`.
      batch_axes: see there.
      **options: as in :class:`NormCall`.

    Returns:
      As :func:`group_norm`; the statistics are (\*n, g).

    Raises:
      ValueError, TypeError, UnsupportedError, LibraryError: as :func:`layer_norm`.

    Notes:
      cuDNN takes channels first and last, and every number of them (9.19 and 9.27;
      tests/norms/gpuless/test_norm_surface.py). None of its plans was timed yet.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> jax_cudnn.instance_norm(jnp.ones((2, 5, 5, 6)), jnp.ones(6)).shape
      (2, 5, 5, 6)
    """
    norm = Norm.of("instance_norm", x, **options)
    return _of_groups(norm, scale, bias, None, channel_axis, batch_axes)


def _of_groups(
    norm: Norm,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    groups: int | None,
    channel_axis: int,
    batch_axes: int | Sequence[int],
) -> jax.Array | tuple[jax.Array, ...]:
    x, op = norm.total, norm.op
    channel = check_axis(op, "channel_axis", channel_axis, x.ndim)
    images = check_axes(op, "batch_axes", batch_axes, x.ndim)
    if channel in images:
        raise ValueError(
            f"{op}: channel_axis={channel_axis} is among batch_axes={batch_axes!r} of "
            f"{describe(x)}. Name the axes of the images only."
        )
    # With 3 groups, images (2, 8, 8, 6) are (2, 64, 3, 2) in the order (n, y, g, c),
    # and the scale is (3, 2). Images with channels first, (2, 6, 8, 8), are
    # (2, 3, 2, 64). Other orders are transposed to channels last, and back.
    channels = x.shape[channel]
    groups = channels if groups is None else _check_groups(op, groups, channels)
    each = channels // groups if groups else 1
    space = tuple(i for i in range(x.ndim) if i != channel and i not in images)
    is_first = (*images, channel, *space) == tuple(range(x.ndim))
    axes = (*images, channel, *space) if is_first else (*images, *space, channel)
    is_moved = axes != tuple(range(x.ndim))
    moved = splittable(x, channel, groups)
    if is_moved:
        moved = jnp.transpose(moved, axes)
    outer, positions = (tuple(x.shape[i] for i in each) for each in (images, space))
    split = (groups, each)
    n, y = math.prod(outer), math.prod(positions)
    if is_first:
        shape, order, sizes = (*outer, *split, *positions), _FIRST, (n, *split, y)
    else:
        shape, order, sizes = (*outer, *positions, *split), _LAST, (n, y, *split)

    def factor(name: str, value: ArrayLike | None) -> Operand | None:
        what = f"one for each channel of {describe(x)}"
        array = check_factor(op, name, value, (channels,), what)
        if array is None:
            return None
        own = (1, *split, 1) if is_first else (1, 1, *split)
        return Operand(jnp.reshape(array, split), order, own)

    operands = given(
        x=Operand(jnp.reshape(moved, shape), order, sizes),
        scale=factor("scale", scale),
        bias=factor("bias", bias),
    )
    results = norm.run("group_norm", operands)
    output = jnp.reshape(results["output"], moved.shape)
    if is_moved:
        output = jnp.transpose(output, [axes.index(i) for i in range(x.ndim)])
    return norm.finish(output, x, norm.statistics(results, (*outer, groups)))


def _check_groups(op: str, groups: int, channels: int) -> int:
    groups = check_int(op, "groups", groups)
    if groups < 1 or channels % groups:
        raise ValueError(
            f"{op}: groups={groups} for {channels} channels. It must divide them. Pass "
            "a divisor, 1 or more."
        )
    return groups
