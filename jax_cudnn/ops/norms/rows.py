# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.layer_norm` and `jax_cudnn.rms_norm`: norms of the features of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.lowering import is_explicitly_sharded
from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.ops.norms.call import Norm, check_axes, check_factor, given
from jax_cudnn.ops.norms.options import NormCall, NormOptions, OneResultOptions


@overload
def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    axis: int | Sequence[int] = ...,
    return_statistics: Literal[False] = ...,
    **options: Unpack[OneResultOptions],
) -> jax.Array: ...


@overload
def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    axis: int | Sequence[int] = ...,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, ...]: ...


@takes(NormCall, NormOptions)
def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    **options: Unpack[NormOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return x normalised over some of its axes, through cuDNN on NVIDIA GPUs.

    With E the mean over the normalised axes, and s = x + residual,

    .. math::

        \mathrm{mean} = E\, s, \qquad
        \mathrm{rstd} = 1 / \sqrt{E (s - \mathrm{mean})^2 + \mathrm{epsilon}} \\
        \mathrm{output} = \mathrm{activation}\big(
            (s - \mathrm{mean}) \cdot \mathrm{rstd} \cdot \mathrm{scale}
            + \mathrm{bias}\big)

    This is what `flax.nnx.LayerNorm` computes. Everything is computed in f32 (f64 for
    f64), and rounded where it is stored: s, the output, and once more after an
    activation.

    All of JAX's transformations apply. First-order reverse mode is one kernel for the
    gradients of x, scale and bias. The statistics are differentiable as well. Forward
    mode and higher orders run the jax.numpy reference.

    Axis letters: n rows, which are all axes that are not normalised; d features, the
    normalised ones.

    Args:
      x: any shape with one axis or more; bf16, f16, f32 or f64.
      scale: (\*d,), the sizes of the normalised axes in x's order, of any of these
        dtypes. Default None: 1.
      bias: likewise. Default None: 0.
      axis: the normalised axes, one or several. If they are not the last ones, x is
        transposed before the kernel. Default -1.
      **options: as in :class:`NormCall`.

    Returns:
      The output, with x's shape. With `residual` or `return_statistics` a tuple of the
      output, the sum with `residual`, and mean and rstd with `return_statistics`. These
      are f32 (f64 for f64), and have x's shape without the normalised axes.

    Raises:
      ValueError: shapes that do not fit, an axis that x does not have or that is named
        twice, a negative epsilon, an unknown activation or `implementation`.
      TypeError: other dtypes; an epsilon or flags that are not known when tracing.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      A row with NaN or inf gives NaN. A constant row gives the bias, up to the rounding
      of its mean; with an epsilon of 0 it gives that rounding, scaled up, or NaN. A row
      of one element is constant. Where the standard deviation is above 1.8e19 (9e18
      with statistics or gradients), the variance overflows f32 and rstd is 0; with
      cuDNN's kernels, where it is above about 1e19/sqrt(n) for n features (9.19 on an
      H100). A row without elements has statistics that are NaN.

      cuDNN supports every number of features, on sm_80 and newer (9.19 and 9.27;
      tests/norms/gpuless/test_norm_surface.py). Its first plan may be slower than XLA,
      so "auto" runs XLA until a plan was measured to be faster. On an H200 or an H100
      (80GB HBM3) it runs cuDNN in training (on the H100 also with a residual), for bf16
      arrays of at least 2^24 elements, with bf16 scale and bias, if the number of
      features is a multiple of 128 from 768 to 8192 (measured with cuDNN 9.19).

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, scale = jnp.ones((5, 3, 8)), jnp.ones(8)
      >>> output, total = jax_cudnn.layer_norm(x, scale, residual=x)
      >>> output.shape, total.shape
      ((5, 3, 8), (5, 3, 8))
    """
    norm = Norm.of("layer_norm", x, **options)
    return run_rows(norm, "layer_norm", scale, bias, axis)


@overload
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    axis: int | Sequence[int] = ...,
    return_statistics: Literal[False] = ...,
    **options: Unpack[OneResultOptions],
) -> jax.Array: ...


@overload
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = ...,
    bias: ArrayLike | None = ...,
    *,
    axis: int | Sequence[int] = ...,
    **options: Unpack[NormOptions],
) -> tuple[jax.Array, ...]: ...


@takes(NormCall, NormOptions)
def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    axis: int | Sequence[int] = -1,
    **options: Unpack[NormOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return x divided by its root mean square, through cuDNN on NVIDIA GPUs.

    With E the mean over the normalised axes, and s = x + residual,

    .. math::

        \mathrm{rstd} = 1 / \sqrt{E s^2 + \mathrm{epsilon}}, \qquad
        \mathrm{output} = \mathrm{activation}\big(
            s \cdot \mathrm{rstd} \cdot \mathrm{scale} + \mathrm{bias}\big)

    This is what `flax.nnx.RMSNorm` computes, which has no bias. Dtypes,
    transformations and arguments are those of :func:`layer_norm`. Only the statistics
    differ: there is no mean.

    Axis letters: n rows, which are all axes that are not normalised; d features, the
    normalised ones.

    Args:
      x: any shape with one axis or more; bf16, f16, f32 or f64.
      scale: (\*d,), the sizes of the normalised axes in x's order. Default None: 1.
      bias: likewise. Default None: 0.
      axis: the normalised axes. Default -1.
      **options: as in :class:`NormCall`.
      return_statistics: whether to return rstd. Default False.

    Returns:
      The output, with x's shape. With `residual` or `return_statistics` a tuple of the
      output, the sum with `residual`, and rstd with `return_statistics`: f32 (f64 for
      f64), x's shape without the normalised axes.

    Raises:
      ValueError, TypeError, UnsupportedError, LibraryError: as :func:`layer_norm`.

    Notes:
      A row with NaN gives NaN; a row with inf gives NaN there, and 0 elsewhere. A row
      of zeros gives the bias, or NaN with an epsilon of 0. Where the root mean square
      is above 1.8e19, its square overflows f32 and rstd is 0; with cuDNN's kernels,
      where it is above about 1e19/sqrt(n). The supported configurations, and the choice
      of "auto", are as for :func:`layer_norm`.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> jax_cudnn.rms_norm(jnp.ones((5, 3, 8)), jnp.ones(8)).shape
      (5, 3, 8)
    """
    norm = Norm.of("rms_norm", x, **options)
    return run_rows(norm, "rms_norm", scale, bias, axis)


