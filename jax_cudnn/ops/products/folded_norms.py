# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.fold_batch_norm`: a batch norm of inference within a convolution."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_epsilon,
    describe,
    refused_by_jax,
)
from jax_cudnn.ops.products.conv_arguments import three_layouts


def fold_batch_norm(
    rhs: ArrayLike,
    mean: ArrayLike,
    var: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    conv_bias: ArrayLike | None = None,
    epsilon: float = 1e-5,
    dimension_numbers: object = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Return filters and a bias with which a convolution includes a batch norm.

    A batch norm of inference multiplies each channel and adds to it:

    .. math::

        \mathrm{rhs}' = \mathrm{rhs} \cdot f, \quad
        \mathrm{bias}' = (\mathrm{conv\_bias} - \mathrm{mean}) \cdot f + \mathrm{bias},
        \quad f = \frac{\mathrm{scale}}{\sqrt{\mathrm{var} + \epsilon}}

    so ``conv(x, rhs2, ..., bias=bias2, activation="relu")`` runs the convolution, the
    norm and the activation in one kernel, and an array less is written and read. Fold
    once, when the parameters are loaded: training has no such form, since its mean and
    variance are those of the batch. All is computed in f32 (f64 for f64). The filters
    are rounded to their dtype.

    Axis letters: o out channels, c in channels, g groups, f the window's axes.

    Args:
      rhs: the filters, (o, c/g, \*f) in the layout of `dimension_numbers`; floats.
      mean: (o,), the running mean.
      var: (o,), the running variance.
      scale: (o,). Default None: 1.
      bias: (o,), of the norm. Default None: 0.
      conv_bias: (o,), which the convolution adds before the norm. Default None: 0.
      epsilon: what is added to the variance. Default 1e-5, as in Flax.
      dimension_numbers: as for :func:`jax_cudnn.conv`. Default None: channels first,
        with the out channels as the first axis of the filters.

    Returns:
      The filters, of rhs's dtype and layout, and the bias, (o,), in f32 (f64 for f64).

    Raises:
      TypeError: an array is not of floats, `epsilon` is no Python number, or
        `dimension_numbers` are no layout.
      ValueError: an array has not one number for each out channel, `epsilon` is
        negative or not finite, or rhs has fewer than two axes.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
      >>> mean, var = jnp.zeros(16), jnp.ones(16)
      >>> w2, b2 = jax_cudnn.fold_batch_norm(w, mean, var, dimension_numbers="NHWC")
      >>> jax_cudnn.conv(
      ...     x, w2, dimension_numbers="NHWC", bias=b2, activation="relu"
      ... ).shape
      (2, 6, 6, 16)
    """
    w = _floats("rhs", rhs)
    if w.ndim < 2:
        raise ValueError(
            f"fold_batch_norm: rhs is {describe(w)}. It must be the filters of a "
            "convolution, with an axis of channels out and one of channels in."
        )
    epsilon = check_epsilon("fold_batch_norm", epsilon)
    layouts = three_layouts("fold_batch_norm", dimension_numbers)
    axis = _out_axis(w, layouts)
    wide = jnp.dtype(jnp.float64 if w.dtype == jnp.float64 else jnp.float32)
    size = w.shape[axis]

    def each(name: str, value: Any, default: float | None = None) -> jax.Array:
        if value is None and default is not None:
            return jnp.full((size,), default, wide)
        array = _floats(name, value)
        if array.shape != (size,):
            raise ValueError(
                f"fold_batch_norm: {name} is {describe(array)}, and rhs {describe(w)} "
                f"has {size} out channels. Its shape must be [{size}], one number for "
                "each. Reshape it, or pass the layout of rhs as dimension_numbers."
            )
        return array.astype(wide)

    spread = each("var", var) + jnp.asarray(epsilon, wide)
    factor = each("scale", scale, 1) * jax.lax.rsqrt(spread)
    shift = each("conv_bias", conv_bias, 0) - each("mean", mean)
    along = [size if i == axis else 1 for i in range(w.ndim)]
    filters = w.astype(wide) * jnp.reshape(factor, along)
    return filters.astype(w.dtype), shift * factor + each("bias", bias, 0)


def _floats(name: str, value: Any) -> jax.Array:
    array = as_operand("fold_batch_norm", name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"fold_batch_norm: {name} is {describe(array)}. It must be of floats. "
            "Convert it."
        )
    return array


def _out_axis(w: jax.Array, layouts: Any) -> int:
    """Return the axis of the filters that their out channels are."""
    with refused_by_jax("fold_batch_norm", {"rhs": w}):
        numbers = jax.lax.conv_dimension_numbers(w.shape, w.shape, layouts)
    return int(numbers.rhs_spec[0])
