# SPDX-License-Identifier: Apache-2.0
"""A matmul with an epilogue in jax.numpy, to compare ours with."""

from typing import Any

import jax
import jax.numpy as jnp

ACTIVATIONS = {None: lambda x: x, "relu": jax.nn.relu, "gelu": jax.nn.gelu}


def plain(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: Any = None,
    residual: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    scale_out: Any = None,
    activation: Any = None,
) -> jax.Array:
    """Return jnp.matmul with what is around it."""
    with jax.numpy_rank_promotion("allow"):
        a = a if scale_a is None else a * scale_a
        b = b if scale_b is None else b * scale_b
        result = jnp.matmul(a, b)
        for term in (bias, residual):
            result = result if term is None else result + term
        result = ACTIVATIONS[activation](result)
        return result if scale_out is None else result * scale_out
