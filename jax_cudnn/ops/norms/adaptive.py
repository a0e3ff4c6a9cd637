# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.adaptive_layer_norm`: a layer norm whose scale each batch entry has."""

from __future__ import annotations

import math
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.ops.norms.call import Norm, check_factor, given
from jax_cudnn.ops.norms.options import NormCall, NormOptions, OneResultOptions


@overload
def adaptive_layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    return_statistics: Literal[False] = ...,
    **options: Unpack[OneResultOptions],
) -> jax.Array: ...


@overload
def adaptive_layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, ...]: ...


@takes(NormCall, NormOptions)
def adaptive_layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    **options: Unpack[NormOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return a layer norm with a scale and bias for each batch entry, through cuDNN.

    With t = x + residual, and E the mean over the features,

    .. math::

        \mathrm{mean}_{bs} = E\, t_{bs}, \qquad
        \mathrm{rstd}_{bs} = 1 / \sqrt{
            E (t_{bs} - \mathrm{mean}_{bs})^2 + \mathrm{epsilon}} \\
        \mathrm{output}_{bsd} = \mathrm{activation}\big(
            (t_{bsd} - \mathrm{mean}_{bs}) \cdot \mathrm{rstd}_{bs}
            \cdot \mathrm{scale}_{bd} + \mathrm{bias}_{bd}\big)

    Diffusion transformers modulate so: their scale is 1 plus what a network says of the
    time step. Dtypes and transformations are those of :func:`layer_norm`.

    Axis letters: b batch, s rows of a batch entry, d features.

    Args:
      x: (b, \*s, d), with any number of axes s; bf16, f16, f32 or f64.
      scale: (b, d). Default None: 1.
      bias: (b, d). Default None: 0.
      **options: as in :class:`NormCall`.

    Returns:
      The output, with x's shape. With `residual` or `return_statistics` a tuple of the
      output, the sum with `residual`, and mean and rstd with `return_statistics`: f32
      (f64 for f64), (b, \*s).

    Raises:
      ValueError: x has fewer than two axes, and as :func:`layer_norm`.
      TypeError, UnsupportedError, LibraryError: as :func:`layer_norm`.

    Notes:
      cuDNN plans it from 9.9 on for every number of features, for sm_80 and newer (9.19
      and 9.27; tests/norms/gpuless/test_norm_surface.py). In the one size that was
      timed, on an H200, its first plan took 1.7 to 4.5 times as long as XLA's code
      (docs/internals/measured/random_norms.md).

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, shift = jnp.ones((2, 5, 8)), jnp.ones((2, 8))
      >>> jax_cudnn.adaptive_layer_norm(x, 1 + shift, shift).shape
      (2, 5, 8)
    """
    norm = Norm.of("adaptive_layer_norm", x, **options)
    total = norm.total
    if total.ndim < 2:
        raise ValueError(
            f"adaptive_layer_norm: x is {describe(total)}. It must have two axes or "
            "more, the batch first and the features last. Call layer_norm without a "
            "batch."
        )
    batch, *rows, features = total.shape

    def factor(name: str, value: ArrayLike | None) -> Operand | None:
        what = f"batch and features of {describe(total)}"
        shape = (batch, features)
        array = check_factor(norm.op, name, value, shape, what)
        order = (0, 1, 2)
        return array if array is None else Operand(array, order, (batch, 1, features))

    sizes = (batch, math.prod(rows), features)
    operands = given(
        x=Operand(total, (0, 1, 2), sizes),
        scale=factor("scale", scale),
        bias=factor("bias", bias),
    )
    results = norm.run("adaptive_layer_norm", operands)
    return norm.finish(
        jnp.reshape(results["output"], total.shape),
        total,
        norm.statistics(results, (batch, *rows)),
    )
