# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.batch_norm`: norms of channels over the batch, with running values."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.lowering import gathered_along
from jax_cudnn.ops.common.arguments import check_flag, check_number, describe
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.ops.norms.call import Norm, accumulator, check_axis, check_factor, given
from jax_cudnn.ops.norms.options import NormCall, NormOptions, OneResultOptions
from jax_cudnn.reference.norms import column_moments

_OP = "batch_norm"


@overload
def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    use_running_average: bool = ...,
    channel_axis: int = ...,
    momentum: float = ...,
    axis_name: Hashable | None = ...,
    axis_index_groups: Sequence[Sequence[int]] | None = ...,
    return_statistics: Literal[False] = ...,
    **options: Unpack[OneResultOptions],
) -> jax.Array: ...


@overload
def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    running_mean: ArrayLike,
    running_var: ArrayLike,
    *,
    use_running_average: Literal[True],
    channel_axis: int = ...,
    momentum: float = ...,
    axis_name: Hashable | None = ...,
    axis_index_groups: Sequence[Sequence[int]] | None = ...,
    return_statistics: Literal[False] = ...,
    **options: Unpack[OneResultOptions],
) -> jax.Array: ...


@overload
def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    running_mean: ArrayLike | None = ...,
    running_var: ArrayLike | None = ...,
    *,
    use_running_average: bool = ...,
    channel_axis: int = ...,
    momentum: float = ...,
    axis_name: Hashable | None = ...,
    axis_index_groups: Sequence[Sequence[int]] | None = ...,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, ...]: ...


