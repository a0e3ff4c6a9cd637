# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.gated_conv`: a convolution times the activation of another one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.activations import Activation, Fused, gate_dtype, resolve
from jax_cudnn.ops.common.arguments import (
    FLOATS,
    Precision,
    as_operand,
    describe,
    graph_dtype,
    options,
    result_dtype,
    struct,
    sums_dtype,
)
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.plain import Epilogue
from jax_cudnn.ops.products.conv import conv_with, why_plain
from jax_cudnn.ops.products.conv_arguments import Problem, problem_of
from jax_cudnn.reference.dtypes import dtype_name, jax_dtype


def gated_conv(
    lhs: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: object = None,
    feature_group_count: int = 1,
    *,
    activation: Activation | None = "sigmoid",
    up_activation: Activation | None = None,
    gate_bias: ArrayLike | None = None,
    up_bias: ArrayLike | None = None,
    precision: Precision = None,
    preferred_element_type: object = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a convolution that is multiplied by the activation of another one.

    .. math::

        \mathrm{output} = \mathrm{activation}(x * \mathrm{gate} + \mathrm{gate\_bias})
            \odot \mathrm{up\_activation}(x * \mathrm{up} + \mathrm{up\_bias})

    where x is `lhs` and ``*`` the convolution of :func:`jax_cudnn.conv`. It takes two
    kernels, as :func:`jax_cudnn.gated_matmul` does: the first computes the gate's
    convolution, which is rounded to the result's dtype, and the second all the rest. An
    activation of the gate that cuDNN does not have is applied in the first one, before
    rounding. Transformations, dtypes and errors are those of :func:`jax_cudnn.conv`.

    Args:
      lhs: the images, as for :func:`jax_cudnn.conv`.
      gate: the filters of the gate, as ``rhs`` of :func:`jax_cudnn.conv`.
      up: the filters of what is multiplied by the gate, of the gate's shape.
      window_strides: as for :func:`jax_cudnn.conv`, of both convolutions; so are the
        five arguments that follow.
      padding: see there.
      lhs_dilation: see there.
      rhs_dilation: see there.
      dimension_numbers: see there.
      feature_group_count: see there.
      activation: of the gate, as for :func:`jax_cudnn.conv`. Default "sigmoid", the
        gated linear unit; "silu" gives SwiGLU, and None the product of both.
      up_activation: of the other convolution. "tanh", beside a gate of "sigmoid", is
        the unit of WaveNet and PixelCNN. Default None: none.
      gate_bias: (o,), or an array that broadcasts to the result. Default None: none.
      up_bias: like gate_bias.
      precision: as for :func:`jax_cudnn.conv`.
      preferred_element_type: as for :func:`jax_cudnn.conv`.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      The result, in the layout of `dimension_numbers`.

    Raises:
      ValueError, TypeError, UnsupportedError, LibraryError: as
        :func:`jax_cudnn.conv`.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((2, 16, 8)), jnp.ones((3, 8, 12))
      >>> jax_cudnn.gated_conv(
      ...     x, w, w, padding="SAME", dimension_numbers="NWC", up_activation="tanh"
      ... ).shape
      (2, 16, 12)
    """
    call = options("gated_conv", implementation, plan, precision)
    names = {"lhs": lhs, "gate": gate, "up": up}
    x, gate, up = (as_operand("gated_conv", *each) for each in names.items())
    if gate.shape != up.shape:
        raise ValueError(
            f"gated_conv: gate is {describe(gate)} and up {describe(up)}. Both must "
            "have one shape, since their convolutions are multiplied. Reshape one of "
            "them."
        )
    given: dict[str, Any] = {
        "window_strides": window_strides,
        "padding": padding,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": rhs_dilation,
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": 1,
    }

    def convolved(
        name: str, w: jax.Array, bias: ArrayLike | None, dtype: object, **epilogue: Any
    ) -> jax.Array:
        words = {"rhs": name, "bias": f"{name}_bias", "scale_out": "the gate"}
        if name == "up":
            words["activation"] = "up_activation"
        with on_behalf_of("gated_conv", "conv", **words):
            around = Epilogue.of("conv", bias=bias, **epilogue)
            return conv_with(x, w, given, around, dtype, call)

    with on_behalf_of("gated_conv", "conv", rhs="gate"):
        problem = problem_of(x, gate, **given)
    own = result_dtype("gated_conv", preferred_element_type, x.dtype)
    within = _within(problem, own, activation, up_activation)
    # No array has the activation then, and gradients need both convolutions alone.
    first = activation if within is None else None
    dtype = gate_dtype(own, activation, preferred_element_type)
    gates = convolved("gate", gate, gate_bias, dtype, activation=first)
    return convolved(
        "up",
        up,
        up_bias,
        preferred_element_type,
        activation=up_activation,
        scale_out=gates,
        gate=within,
    )


def _within(
    problem: Problem,
    dtype: np.dtype,
    activation: Activation | None,
    up_activation: Activation | None,
) -> Fused | None:
    """Return the gate's activation for the second kernel; None for the first one.

    The second one has it if a graph holds both activations, and floats throughout.
    """
    x, w = problem.x, problem.w
    if activation is None or why_plain(x, w, dtype):
        return None
    operands = dtype_name(x.dtype)
    rounded = graph_dtype(dtype, operands)
    if rounded not in FLOATS:
        return None
    run = functools.partial(jax.lax.conv_general_dilated, **problem.options)
    shape = jax.eval_shape(run, struct(x), struct(w)).shape
    like = jax.ShapeDtypeStruct(shape, jax_dtype(sums_dtype(rounded, operands)))
    found = resolve("gated_conv", activation, like)
    is_alone = up_activation is None
    other = None
    if up_activation is not None:
        with on_behalf_of("gated_conv", "gated_conv", activation="up_activation"):
            other = resolve("gated_conv", up_activation, like)
    is_within = is_alone or isinstance(other, Fused)
    return found if is_within and isinstance(found, Fused) else None
