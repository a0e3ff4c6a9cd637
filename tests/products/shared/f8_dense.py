# SPDX-License-Identifier: Apache-2.0
"""The truth of layers in f8: float64 products of what NumPy rounds."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_cudnn import f8
from tests.common import drawn

E4, E5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def normal(seed: int, *shape: int) -> jax.Array:
    """Return random numbers."""
    return drawn.normal(seed, shape)


def rounded(x: Any, scale: float, dtype: Any) -> np.ndarray:
    """Return what the copy of an array in f8 stands for."""
    most = np.float32(ml_dtypes.finfo(dtype).max)
    stored = np.asarray(x, np.float32) / np.float32(scale)
    return np.clip(stored, -most, most).astype(dtype).astype(np.float64) * scale


def scale_of(x: Any, dtype: Any) -> float:
    """Return the scale of the array's own amax."""
    largest = np.float32(np.abs(np.asarray(x, np.float32)).max())
    return float(largest * np.float32(1 / float(ml_dtypes.finfo(dtype).max)))


def truth(
    x: Any, w: Any, grad: Any = None, scales: Sequence[float] | None = None
) -> list[np.ndarray]:
    """Return the product, and the gradients by x and w."""
    grad = np.zeros((*x.shape[:-1], w.shape[-1])) if grad is None else grad
    if scales is None:
        scales = scale_of(x, E4), scale_of(w, E4), scale_of(grad, E5) or 1.0
    a, b = rounded(x, scales[0], E4), rounded(w, scales[1], E4)
    g = rounded(grad, scales[2], E5)
    rows, columns = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
    return [a @ b, g @ b.T, rows.T @ columns]


# With this flag, which `make test-oldest` sets, XLA's CPU rounds f32 to f16 before it
# rounds that to f8: the copies of some numbers are the neighbours of the right ones.
ROUNDS_TWICE = "--xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")


def close(found: Any, wanted: np.ndarray, *, ulp: float) -> None:
    """Judge by the norm: one rounding of the result, and sums in f32."""
    error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
    bound = ulp + 0.02 if ROUNDS_TWICE else ulp
    assert error <= bound * np.linalg.norm(wanted)


ULP = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}


RECIPES = [f8.Current(), f8.Delayed(history=4)]
by_recipe = pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: type(recipe).__name__
)


@functools.partial(jax.jit, static_argnames="recipe")
def step(state: Any, x: Any, w: Any, grad: Any, recipe: Any) -> tuple[Any, Any]:
    """Return the results of a layer with its gradients, and the next state."""

    def layer(x: Any, w: Any, state: Any) -> Any:
        return f8.dense(x, w, recipe=recipe, state=state)

    y, back = jax.vjp(layer, x, w, state)
    *grads, following = back(grad)
    return (y, *grads), following