@takes(NormCall, NormOptions, epsilon=1e-5)
def batch_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    running_mean: ArrayLike | None = None,
    running_var: ArrayLike | None = None,
    *,
    use_running_average: bool = False,
    channel_axis: int = -1,
    momentum: float = 0.99,
    axis_name: Hashable | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    **options: Unpack[NormOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return x normalised over all axes but the channels, through cuDNN.

    With s = x + residual, and E the mean over all axes but the channels,

    .. math::

        \mathrm{mean} &= E\, s, \qquad \mathrm{var} = E (s - \mathrm{mean})^2, \qquad
        \mathrm{rstd} = 1 / \sqrt{\mathrm{var} + \mathrm{epsilon}} \\
        \mathrm{output} &= \mathrm{activation}\big(
            (s - \mathrm{mean}) \cdot \mathrm{rstd} \cdot \mathrm{scale}
            + \mathrm{bias}\big) \\
        \mathrm{new\ running\ mean} &= \mathrm{momentum} \cdot
            \mathrm{running\_mean} + (1 - \mathrm{momentum}) \cdot \mathrm{mean}

    and likewise the running variance, from var. This is what `flax.nnx.BatchNorm`
    computes. PyTorch's running variance is unbiased, and its momentum is 1 minus this
    one. With `use_running_average`, the running values are used in place of mean and
    var, and are not updated.

    There is no hidden state: running values are arguments, and new ones are returned.
    Dtypes and transformations are as in :func:`layer_norm`.

    Axis letters: n rows, which are all axes but the channels; c channels.

    Args:
      x: (\*n, c); bf16, f16, f32 or f64.
      scale: (c,). Default None: 1.
      bias: (c,). Default None: 0.
      running_mean: (c,), with `running_var` or not at all. Default None.
      running_var: (c,). Default None.
      use_running_average: whether to normalise by the running values, for inference.
        XLA computes this, fused with the operations around it. Default False.
      channel_axis: the axis of x that has the channels. Default -1; any other axis is
        moved to the end first.
      momentum: the share of the old running values that the new ones keep, a Python
        number from 0 to 1. Default 0.99, as in Flax.
      epsilon: a Python number, 0 or more. Default 1e-5, as in Flax.
      axis_name: a named axis, of `jax.vmap` or `jax.shard_map`, or several: the
        statistics are those over the axis as well. XLA computes this. Default None.
      axis_index_groups: groups of indices along the named axis that share statistics,
        as `jax.lax.pmean` takes them. Default None: all.
      **options: as in :class:`NormCall`.
      return_statistics: whether to return the mean and rstd that were used. Default
        False.

    Returns:
      The output, with x's shape, alone or first in a tuple. The sum follows with
      `residual`; then the new running mean and variance, in their own dtypes, where
      they are given and `use_running_average` is False; then mean and rstd with
      `return_statistics`, f32 (f64 for f64), (c,).

    Raises:
      ValueError: running values that are not both there, or are missing with
        `use_running_average`; `axis_index_groups` without an `axis_name`; a momentum
        outside of 0 to 1; and as :func:`layer_norm`.
      TypeError: as :func:`layer_norm`.
      UnsupportedError: `implementation="cudnn"` with `use_running_average` or
        `axis_name`, which XLA computes; and as :func:`layer_norm`.
      LibraryError: as :func:`layer_norm`.

    Notes:
      In a program for several devices whose batch is sharded, the statistics are those
      of the whole batch: each device sums its share, and XLA adds the sums up. Nothing
      is gathered, except under "cudnn". Where types carry shardings, positions are.
      In `jax.shard_map` they are those of a device, unless `axis_name` is given.

      Without elements the statistics are NaN. Of a single row the variance is 0.

      cuDNN takes channels in full loads, 8 of 16 bits or 4 of 32; others are padded.
      In the one size that was timed, on an H200, its first plan took 0.92 to 0.95 of
      the time of XLA's code (docs/internals/measured/random_norms.md).

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, zeros, ones = jnp.ones((2, 5, 5, 6)), jnp.zeros(6), jnp.ones(6)
      >>> y, mean, var = jax_cudnn.batch_norm(x, ones, zeros, zeros, ones)
      >>> y.shape, mean.shape
      ((2, 5, 5, 6), (6,))
    """
    norm = Norm.of(_OP, x, **options)
    total = norm.total
    channel = check_axis(_OP, "channel_axis", channel_axis, total.ndim)
    if axis_index_groups is not None and axis_name is None:
        raise ValueError(
            f"{_OP}: axis_index_groups without axis_name. Name the axis that the "
            "groups are of."
        )
    rows = tuple(i for i in range(total.ndim) if i != channel)
    moved = jnp.transpose(total, (*rows, channel))

    def factor(name: str, value: ArrayLike | None) -> jax.Array | None:
        what = f"one for each channel of {describe(total)}"
        return check_factor(_OP, name, value, (total.shape[channel],), what)

    factors = _Factors(factor("scale", scale), factor("bias", bias))
    running = _check_running(
        factor("running_mean", running_mean), factor("running_var", running_var)
    )
    share = _check_momentum(momentum)
    if check_flag(_OP, "use_running_average", use_running_average):
        output, mean, rstd = _by_running(norm, moved, factors, running)
        running = None
    elif axis_name is not None:
        axis = _NamedAxis(axis_name, axis_index_groups)
        output, mean, rstd, var = _synchronised(norm, moved, factors, axis)
    else:
        needs = norm.with_statistics or running is not None
        call = norm._replace(with_statistics=needs)
        output, mean, rstd = _by_graph(call, moved, factors)
        if running is not None:
            # A kernel gives rstd, of which epsilon hides small variances. Where XLA
            # runs the norm, this is what it computes for it anyway.
            _, var = _statistics(moved, norm.attributes.epsilon)
    back = sorted(range(total.ndim), key=(*rows, channel).__getitem__)
    more: list[jax.Array] = []
    if running is not None:
        more += _updated(running, share, mean, var)
    if norm.with_statistics:
        more += [mean, rstd]
    return norm.finish(jnp.transpose(output, back), total, more)


class _Factors(NamedTuple):
    scale: jax.Array | None
    bias: jax.Array | None


class _Running(NamedTuple):
    mean: jax.Array
    var: jax.Array


class _NamedAxis(NamedTuple):
    name: Hashable
    groups: Sequence[Sequence[int]] | None

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the mean over the axis, or over this index's group of it."""
        if self.groups is None or self._is_manual:
            return jax.lax.pmean(x, self.name, axis_index_groups=self.groups)
        # vmap has no collectives within groups.
        every = jax.lax.all_gather(x, self.name)
        count = every.shape[0]
        if sorted(i for group in self.groups for i in group) != [*range(count)]:
            raise ValueError(
                f"{_OP}: axis_index_groups={self.groups} does not have each index of "
                f"axis {self.name!r} once. Pass groups of the indices 0 to {count - 1}."
            )
        group_of = np.empty(count, np.int32)
        for number, group in enumerate(self.groups):
            group_of[[*group]] = number
        own = jnp.asarray(group_of)[jax.lax.axis_index(self.name)]
        is_own = jnp.reshape(group_of == own, (-1,) + (1,) * x.ndim)
        return jnp.mean(every, 0, where=is_own)

    @property
    def _is_manual(self) -> bool:
        """Whether the axis is one of `jax.shard_map`."""
        names = self.name if isinstance(self.name, tuple) else (self.name,)
        return {*names} <= {*jax.sharding.get_abstract_mesh().manual_axes}


def _check_running(mean: jax.Array | None, var: jax.Array | None) -> _Running | None:
    if (mean is None) != (var is None):
        there, missing = ("mean", "var") if var is None else ("var", "mean")
        raise ValueError(
            f"{_OP}: running_{there} without running_{missing}. Pass both, or neither."
        )
    return None if mean is None or var is None else _Running(mean, var)


def _check_momentum(value: float) -> float:
    value = check_number(_OP, "momentum", value)
    if not 0 <= value <= 1:
        raise ValueError(
            f"{_OP}: momentum={value}. It is the share of the old running values that "
            "is kept: pass a number from 0 to 1."
        )
    return value


def _updated(
    running: _Running, momentum: float, mean: jax.Array, var: jax.Array
) -> list[jax.Array]:
    """Return the new running values, in the dtypes of the old ones."""
    pairs = ((running.mean, mean), (running.var, var))
    return [
        (momentum * old.astype(new.dtype) + (1 - momentum) * new).astype(old.dtype)
        for old, new in pairs
    ]


_Normalised = tuple[jax.Array, jax.Array, jax.Array]


def _by_graph(norm: Norm, x: jax.Array, factors: _Factors) -> _Normalised:
    """Return output, mean and rstd of one kernel; no statistics are empty arrays."""
    *outer, channels = x.shape
    factor = (1, channels)
    operands = given(
        x=Operand(x, (0, 1), (math.prod(outer), channels)),
        **{
            role: None if value is None else Operand(value, (0, 1), factor)
            for role, value in factors._asdict().items()
        },
    )
    results = norm.run("batch_norm", operands)
    empty = jnp.zeros(0, jnp.float32)
    mean, rstd = (results.get(role, empty) for role in ("mean", "rstd"))
    shapes = (x.shape, (mean.size,), (rstd.size,))
    output, mean, rstd = map(jnp.reshape, (results["output"], mean, rstd), shapes)
    return output, mean, rstd


def _by_running(
    norm: Norm, x: jax.Array, factors: _Factors, running: _Running | None
) -> _Normalised:
    """Return the output with the running values, and these as mean and rstd."""
    if running is None:
        raise ValueError(
            f"{_OP}: use_running_average without running_mean and running_var. Pass "
            "those that training left."
        )
    check_implementation(
        _OP, "use_running_average=True is elementwise work, which XLA fuses.", norm.call
    )
    wide = accumulator(x.dtype)
    mean = running.mean.astype(wide)
    rstd = jax.lax.rsqrt(running.var.astype(wide) + _epsilon(norm, wide))
    return _normalised(x, mean, rstd, *factors, norm.dtype), mean, rstd


def _synchronised(
    norm: Norm, x: jax.Array, factors: _Factors, axis: _NamedAxis
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the output with statistics over a named axis, these, and the variance."""
    check_implementation(
        _OP, "statistics over a named axis are summed between two kernels.", norm.call
    )
    own_mean, own_var = _statistics(x, norm.attributes.epsilon)
    mean = axis.mean(own_mean)
    var = axis.mean(own_var + jnp.square(own_mean - mean))
    rstd = jax.lax.rsqrt(var + _epsilon(norm, var.dtype))
    return _normalised(x, mean, rstd, *factors, norm.dtype), mean, rstd, var


def _epsilon(norm: Norm, dtype: Any) -> jax.Array:
    return jnp.asarray(norm.attributes.epsilon, dtype)


# What is computed in f32 within these is computed again for the gradient: kept, it
# would take twice the memory of a 16-bit x. Within one program, XLA may see that it is
# what the norm computes, too.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(1,))
def _statistics(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    *outer, channels = x.shape
    # Axes are merged where the first is the only one that is sharded.
    x = gathered_along(x, range(1, len(outer)))
    rows = jnp.reshape(x.astype(accumulator(x.dtype)), (math.prod(outer), channels))
    mean, var = column_moments(rows, epsilon)
    return mean[0], var[0]


@functools.partial(jax.checkpoint, static_argnums=(5,))
def _normalised(
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    dtype: np.dtype,
) -> jax.Array:
    def along(value: jax.Array) -> jax.Array:
        return jnp.reshape(value.astype(mean.dtype), (1,) * (x.ndim - 1) + value.shape)

    output = (x.astype(mean.dtype) - along(mean)) * along(rstd)
    if scale is not None:
        output = output * along(scale)
    if bias is not None:
        output = output + along(bias)
    return output.astype(dtype)
