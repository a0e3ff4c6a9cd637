# SPDX-License-Identifier: Apache-2.0
"""Trains a residual network on images of digits with jax_cudnn's convolutions.

The 1797 images of 8 by 8 pixels come with scikit-learn; every fifth one is held out.
Each convolution is one kernel with its bias, its activation and, where a block ends,
the skip connection. On an NVIDIA GPU the program computes in bf16 and runs cuDNN. On
two CPU cores it takes less than a minute.

It needs scikit-learn besides Flax and optax: pip install ".[flax]" scikit-learn
"""

import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from images import digits, training

from jax_cudnn.flax.nnx import Conv, Linear


@dataclass(frozen=True, kw_only=True)
class Settings(training.Settings):
    """Sizes of model and training."""

    epochs: int = 20
    learning_rate: float = 3e-3
    widths: tuple[int, ...] = (32, 64)  # channels of each block


QUICK = Settings(epochs=6, learning_rate=1e-2, widths=(8, 16))


class Block(nnx.Module):
    """Two convolutions with a skip connection around them.

    Two kernels; a third one where the block halves the image.
    """

    def __init__(self, before: int, after: int, settings: Settings, rngs: nnx.Rngs):
        strides = 1 if before == after else 2

        def conv(channels: int, size: int, **options: Any) -> Conv:
            options |= settings.layer_options
            return Conv(channels, after, (size, size), rngs=rngs, **options)

        self.first = conv(before, 3, strides=strides, activation="relu")
        self.second = conv(after, 3, activation="relu")
        self.skip = (
            conv(before, 1, strides=strides, use_bias=False) if strides > 1 else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        skip = x if self.skip is None else self.skip(x)
        return self.second(self.first(x), residual=skip)


class ResidualNetwork(nnx.Module):
    """A stem, blocks, and a linear layer on the mean over all pixels; f32 logits."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        first, *_, last = settings.widths
        self.stem = Conv(
            1, first, (3, 3), activation="relu", rngs=rngs, **settings.layer_options
        )
        before = (first, *settings.widths[:-1])
        self.blocks = nnx.List(
            Block(*sizes, settings, rngs)
            for sizes in zip(before, settings.widths, strict=True)
        )
        self.logits = Linear(last, digits.CLASSES, rngs=rngs, **settings.layer_options)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.logits(x.mean(axis=(1, 2))).astype(jnp.float32)


def main() -> None:
    """Run the example."""
    arguments = training.parse_arguments(__doc__)
    settings = training.choose_settings(arguments, Settings(), QUICK)
    digits.run(
        lambda rngs: ResidualNetwork(settings, rngs),
        settings,
        arguments.seed,
        f"blocks of {settings.widths} channels",
    )


if __name__ == "__main__":
    sys.exit(main())
