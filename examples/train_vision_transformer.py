# SPDX-License-Identifier: Apache-2.0
"""Trains a vision transformer on images of digits with jax_cudnn's layers.

The 1797 images of 8 by 8 pixels come with scikit-learn; every fifth one is held out.
An image is cut into patches of 2 by 2 pixels, by a convolution. Each patch is a token,
and one more token, which is no patch, gathers what the digit is.

The attention's result is added to its input by the norm that follows, and the MLP's by
the kernel of its last product. On an NVIDIA GPU the program computes in bf16 and runs
cuDNN. On two CPU cores it takes about a minute.

It needs scikit-learn besides Flax and optax: pip install ".[flax]" scikit-learn
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from images import digits, training

from jax_cudnn.flax.nnx import Conv, LayerNorm, Linear, MultiHeadAttention

PATCH = 2


@dataclass(frozen=True, kw_only=True)
class Settings(training.Settings):
    """Sizes of model and training."""

    epochs: int = 30
    learning_rate: float = 2e-3
    layers: int = 4
    width: int = 64
    heads: int = 4


QUICK = Settings(epochs=8, learning_rate=5e-3, layers=2, width=32, heads=2)


class Layer(nnx.Module):
    """Attention and an MLP, each after a norm and added to what it was given."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        width, options = settings.width, settings.layer_options
        self.before_attention = LayerNorm(width, rngs=rngs, **options)
        self.attention = MultiHeadAttention(
            settings.heads, width, decode=False, rngs=rngs, **options
        )
        self.before_mlp = LayerNorm(width, rngs=rngs, **options)
        self.widen = Linear(width, 4 * width, activation="gelu", rngs=rngs, **options)
        self.narrow = Linear(4 * width, width, rngs=rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        attended = self.attention(self.before_attention(x))
        normed, x = self.before_mlp(attended, residual=x)
        return self.narrow(self.widen(normed), residual=x)


class VisionTransformer(nnx.Module):
    """Patches and a token of their class, layers, and a linear layer; f32 logits."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        width, options = settings.width, settings.layer_options
        self.patches = Conv(
            1,
            width,
            (PATCH, PATCH),
            strides=PATCH,
            padding="VALID",
            rngs=rngs,
            **options,
        )
        tokens = 1 + (digits.SIDE // PATCH) ** 2
        draw = nnx.initializers.normal(0.02)
        self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(draw(rngs.params(), (1, tokens, width)))
        self.layers = nnx.List(Layer(settings, rngs) for _ in range(settings.layers))
        self.norm = LayerNorm(width, rngs=rngs, **options)
        self.logits = Linear(width, digits.CLASSES, rngs=rngs, **options)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = self.patches(images)
        n, *_, width = patches.shape
        first = jnp.broadcast_to(self.class_token[...], (n, 1, width))
        x = jnp.concatenate(
            [first.astype(patches.dtype), patches.reshape(n, -1, width)], axis=1
        )
        x = x + self.positions[...].astype(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x[:, 0])).astype(jnp.float32)


def main() -> None:
    """Run the example."""
    arguments = training.parse_arguments(__doc__)
    settings = training.choose_settings(arguments, Settings(), QUICK)
    digits.run(
        lambda rngs: VisionTransformer(settings, rngs),
        settings,
        arguments.seed,
        f"{settings.layers} layers of width {settings.width}, {settings.heads} heads",
    )


if __name__ == "__main__":
    sys.exit(main())
