# SPDX-License-Identifier: Apache-2.0
"""Trains a residual network on images of digits with jax_cudnn's convolutions.

The 1797 images of 8 by 8 pixels come with scikit-learn; every fifth one is held out.
Each convolution is one kernel with its bias, its activation and, where a block ends,
the skip connection. On an NVIDIA GPU the program computes in bf16 and runs cuDNN. On
two CPU cores it takes less than a minute.

It needs scikit-learn besides Flax and optax: pip install ".[flax]" scikit-learn
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from sklearn.datasets import load_digits

import jax_cudnn.plans
from jax_cudnn.flax.nnx import Conv, Linear


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of model and training."""

    epochs: int = 20
    batch: int = 64
    widths: tuple[int, ...] = (32, 64)  # channels of each block
    learning_rate: float = 3e-3
    dtype: DTypeLike = jnp.float32
    implementation: Literal["auto", "cudnn", "xla"] = "auto"


QUICK = {"epochs": 6, "widths": (8, 16), "learning_rate": 1e-2}


# --- images ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Images, (n, 8, 8, 1) from -1 to 1, and the digits that they show, (n,)."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: np.ndarray) -> "Digits":
        return Digits(images=self.images[indices], labels=self.labels[indices])


def read_digits() -> tuple[Digits, Digits]:
    """Return what to train on, and every fifth image, which is held out."""
    pixels, labels = load_digits(return_X_y=True)  # 0 to 16, 64 in a row
    digits = Digits(
        images=(pixels.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32),
        labels=labels.astype(np.int32),
    )
    is_held_out = np.arange(len(digits)) % 5 == 4
    return digits.part(~is_held_out), digits.part(is_held_out)


def batches(digits: Digits, size: int, seed: int) -> Iterator[Digits]:
    """Yield all images in random order, less a last batch that is not full."""
    order = np.random.default_rng(seed).permutation(len(digits))
    for start in range(0, len(digits) - size + 1, size):
        yield digits.part(order[start : start + size])


# --- model ----------------------------------------------------------------------------


class Block(nnx.Module):
    """Two convolutions with a skip connection around them.

    Two kernels; a third one where the block halves the image.
    """

    def __init__(self, before: int, after: int, settings: Settings, rngs: nnx.Rngs):
        strides = 1 if before == after else 2

        def conv(channels: int, size: int, **options: Any) -> Conv:
            return Conv(
                channels,
                after,
                (size, size),
                dtype=settings.dtype,
                implementation=settings.implementation,
                rngs=rngs,
                **options,
            )

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
        self.stem = Conv(
            1,
            settings.widths[0],
            (3, 3),
            activation="relu",
            dtype=settings.dtype,
            implementation=settings.implementation,
            rngs=rngs,
        )
        before = (settings.widths[0], *settings.widths[:-1])
        self.blocks = nnx.List(
            Block(*sizes, settings, rngs)
            for sizes in zip(before, settings.widths, strict=True)
        )
        self.logits = Linear(
            settings.widths[-1],
            10,
            dtype=settings.dtype,
            implementation=settings.implementation,
            rngs=rngs,
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.logits(x.mean(axis=(1, 2))).astype(jnp.float32)


# --- training -------------------------------------------------------------------------


class Trainer:
    """Parameters, optimizer and the compiled steps."""

    def __init__(self, settings: Settings, steps: int, seed: int):
        network = ResidualNetwork(settings, nnx.Rngs(seed))
        graph, self.params = nnx.split(network, nnx.Param)
        schedule = optax.cosine_decay_schedule(settings.learning_rate, steps)
        optimizer = optax.adamw(schedule, weight_decay=1e-2)

        def loss(
            params: optax.Params, images: jax.Array, labels: jax.Array
        ) -> jax.Array:
            logits = nnx.merge(graph, params)(images)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, labels
            ).mean()

        def step(
            params: optax.Params,
            state: optax.OptState,
            images: jax.Array,
            labels: jax.Array,
        ) -> tuple[optax.Params, optax.OptState, jax.Array]:
            value, gradient = jax.value_and_grad(loss)(params, images, labels)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        def guess(params: optax.Params, images: jax.Array) -> jax.Array:
            return nnx.merge(graph, params)(images).argmax(axis=-1)

        self._state = optimizer.init(self.params)
        self._step = jax.jit(step)
        self._guess = jax.jit(guess)

    def inspect(self, batch: Digits) -> jax_cudnn.plans.Report:
        """Return where the kernels of one step run, and with which plan."""
        return jax_cudnn.plans.inspect(
            self._step, self.params, self._state, batch.images, batch.labels
        )

    def epoch(self, digits: Digits, size: int, seed: int) -> float:
        """See all images once; return the mean loss."""
        losses = []
        for batch in batches(digits, size, seed):
            self.params, self._state, loss = self._step(
                self.params, self._state, batch.images, batch.labels
            )
            losses.append(loss)
        return float(np.mean(losses))

    def right(self, digits: Digits) -> int:
        """Return how many digits the network tells right."""
        return int((self._guess(self.params, digits.images) == digits.labels).sum())


# --- the whole ------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, help="how often each image is seen")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--implementation",
        choices=("auto", "cudnn", "xla"),
        default="auto",
        help="who runs the convolutions; default: auto",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny network for some seconds"
    )
    arguments = parser.parse_args()
    if arguments.epochs is not None and arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: at least 1 epoch is needed")
    return arguments


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """Return sizes that suit the machine and the arguments."""
    settings = Settings(implementation=arguments.implementation)
    if jax.default_backend() == "gpu":
        settings = replace(settings, dtype=jnp.bfloat16)
    if arguments.quick:
        settings = replace(settings, **QUICK)
    if arguments.epochs is not None:
        settings = replace(settings, epochs=arguments.epochs)
    return settings


def main() -> None:
    """Run the example."""
    arguments = parse_arguments()
    settings, seed = choose_settings(arguments), arguments.seed
    train, held_out = read_digits()
    steps = settings.epochs * (len(train) // settings.batch)
    trainer = Trainer(settings, steps, seed)
    count = sum(x.size for x in jax.tree.leaves(trainer.params))
    print(f"Device      {jax.devices()[0].device_kind}, {jnp.dtype(settings.dtype)}")
    print(
        f"Images      scikit-learn's digits: {len(train):,} to train on, "
        f"{len(held_out):,} held out"
    )
    print(f"Model       {count:,} parameters, blocks of {settings.widths} channels")
    print(f"Training    {settings.epochs} epochs of {len(train):,} images")

    print("\nWhere does each kernel of a training step run?")
    report = trainer.inspect(next(batches(train, settings.batch, seed)))
    print("\n".join(f"  {line}" for line in str(report).splitlines()))

    print("\nTraining:")
    before = trainer.right(held_out)
    start = time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        loss = trainer.epoch(train, settings.batch, seed + epoch)
        elapsed = time.monotonic() - start
        print(
            f"  epoch {epoch:>3}/{settings.epochs}  loss {loss:.4f}  {elapsed:3.0f} s",
            flush=True,
        )

    after = trainer.right(held_out)
    print("\nHeld-out images told right:")
    for label, right in (("before training", before), ("after training ", after)):
        share = 100 * right / len(held_out)
        print(f"  {label}  {share:5.1f} %  ({right} of {len(held_out)})")


if __name__ == "__main__":
    sys.exit(main())
