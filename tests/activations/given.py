# SPDX-License-Identifier: Apache-2.0
"""Functions given as activations: calls that show one alone, and what is said of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn import matmul, plans

Function = Callable[[jax.Array], jax.Array]


def remarks_on(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return what `inspect` says of activations that are not in the kernel."""
    calls = plans.inspect(function, *args).calls
    return [r for call in calls for r in call.reasons if "the activation" in r]


def by_scale(f: Function) -> Function:
    """Return f as an activation; 1 * x is every x, with its sign."""

    def call(x: jax.Array) -> jax.Array:
        one = jnp.ones((1, 1))
        return matmul(
            jnp.ones((x.size, 1)), one, scale_a=x[:, None], activation=f
        ).reshape(x.shape)

    return call


def by_bias(f: Function) -> Function:
    """Return f as an activation; x + 0 leaves its derivatives alone."""

    def call(x: jax.Array) -> jax.Array:
        zero = jnp.zeros((x.size, 1))
        return matmul(zero, jnp.ones((1, 1)), bias=x[:, None], activation=f).reshape(
            x.shape
        )

    return call
