# SPDX-License-Identifier: Apache-2.0
"""Trains a U-Net to remove noise from photographs with jax_cudnn's layers.

The two photographs come with scikit-learn. They are cut into squares of 32 by 32
pixels, to which noise is added; squares from the right fifth are held out. The network
halves the image by pooling, twice, and doubles it again, with a connection across at
each size. It learns what to add to the noisy image. How near it comes is told by the
peak signal-to-noise ratio (PSNR) in dB: 10 log10(1 / mean squared error).

Each convolution is a kernel, and each group norm comes with its activation. On an
NVIDIA GPU the program computes in bf16 and runs cuDNN. On two CPU cores it takes some
minutes.

It needs scikit-learn and Pillow besides Flax and optax:
pip install ".[flax]" scikit-learn pillow
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from images import training
from images.training import Pairs
from PIL import Image
from sklearn.datasets import load_sample_images

import jax_cudnn
from jax_cudnn.flax.nnx import Conv, GroupNorm

SIDE = 32
COLORS = 3
NOISE = 0.1  # standard deviation, where colours go from 0 to 1
HELD_OUT = 0.8  # squares that begin right of this share of the width are held out
COLUMNS = 4  # of squares that are held out, in a photograph of 640 by 427 pixels


@dataclass(frozen=True, kw_only=True)
class Settings(training.Settings):
    """Sizes of model and training."""

    epochs: int = 40
    learning_rate: float = 3e-3
    batch: int = 32
    widths: tuple[int, ...] = (16, 32, 64)  # channels at each size
    groups: int = 4


QUICK = Settings(epochs=12, learning_rate=1e-2, widths=(8, 8))


def read_squares() -> tuple[Pairs, Pairs]:
    """Return noisy squares and clean ones, (n, 32, 32, 3) each, colours from 0 to 1."""
    squares, is_held_out = [], []
    for photograph in load_sample_images().images:
        height, width, _ = photograph.shape
        for top in range(0, height - SIDE + 1, SIDE):
            for left in range(0, width - SIDE + 1, SIDE):
                squares.append(photograph[top : top + SIDE, left : left + SIDE])
                is_held_out.append(left >= HELD_OUT * width)
    clean = np.stack(squares).astype(np.float32) / 255
    noise = np.random.default_rng(0).normal(0, NOISE, clean.shape)
    pairs = Pairs((clean + noise).astype(np.float32), clean)
    return training.split(pairs, np.array(is_held_out))


class Stage(nnx.Module):
    """Two convolutions, each with a group norm and its activation."""

    def __init__(self, before: int, after: int, settings: Settings, rngs: nnx.Rngs):
        options = settings.layer_options
        pairs = ((before, after), (after, after))
        self.convs = nnx.List(
            Conv(*pair, (3, 3), use_bias=False, rngs=rngs, **options) for pair in pairs
        )
        self.norms = nnx.List(
            GroupNorm(after, settings.groups, activation="silu", rngs=rngs, **options)
            for _ in pairs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x))
        return x


class UNet(nnx.Module):
    """Stages down to small images and up again; the result is added to the input."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        widths = settings.widths
        above = zip((COLORS, *widths), widths, strict=False)
        self.down = nnx.List(Stage(*pair, settings, rngs) for pair in above)
        # An image from below beside the one across.
        below = zip(widths[-1:0:-1], widths[-2::-1], strict=True)
        self.up = nnx.List(
            Stage(wide + narrow, narrow, settings, rngs) for wide, narrow in below
        )
        zeros = nnx.initializers.zeros
        self.last = Conv(
            widths[0],
            COLORS,
            (1, 1),
            kernel_init=zeros,
            rngs=rngs,
            **settings.layer_options,
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        across = []
        x = images
        for stage in self.down:
            if across:
                x = jax_cudnn.max_pool(x, (2, 2), strides=(2, 2))
            x = stage(x)
            across.append(x)
        across.pop()
        for stage in self.up:
            other = across.pop()
            shape = (*other.shape[:-1], x.shape[-1])
            large = jax.image.resize(x, shape, "nearest")
            x = stage(jnp.concatenate([large, other], axis=-1))
        return self.last(x, residual=images).astype(jnp.float32)


def side_by_side(versions: Sequence[np.ndarray]) -> np.ndarray:
    """Return a part of what was held out, 4 squares high, each version beside the last.

    A version is squares in the order of `read_squares`: half of them are of the one
    photograph, half of the other, which stands below.
    """
    photographs = []
    for version in versions:
        halves = np.split(np.clip(version, 0, 1), 2)
        rows = [np.split(half, range(COLUMNS, len(half), COLUMNS)) for half in halves]
        middle = [row for half in rows for row in half[4:8]]
        photographs.append(np.concatenate([np.concatenate(x, 1) for x in middle]))
    return np.concatenate(photographs, 1)


def psnr(images: np.ndarray, clean: np.ndarray) -> float:
    """Return the peak signal-to-noise ratio in dB, for colours from 0 to 1."""
    return float(-10 * np.log10(np.square(images - clean).mean()))


def main() -> None:
    """Run the example."""
    arguments = training.parse_arguments(
        __doc__, picture="draw the versions of held-out squares into a file"
    )
    settings = training.choose_settings(arguments, Settings(), QUICK)
    train, held_out = read_squares()

    def loss(images: jax.Array, clean: jax.Array) -> jax.Array:
        return jnp.square(images - clean).mean()

    network = UNet(settings, nnx.Rngs(arguments.seed))
    trainer = training.Trainer(network, loss, settings, train)
    training.describe(
        settings,
        trainer,
        f"scikit-learn's photographs: {train.count} squares to train on, "
        f"{held_out.count} held out",
        f"stages of {settings.widths} channels",
    )
    trainer.run(arguments.seed)

    noisy, clean = held_out
    mean = jax_cudnn.avg_pool(
        noisy, (3, 3), padding="SAME", count_include_pad=False, implementation="xla"
    )
    versions = {
        "noisy": noisy,
        "mean of 3 by 3": np.asarray(mean),
        "U-Net": trainer.outputs(noisy),
    }
    print("\nHeld-out squares, PSNR:")
    for label, images in versions.items():
        print(f"  {label:18s} {psnr(images, clean):5.1f} dB")
    if arguments.picture is not None:
        pixels = side_by_side([*versions.values(), clean])
        Image.fromarray(np.round(pixels * 255).astype(np.uint8)).save(arguments.picture)
        print(f"\n{arguments.picture}: {', '.join(versions)}, clean")


if __name__ == "__main__":
    sys.exit(main())
