# SPDX-License-Identifier: Apache-2.0
"""Small programs for `fuse` out of random steps, each of which reads earlier values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def _rounded(x: jax.Array) -> jax.Array:
    """Round to bf16 and back; f64 is for truths, which are not rounded."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.bfloat16).astype(x.dtype)


# An operation of one array keeps values near 1, or what is compared would be rounding.
UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
    "abs": jnp.abs,
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "gelu exact": lambda x: jax.nn.gelu(x, approximate=False),
    "layer norm": lambda x: jax.nn.standardize(x, epsilon=0.1),
    "leaky": jax.nn.leaky_relu,
    "neg": jnp.negative,
    "relu": jax.nn.relu,
    "RMS norm": lambda x: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 0.1),
    "relu6": jax.nn.relu6,
    "scaled": lambda x: 0.5 * x,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "flip": lambda x: x[::-1],
    "mean": lambda x: x - x.mean(-1, keepdims=True),
    "softmax": jax.nn.softmax,
    "transposed twice": lambda x: jnp.sin(x.T).T,
    "rounded": _rounded,
    "wider": lambda x: (x[:, :, None] * jnp.ones((1, 1, 2), x.dtype))[:, :, 1],
    "split rows": lambda x: jnp.cos(x.reshape(2, -1, x.shape[1])).reshape(x.shape),
    "loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: jnp.sin(c), x),
}
BINARY: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "add": jnp.add,
    "divide": lambda x, y: x / (2.0 + jnp.sin(y)),
    "larger": jnp.maximum,
    "mul": lambda x, y: jnp.tanh(x) * y,
    "select": lambda x, y: jnp.where(x > y, x, 0.5 * y),
    "sub": jnp.subtract,
    "row of": lambda x, y: x + y[:1],
    "column of": lambda x, y: x * jnp.tanh(y[:, 2:3]),
    "number of": lambda x, y: x - y[3, 4],
}
# Where a difference in the last digit changes the result as a whole, or the gradient.
JUMPING = ("select",)
KINKED = ("abs", "clip", "exp", "larger", "leaky", "relu", "relu6", "select")

# A name, and the numbers of the values that it reads; a matmul's second one is 0 or 1
# for u or v.
Step = tuple[Any, ...]


def program(
    steps: Sequence[Step],
    results: Sequence[int],
    product: Callable[[jax.Array, jax.Array], jax.Array] = jnp.matmul,
) -> Callable[..., list[jax.Array]]:
    """Return a function of x and y (m, n), m even, and of u and v (n, n).

    Its results are the last value and those numbered, all (m, n).
    """

    def run(x: jax.Array, y: jax.Array, u: jax.Array, v: jax.Array) -> list[jax.Array]:
        values = [product(x, u), y]
        for name, *places in steps:
            first = values[places[0] % len(values)]
            if name == "matmul":
                values.append(product(first, (u, v)[places[1]]) / 3.0)
            elif name in UNARY:
                values.append(UNARY[name](first))
            else:
                values.append(BINARY[name](first, values[places[1] % len(values)]))
        return [values[-1], *(values[i % len(values)] for i in results)]

    return run
