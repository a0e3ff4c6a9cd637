# SPDX-License-Identifier: Apache-2.0
"""Teaches a network to tell scikit-learn's digits: 1797 images of 8 by 8 pixels."""

from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from images.training import Pairs, Settings, Trainer, describe, split

SIDE = 8
CLASSES = 10


def read_digits() -> tuple[Pairs, Pairs]:
    """Return images, (n, 8, 8, 1) from -1 to 1, and the digits that they show, (n,).

    Every fifth image is held out.
    """
    pixels, labels = load_digits(return_X_y=True)  # 0 to 16, 64 in a row
    images = (pixels.reshape(-1, SIDE, SIDE, 1) / 8 - 1).astype(np.float32)
    pairs = Pairs(images, labels.astype(np.int32))
    return split(pairs, np.arange(pairs.count) % 5 == 4)


def run(
    network: Callable[[nnx.Rngs], nnx.Module], settings: Settings, seed: int, model: str
) -> None:
    """Train a network, and print how many digits it tells before and after."""
    train, held_out = read_digits()

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    trainer = Trainer(network(nnx.Rngs(seed)), loss, settings, train)
    images = (
        f"scikit-learn's digits: {train.count:,} to train on, "
        f"{held_out.count:,} held out"
    )
    describe(settings, trainer, images, model)

    def told_right() -> int:
        guesses = trainer.outputs(held_out.inputs).argmax(axis=-1)
        return int((guesses == held_out.targets).sum())

    before = told_right()
    trainer.run(seed)
    print("\nHeld-out images told right:")
    for label, right in (
        ("before training", before),
        ("after training ", told_right()),
    ):
        share = 100 * right / held_out.count
        print(f"  {label}  {share:5.1f} %  ({right} of {held_out.count})")
