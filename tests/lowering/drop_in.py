# SPDX-License-Identifier: Apache-2.0
"""Our products and JAX's, and how each is called with two matrices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_cudnn import conv, dot_general, matmul

ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))

Function = Callable[..., jax.Array]


def _conv_2d(function: Function, x: Any, w: Any, **options: Any) -> jax.Array:
    return function(x[None, None], w[None, None], (1, 1), "VALID", **options)


def _dot(function: Function, a: Any, b: Any, **options: Any) -> jax.Array:
    return function(a, b, ROWS_BY_COLUMNS, **options)


def _product(function: Function, a: Any, b: Any, **options: Any) -> jax.Array:
    return function(a, b, **options)


# Ours, JAX's, and how each is called with two matrices of 3 x 3.
OPS: dict[str, tuple[Function, Function, Function]] = {
    "conv": (conv, lax.conv_general_dilated, _conv_2d),
    "dot_general": (dot_general, lax.dot_general, _dot),
    "matmul": (matmul, jnp.matmul, _product),
}


def weak(x: jax.Array) -> jax.Array:
    """Return the array weakly typed, as Python's numbers are."""
    number = True if x.dtype == jnp.bool_ else jnp.zeros((), x.dtype).item()
    zero = jnp.broadcast_to(jnp.asarray(type(number)(0)), x.shape)
    made = lax.convert_element_type_p.bind(
        x, new_dtype=zero.dtype, weak_type=True, sharding=None
    )
    assert jax.typeof(made).weak_type
    return made


def type_of(x: jax.Array) -> tuple[Any, ...]:
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type
