# SPDX-License-Identifier: Apache-2.0
"""Trains a small mixture of experts: the tokens of each expert are a group of rows.

A router gives each token to two of eight experts. The tokens are sorted by expert, so
that those of one expert are rows side by side. Then each layer of the experts is one
grouped product, `jax_cudnn.ragged_dot`, whatever number of tokens each expert has. The
task is a function that differs between parts of the input space, which one small MLP of
the same cost cannot fit as well.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn

EXPERTS, CHOSEN, WIDTH, HIDDEN = 8, 2, 16, 32
Weights = dict[str, jax.Array]


def draw_tokens(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens (t, d) in clusters, and targets (t, d), a map for each cluster."""
    keys = jax.random.split(key, 2)
    # The task is the same for each key.
    centres = 2 * jax.random.normal(jax.random.key(1), (EXPERTS, WIDTH))
    maps = jax.random.normal(jax.random.key(2), (EXPERTS, WIDTH, WIDTH)) / WIDTH**0.5
    cluster = jax.random.randint(keys[0], (count,), 0, EXPERTS)
    x = centres[cluster] + jax.random.normal(keys[1], (count, WIDTH))
    return x, jnp.tanh(jnp.einsum("td,tdf->tf", x, maps[cluster]))


def draw_weights(key: jax.Array, experts: int) -> Weights:
    """Return the weights of a router and of the experts' layers."""
    shapes = {
        "router": (WIDTH, experts),
        "up": (experts, WIDTH, HIDDEN),
        "down": (experts, HIDDEN, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: jax.random.normal(each, shape) / shape[-2] ** 0.5
        for each, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    weights["up_bias"] = jnp.zeros((experts, HIDDEN))
    weights["down_bias"] = jnp.zeros((experts, WIDTH))
    return weights


def mixture(weights: Weights, x: jax.Array, implementation: Any) -> jax.Array:
    """Return for each token the weighted sum of what its experts make of it."""
    experts = weights["up"].shape[0]
    chosen = min(CHOSEN, experts)
    scores, expert = jax.lax.top_k(x @ weights["router"], chosen)
    shares = jax.nn.softmax(scores)
    # One row for each pair of a token and an expert, sorted by expert.
    order = jnp.argsort(expert.reshape(-1))
    token = order // chosen
    sizes = jnp.bincount(expert.reshape(-1), length=experts)
    grouped = functools.partial(
        jax_cudnn.ragged_dot, group_sizes=sizes, implementation=implementation
    )
    hidden = grouped(
        x[token], weights["up"], bias=weights["up_bias"], activation="silu"
    )
    rows = grouped(hidden, weights["down"], bias=weights["down_bias"])
    return jnp.zeros_like(x).at[token].add(rows * shares.reshape(-1)[order][:, None])


def loss_of(
    weights: Weights, x: jax.Array, target: jax.Array, implementation: Any
) -> jax.Array:
    """Return the mean square of the error."""
    return jnp.mean((mixture(weights, x, implementation) - target) ** 2)


def train(experts: int, steps: int, tokens: int, implementation: Any) -> list[float]:
    """Return the loss of each step, by Adam."""

    @jax.jit
    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        weights, first, second, count = state
        batch = draw_tokens(key, tokens)
        loss, slopes = jax.value_and_grad(loss_of)(weights, *batch, implementation)
        count += 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, slopes)
        rate = 0.01 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
        weights = jax.tree.map(
            lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), weights, first, second
        )
        return (weights, first, second, count), loss

    @jax.jit
    def start(key: jax.Array) -> Any:
        weights = draw_weights(key, experts)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return weights, zeros, zeros, jnp.zeros(())

    state = start(jax.random.key(0))
    losses: list[float] = []
    for key in jax.random.split(jax.random.key(3), steps):
        state, loss = step(state, key)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Train the experts, and one MLP in their place, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, nargs="+", default=[1, EXPERTS])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--implementation", choices=("auto", "cudnn", "xla"), default="auto"
    )
    options = parser.parse_args()
    for experts in options.experts:
        losses = train(experts, options.steps, options.tokens, options.implementation)
        name = "expert " if experts == 1 else "experts"
        print(f"{experts} {name} loss {losses[0]:.4f} before, {losses[-1]:.4f} after")
        assert losses[-1] < losses[0], "the loss did not fall"


if __name__ == "__main__":
    main()
