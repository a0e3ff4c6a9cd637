# SPDX-License-Identifier: Apache-2.0
"""One f8 product of a Flax layer, nnx's or linen's, with what the layer adds to it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import as_operand, refused_by_jax
from jax_cudnn.ops.common.f8_recipes import DenseState, Recipe
from jax_cudnn.ops.products.f8_dense import dot_general
from jax_cudnn.ops.products.f8_products import operand

OP = "f8.dot_general"

# The parts of dimension_numbers, as jax.lax.dot_general has them.
Numbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


def f8_product(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Numbers,
    *,
    recipe: Recipe,
    state: DenseState | None,
    implementation: Implementation,
    rhs_sharding: object = None,
    preferred_element_type: Any = None,
    out_sharding: object = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
) -> tuple[jax.Array, DenseState | None]:
    """Return the activation of a product, bias and residual, and the next state.

    The result has `preferred_element_type`, and lhs's dtype without one. Errors
    begin with `OP`.
    """
    x = operand(OP, "lhs", lhs)
    dtype = x.dtype
    if preferred_element_type is not None:
        dtype = _float(preferred_element_type)
        # f8.dot_general's result has the dtype of x. x in f32 has the same copy.
        x = x if dtype == x.dtype else x.astype(jnp.float32)
    y, following = dot_general(
        x,
        rhs,
        dimension_numbers,
        recipe=recipe,
        state=state,
        bias=bias,
        activation=activation if residual is None else None,
        rhs_sharding=rhs_sharding,
        out_sharding=out_sharding,
        return_state=True,
        implementation=implementation,
    )
    if residual is not None:
        y = _with_residual(y, residual, activation)
    return y.astype(dtype), following


def _float(dtype: Any) -> np.dtype:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{OP}: preferred_element_type={dtype!r} is no dtype of floats. Pass f32, "
            "or leave it out."
        )
    return np.dtype(dtype)


def _with_residual(
    y: jax.Array, residual: ArrayLike, activation: Activation | None
) -> jax.Array:
    """Add a residual in f32 to a product that has been rounded; cuDNN has no part."""
    added = as_operand(OP, "residual", residual)
    with refused_by_jax(OP, {"residual": added, "the product": y}):
        shape = jnp.broadcast_shapes(added.shape, y.shape)
    if shape != y.shape:
        raise ValueError(
            f"{OP}: residual has shape {list(added.shape)}, which does not broadcast "
            f"to the product's, {list(y.shape)}. Insert or expand axes."
        )
    total = y.astype(jnp.float32)
    total = total + jnp.broadcast_to(added.astype(jnp.float32), y.shape)
    if activation is not None:
        total = on_array(OP, activation, total)
    return total.astype(y.dtype)
