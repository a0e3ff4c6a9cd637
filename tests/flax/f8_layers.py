# SPDX-License-Identifier: Apache-2.0
"""Sizes, recipes and comparisons of the tests of layers in f8."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_cudnn import f8

# b batch, s length, w width, f features between the two linear layers, h heads.
B, S, W, F, H = 2, 8, 32, 64, 2
# Layers of a model that scans.
LAYERS = 3
DELAYED = f8.Delayed(history=4)
by_recipe = pytest.mark.parametrize(
    "recipe", [f8.Current(), DELAYED], ids=lambda recipe: type(recipe).__name__
)


def untyped(x: Any) -> Any:
    """Return something of which types say no more."""
    return x


def rngs() -> nnx.Rngs:
    """Return the keys of the layers' first weights."""
    return nnx.Rngs(0)


def close(found: Any, wanted: Any) -> None:
    """Compare the arrays of two trees."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, atol=1e-6)


def weighed(y: jax.Array) -> jax.Array:
    """Return a sum that weighs each number differently."""
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def is_f8(row: Any) -> bool:
    """Return whether both operands of a product are in f8."""
    return all(each.startswith("f8") for each in row[1:])
