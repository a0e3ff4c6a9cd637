# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.f8.layer_norm` and `jax_cudnn.f8.rms_norm`: norms that write f8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.arguments import as_operand
from jax_cudnn.ops.common.f8_scaling import (
    check_f8,
    check_tensor_scale,
    undifferentiated,
)
from jax_cudnn.ops.norms.call import Norm
from jax_cudnn.ops.norms.options import NormOptions
from jax_cudnn.ops.norms.rows import run_rows


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    output_scale: ArrayLike,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    preferred_element_type: DTypeLike = jnp.float8_e4m3fn,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a layer norm in f8, which a product in f8 reads next.

    The value of an element is the stored number times `output_scale`:

    .. math::

        \mathrm{result} = R(\mathrm{layer\_norm}(x) / \mathrm{output\_scale})

    with R rounding to f8, which saturates: it gives the largest number of the dtype
    instead of NaN or inf. The norm is that of :func:`jax_cudnn.layer_norm`, in f32, and
    is not rounded before. Not differentiable; all else of JAX's transformations
    applies.

    Args:
      x: any shape with one axis or more; bf16, f16, f32 or f64.
      scale: as for :func:`jax_cudnn.layer_norm`.
      bias: see there.
      output_scale: a number above 0, or an array of shape (); it may be traced. One
        that is not above 0 gives NaN.
      axis: as for :func:`jax_cudnn.layer_norm`.
      epsilon: see there.
      preferred_element_type: f8_e4m3fn (default) or f8_e5m2.
      implementation: as for :func:`jax_cudnn.layer_norm`.
      plan: see there.

    Returns:
      x's shape, in f8.

    Raises:
      TypeError: another dtype, an `output_scale` that is no scalar, differentiation;
        and as :func:`jax_cudnn.layer_norm`.
      ValueError, UnsupportedError, LibraryError: as :func:`jax_cudnn.layer_norm`.

    Notes:
      cuDNN writes f8 on sm_89 and newer; 9.19 and 9.27 plan it for sm_90 and sm_100
      (tests/norms/gpuless/test_norm_surface.py). None of its plans was timed yet. There
      is no amax: for delayed scaling, take that of :func:`jax_cudnn.layer_norm`'s
      output now and then.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> y = f8.layer_norm(jnp.ones((5, 8)), jnp.ones(8), output_scale=2**-5)
      >>> y.shape, str(y.dtype)
      ((5, 8), 'float8_e4m3fn')
    """
    return _run(
        "layer_norm",
        {"x": x, "scale": scale, "bias": bias, "output_scale": output_scale},
        axis,
        preferred_element_type,
        epsilon=epsilon,
        implementation=implementation,
        plan=plan,
    )


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    output_scale: ArrayLike,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    preferred_element_type: DTypeLike = jnp.float8_e4m3fn,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    """Return an RMS norm in f8: :func:`jax_cudnn.rms_norm`, as :func:`layer_norm` here.

    Args:
      x: any shape with one axis or more; bf16, f16, f32 or f64.
      scale: as for :func:`layer_norm`, like all that follow.
      bias: see there.
      output_scale: see there.
      axis: see there.
      epsilon: see there.
      preferred_element_type: see there.
      implementation: see there.
      plan: see there.

    Returns:
      x's shape, in f8.

    Raises:
      TypeError, ValueError, UnsupportedError, LibraryError: as :func:`layer_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> f8.rms_norm(jnp.ones((5, 8)), output_scale=2**-5).shape
      (5, 8)
    """
    return _run(
        "rms_norm",
        {"x": x, "scale": scale, "bias": bias, "output_scale": output_scale},
        axis,
        preferred_element_type,
        epsilon=epsilon,
        implementation=implementation,
        plan=plan,
    )


def _run(
    kind: str,
    operands: Mapping[str, ArrayLike | None],
    axis: int | Sequence[int],
    preferred: DTypeLike,
    **options: Unpack[NormOptions],
) -> jax.Array:
    op = f"f8.{kind}"
    advice = f"For other dtypes call jax_cudnn.{kind}."
    dtype = check_f8(op, preferred, name="preferred_element_type", advice=advice)
    number = check_tensor_scale(op, "output_scale", operands["output_scale"])  # type: ignore[arg-type]
    operands = {**operands, "output_scale": number}
    advice = (
        f"Call jax_cudnn.{kind} and quantize its result, or apply "
        "jax.lax.stop_gradient."
    )
    arrays = {
        name: None
        if value is None
        else undifferentiated(op, name, advice, as_operand(op, name, value))
        for name, value in operands.items()
    }
    norm = Norm.of(op, arrays["x"], **options)  # type: ignore[arg-type]
    factor = jnp.reshape(1 / arrays["output_scale"], (1, 1))  # type: ignore[operator]
    norm = norm._replace(dtype=dtype)
    result = run_rows(norm, kind, arrays["scale"], arrays["bias"], axis, factor)
    assert isinstance(result, jax.Array)
    return result
