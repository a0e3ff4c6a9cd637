# SPDX-License-Identifier: Apache-2.0
"""The meaning of the calls of fusion_cases.py, in jax.lax and jax.numpy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from tests.products.shared.fusion_cases import Case
from tests.products.shared.fusion_problems import ACTIVATIONS


def plain_activation(activation: Any) -> Callable[[jax.Array], jax.Array]:
    """Return an activation, given as to an operation, as a function of an array."""
    if activation is None:
        return lambda x: x
    return ACTIVATIONS[activation][0] if isinstance(activation, str) else activation


def kinks_of(activation: Any) -> tuple[float, ...]:
    """Return where the derivative of an activation, given by name, jumps."""
    return ACTIVATIONS[activation][1] if isinstance(activation, str) else ()


def plain_call(case: Case, *, activated: bool = True) -> Callable[..., jax.Array]:
    """Return the case's call of operands by name, in whatever dtype they are.

    If not ``activated``, what the activation gets is the result.
    """
    options = dict(case.call.keywords)  # type: ignore[attr-defined]
    contract = _CONTRACTIONS[case.call.func]  # type: ignore[attr-defined]
    options.pop("preferred_element_type", None)
    number = options.pop("scale", None)
    number = options.pop("scale_b", number)
    activation = options.pop("activation", None)
    function = plain_activation(activation if activated else None)

    def run(
        bias: Any = None,
        residual: Any = None,
        scale: Any = number,
        scale_b: Any = number,
        **operands: jax.Array,
    ) -> jax.Array:
        factor = scale_b if scale is None else scale
        value, channel = contract(operands, factor, options)
        if bias is not None:
            shape = [1] * value.ndim
            if bias.ndim == 1:
                shape[channel] = bias.size
                bias = jnp.reshape(bias, shape)
            value = value + bias
        return function(value if residual is None else value + residual)

    return run


def _conv(
    operands: dict[str, jax.Array], scale: Any, options: dict[str, Any]
) -> tuple[jax.Array, int]:
    x, w = operands["lhs"], operands["rhs"]
    options = {"window_strides": (1,) * (x.ndim - 2), "padding": "VALID", **options}
    value = jax.lax.conv_general_dilated(x, w, **options)
    channel = value.ndim - 1 if "dimension_numbers" in options else 1
    if scale is None or not hasattr(scale, "shape"):
        return value * (1 if scale is None else scale), channel
    shape = [1] * value.ndim
    shape[channel] = scale.size
    return value * jnp.reshape(scale, shape), channel


def _matmul(
    operands: dict[str, jax.Array], scale: Any, options: dict[str, Any]
) -> tuple[jax.Array, int]:
    assert not options
    b = operands["b"]
    if scale is not None:
        b = b * (scale if jnp.ndim(scale) != 1 else scale[None, :])
    value = jnp.matmul(operands["a"], b)
    return value, value.ndim - 1


def _dot_general(
    operands: dict[str, jax.Array], scale: Any, options: dict[str, Any]
) -> tuple[jax.Array, int]:
    assert scale is None
    value = jax.lax.dot_general(operands["lhs"], operands["rhs"], **options)
    return value, value.ndim - 1


_CONTRACTIONS = {
    jax_cudnn.conv: _conv,
    jax_cudnn.dot_general: _dot_general,
    jax_cudnn.matmul: _matmul,
}
