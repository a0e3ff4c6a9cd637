# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.adaptive_layer_norm`: a layer norm whose scale each batch entry has."""

from __future__ import annotations

import math
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.norms.call import Norm, check_factor, given


@overload
def adaptive_layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    epsilon: float = ...,
    activation: Activation | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    return_statistics: Literal[False] = ...,
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
) -> jax.Array: ...


@overload
def adaptive_layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    epsilon: float = ...,
    residual: ArrayLike | None = ...,
    activation: Activation | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    return_statistics: bool = ...,
    implementation: Implementation | None = ...,
    plan: PlanOptions | None = ...,
) -> tuple[jax.Array, ...]: ...


def adaptive_layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    preferred_element_type: DTypeLike | None = None,
    return_statistics: bool = False,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
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
      epsilon: a Python number, 0 or more. Default 1e-6.
      residual: added to x before; the sum is returned as well. Default None.
      activation: as for :func:`layer_norm`. Default None: none.
      preferred_element_type: dtype of the output. Default None: x's.
      return_statistics: whether to return mean and rstd. Default False.
      implementation: as for :func:`layer_norm`.
      plan: as for :func:`jax_cudnn.conv`.

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
    norm = Norm.of(
        "adaptive_layer_norm",
        x,
        residual=residual,
        activation=activation,
        epsilon=epsilon,
        preferred_element_type=preferred_element_type,
        return_statistics=return_statistics,
        implementation=implementation,
        plan=plan,
    )
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
