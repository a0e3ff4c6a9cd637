# SPDX-License-Identifier: Apache-2.0
"""GPT-2 in Flax nnx, with the kernels of jax_cudnn or those of plain JAX.

Nothing here knows how many devices there are.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from language.settings import Settings

import jax_cudnn
import jax_cudnn.flax
from gpt.settings import VOCABULARY
from jax_cudnn import f8
from jax_cudnn.flax.nnx import F8DotGeneral


class GeluLinear(nnx.Linear):
    """A dense layer, and a gelu behind it, as plain JAX has them."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        return jax.nn.gelu(super().__call__(inputs, out_sharding))


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Who computes attention, products, and the product with bias and gelu.

    ``layer`` computes the products of the blocks, ``dot_general`` those with the
    embedding, at both ends of the model.
    """

    attention: Callable[..., jax.Array]
    dot_general: Callable[..., jax.Array]
    layer: Callable[..., jax.Array]
    gelu_linear: Callable[..., nnx.Linear]


def kernels_for(settings: Settings) -> Kernels:
    """Return who computes what: jax_cudnn, in f8 if asked for, or plain JAX."""
    if settings.baseline:
        return _plain_kernels()
    gelu_linear = functools.partial(jax_cudnn.flax.nnx.Linear, activation="gelu")
    layer: Callable[..., jax.Array] = jax_cudnn.flax.dot_general
    if settings.f8:
        # Scales from the tensors themselves, so that there is no state to carry along.
        gelu_linear = functools.partial(gelu_linear, recipe=f8.Current())
        layer = F8DotGeneral(f8.Current())
    return Kernels(
        attention=jax_cudnn.sdpa,
        dot_general=jax_cudnn.flax.dot_general,
        layer=layer,
        gelu_linear=gelu_linear,
    )


def _plain_kernels() -> Kernels:
    """Return what JAX has itself, cuDNN's attention on a GPU included."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return Kernels(
        attention=functools.partial(
            jax.nn.dot_product_attention, implementation=implementation
        ),
        dot_general=jax.lax.dot_general,
        layer=jax.lax.dot_general,
        gelu_linear=GeluLinear,
    )


class AttentionBlock(nnx.Module):
    """Attention on the normalised residual: the first half of a block.

    Query, key and value are one product, whose columns begin with the head: a GPU that
    has some of the heads has whole columns. The product `out` sums over what is split
    by "model", so its bias and the residual are added behind that sum.
    """

    def __init__(self, settings: Settings, kernels: Kernels, rngs: nnx.Rngs):
        width, heads = settings.width, settings.heads
        self.kernels = kernels
        norm = functools.partial(
            nnx.LayerNorm, width, epsilon=1e-5, dtype=settings.dtype, rngs=rngs
        )
        head = (heads, width // heads)
        self.attention_norm = norm()
        self.qkv = nnx.LinearGeneral(
            width,
            (heads, 3, head[1]),
            dot_general=kernels.layer,
            **self.first(settings, rngs),
        )
        self.out = nnx.LinearGeneral(
            head, width, axis=(-2, -1), **self.last(settings, rngs)
        )
        self.mlp_norm = norm()

    def first(self, settings: Settings, rngs: nnx.Rngs) -> dict[str, Any]:
        """Return the options of layers that read the residual."""
        init = nnx.initializers.normal(0.02)
        return {"kernel_init": init, "dtype": settings.dtype, "rngs": rngs}

    def last(self, settings: Settings, rngs: nnx.Rngs) -> dict[str, Any]:
        """Return the options of layers that add to the residual."""
        # Each layer adds two terms to the residual.
        deviation = 0.02 / math.sqrt(2 * settings.layers)
        init = nnx.initializers.normal(deviation)
        common = {"dtype": settings.dtype, "rngs": rngs}
        return {"kernel_init": init, "dot_general": self.kernels.layer, **common}

    def attend(self, x: jax.Array) -> jax.Array:
        """Return the residual with attention added."""
        qkv = self.qkv(self.attention_norm(x))
        query, key, value = (qkv[..., i, :] for i in range(3))
        heads = self.kernels.attention(query, key, value, is_causal=True)
        return x + self.out(heads)


class Block(AttentionBlock):
    """Attention and a two-layer perceptron, each on the normalised residual."""

    def __init__(self, settings: Settings, kernels: Kernels, rngs: nnx.Rngs):
        super().__init__(settings, kernels, rngs)
        width = settings.width
        self.up = kernels.gelu_linear(width, 4 * width, **self.first(settings, rngs))
        self.down = nnx.Linear(4 * width, width, **self.last(settings, rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.attend(x)
        return x + self.down(self.up(self.mlp_norm(x)))


class Gpt(nnx.Module):
    """GPT-2, without dropout; takes (batch, length) tokens and returns f32 logits."""

    block: Callable[..., nnx.Module] = Block

    def __init__(self, settings: Settings, kernels: Kernels, rngs: nnx.Rngs):
        width, dtype = settings.width, settings.dtype
        options = {"embedding_init": nnx.initializers.normal(0.02), "dtype": dtype}
        self.kernels = kernels
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs, **options)
        self.positions = nnx.Embed(settings.context, width, rngs=rngs, **options)
        self.blocks = nnx.List(
            self.block(settings, kernels, rngs) for _ in range(settings.layers)
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Return the residual before the first block."""
        embedding = self.tokens.embedding[...].astype(self.tokens.dtype)
        # Rows are looked up by a product: its gradient is one too. The gradient of
        # taking them would add up many rows in few places, one after the other.
        chosen = jax.nn.one_hot(tokens, VOCABULARY, dtype=embedding.dtype)
        x = self.kernels.dot_general(chosen, embedding, (((2,), (0,)), ((), ())))
        return x + self.positions(jnp.arange(tokens.shape[1]))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits for the residual behind the last block."""
        embedding = self.tokens.embedding[...].astype(self.tokens.dtype)
        # The embedding serves as the output layer too: (b, s, w) times (vocabulary, w).
        return self.kernels.dot_general(
            self.norm(x),
            embedding,
            (((2,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)
