# SPDX-License-Identifier: Apache-2.0
"""A convolution with an epilogue in lax and jax.numpy, to compare ours with."""

from typing import Any

import jax
from jax import lax

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


def plain(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: Any = None,
    residual: Any = None,
    scale: Any = None,
    activation: Any = None,
    **options: Any,
) -> jax.Array:
    """Return lax's convolution and what follows it."""
    rank = x.ndim
    options = {"window_strides": (1,) * (rank - 2), "padding": "VALID", **options}
    result = lax.conv_general_dilated(x, w, **options)
    numbers = options.get("dimension_numbers")
    channel = lax.conv_dimension_numbers(x.shape, w.shape, numbers).out_spec[1]

    def along_channels(value: Any) -> Any:
        if value.ndim != 1:
            return value.reshape((1,) * (rank - value.ndim) + value.shape)
        shape = [1] * rank
        shape[channel] = value.size
        return value.reshape(shape)

    if scale is not None:
        result = result * (along_channels(scale) if hasattr(scale, "ndim") else scale)
    for term in (bias, residual):
        if term is not None:
            result = result + along_channels(term)
    return result if activation is None else ACTIVATIONS[activation](result)
