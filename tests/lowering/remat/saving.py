# SPDX-License-Identifier: Apache-2.0
"""What programs save for their gradients, and how many products they run."""

import contextlib
import io
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import print_saved_residuals

Function = Callable[..., Any]


def products_in(function: Function, *operands: Any) -> int:
    """Count the matmuls and convolutions in a program for a GPU, whoever runs them."""
    traced = jax.jit(function).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kinds = r"stablehlo\.(dot_general|convolution)\b|custom_call @jax_cudnn\.graph"
    return len(re.findall(kinds, text))


def saved_sizes(function: Function, *operands: Any) -> list[int]:
    """Return the sizes of the arrays that the forward pass saves, arguments apart."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_saved_residuals(function, *operands)
    lines = out.getvalue().splitlines()
    kept = [line for line in lines if "argument" not in line and "constant" not in line]
    plain = (re.sub(r"@\w+", "", line) for line in kept)  # no axes of a mesh
    shapes = [re.match(r"\w+(?:<\w+>)?\[([\d,]*)\]", line) for line in plain]
    assert all(shapes), out.getvalue()
    return sorted(
        math.prod(int(size) for size in shape[1].split(",") if size)
        for shape in shapes
        if shape
    )


def sines_of(function: Function) -> Function:
    """Return a loss that needs the function's result, and that of a tanh before it."""

    def loss(x: jax.Array, *others: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(jnp.tanh(x), *others).astype(jnp.float32)))

    return loss


def gradient_of(loss: Function, count: int) -> Function:
    """Return the loss with its gradients: without it, the forward pass is left out."""
    return jax.value_and_grad(loss, tuple(range(count)))


def assert_close(found: Any, want: Any, tolerance: float = 2e-5) -> None:
    def check(x: jax.Array, y: jax.Array) -> None:
        both = (np.asarray(each.astype(jnp.float32)) for each in (x, y))
        np.testing.assert_allclose(*both, rtol=tolerance, atol=tolerance)

    jax.tree.map(check, found, want)


def draw_arrays(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(5)
    return [jnp.asarray(np.asarray(rng.standard_normal(s) / 2, dtype)) for s in shapes]