def run_rows(
    norm: Norm,
    kind: str,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    axis: int | Sequence[int],
    scale_output: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Run a norm over axes, which a tensor of rows and features has as the latter.

    ``scale_output`` is one number, by which an output in f8 is multiplied.
    """
    x, residual = norm.x, norm.residual
    if residual is not None and any(map(is_explicitly_sharded, (x, residual))):
        # The sum has the type that JAX gives it, along the normalised axes as well.
        x, residual = norm.total, None
    if x.ndim == 0:
        raise ValueError(
            f"{norm.op}: x is {describe(x)}. It must have one axis or more to "
            "normalise over. Reshape it."
        )
    axes = check_axes(norm.op, "axis", axis, x.ndim)
    others = tuple(i for i in range(x.ndim) if i not in axes)
    shape = tuple(x.shape[i] for i in axes)
    rows = tuple(x.shape[i] for i in others)
    features = math.prod(shape)

    def factor(name: str, value: ArrayLike | None) -> Operand | None:
        array = check_factor(
            norm.op, name, value, shape, f"that of the normalised axes of {describe(x)}"
        )
        return None if array is None else Operand(array, (0, 1), (1, features))

    permutation = (*others, *axes)
    is_last = permutation == tuple(range(x.ndim))

    def moved(array: jax.Array) -> Operand:
        stored = array if is_last else jnp.transpose(array, permutation)
        return Operand(stored, (0, 1), (math.prod(rows), features))

    def back(array: jax.Array) -> jax.Array:
        shaped = jnp.reshape(array, (*rows, *shape))
        if is_last:
            return shaped
        return jnp.transpose(shaped, [permutation.index(i) for i in range(x.ndim)])

    number = scale_output
    operands = given(
        x=moved(x),
        scale=factor("scale", scale),
        bias=factor("bias", bias),
        residual=None if residual is None else moved(residual),
        scale_output=number if number is None else Operand(number, (0, 1), (1, 1)),
    )
    results = norm.run(kind, operands)
    total = x if residual is None else back(results["total"])
    return norm.finish(back(results["output"]), total, norm.statistics(results, rows))
