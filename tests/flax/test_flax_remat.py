# SPDX-License-Identifier: Apache-2.0
"""Tests what Flax's `remat` saves of a transformer block with the package's layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx

from jax_cudnn import checkpoint_policies as policies
from jax_cudnn.flax import linen as our_linen
from jax_cudnn.flax import nnx as our_nnx
from tests.common import drawn
from tests.products.shared.fused import contractions, graphs

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# b batch, s length, w width, f features between the two linear layers, h heads.
B, S, W, F, H = 2, 5, 16, 24, 2
LAYERS = 3


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = our_nnx.LayerNorm(W, rngs=rngs)
        self.attention = our_nnx.MultiHeadAttention(H, W, decode=False, rngs=rngs)
        self.up = our_nnx.Linear(W, F, activation="gelu", rngs=rngs)
        self.down = our_nnx.Linear(F, W, rngs=rngs)

    def __call__(self, x):
        y: Any = self.norm(x)
        x = x + self.attention(y)
        return x + self.down(self.up(x))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _=None):
        y: Any = our_linen.LayerNorm()(x)
        x = x + our_linen.MultiHeadDotProductAttention(H)(y, y)
        y = our_linen.Dense(F, activation="gelu")(x)
        return x + our_linen.Dense(W)(y), None


def nnx_loss(policy: Any, *, scans: bool) -> tuple[Callable[..., jax.Array], Any]:
    """Return a loss of parameters and input through all layers, and parameters."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return Block(rngs)

    definition, state = nnx.split(make(nnx.Rngs(0)))

    def run(block, x):
        return block(x)

    call = run if policy is None else nnx.remat(run, policy=policy)

    def loss(state, x):
        blocks = nnx.merge(definition, state)
        if scans:
            walk = nnx.scan(
                lambda x, block: call(block, x),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
            )
            return jnp.sum(jnp.sin(walk(x, blocks)))
        for i in range(LAYERS):
            one = jax.tree.map(lambda leaf, i=i: leaf[i], state)
            x = call(nnx.merge(definition, one), x)
        return jnp.sum(jnp.sin(x))

    return loss, state


def linen_loss(policy: Any, *, scans: bool) -> tuple[Callable[..., jax.Array], Any]:
    """Likewise, with linen's layers; without `scans`, of one layer."""
    block = LinenBlock if policy is None else linen.remat(LinenBlock, policy=policy)
    if scans:
        block = linen.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
    model = block()
    params = model.init(jax.random.key(0), jnp.ones((B, S, W)))

    def loss(params, x):
        return jnp.sum(jnp.sin(model.apply(params, x)[0]))

    return loss, params


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("make", [nnx_loss, linen_loss])
@pytest.mark.parametrize(
    ("policy", "matmuls", "attentions"),
    [
        # Of the two linear layers, nobody reads the result of the second one again.
        (policies.dots_with_no_batch_dims_saveable, 0, 1),
        (policies.dots_and_attention_saveable, 0, 0),
        (policies.attention_saveable, 1, 0),
    ],
    ids=["no batch", "dots and attention", "attention"],
)
def test_blocks_compute_again_what_a_policy_does_not_save(
    make: Any, scans: bool, policy: Any, matmuls: int, attentions: int
) -> None:
    """Counts the kernels that run more than without remat."""
    x = drawn.normal(1, (B, S, W))
    loss, params = make(policy, scans=scans)
    plain, _ = make(None, scans=scans)

    def run(function):
        return jax.value_and_grad(function, (0, 1))

    for found, want in zip(
        jax.tree.leaves(jax.jit(run(loss))(params, x)),
        jax.tree.leaves(jax.jit(run(plain))(params, x)),
        strict=True,
    ):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
    layers = LAYERS if make is nnx_loss and not scans else 1

    def count(function):
        found = [graph for graph, _ in graphs(run(function), params, x)]
        products = sum(len(contractions(graph)) for graph in found)
        return products, sum(graph.nodes[0].kind == "sdpa" for graph in found)

    more = [a - b for a, b in zip(count(loss), count(plain), strict=True)]
    assert more == [layers * matmuls, layers * attentions]
