# SPDX-License-Identifier: Apache-2.0
"""Trains a network on pairs of inputs and targets, and prints how it goes."""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike

import jax_cudnn.plans


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a network is trained, and in which arithmetic."""

    epochs: int
    learning_rate: float
    batch: int = 64
    dtype: DTypeLike = jnp.float32
    implementation: Literal["auto", "cudnn", "xla"] = "auto"

    @property
    def layer_options(self) -> dict[str, Any]:
        """The arguments that every layer of jax_cudnn's gets."""
        return {"dtype": self.dtype, "implementation": self.implementation}


AnySettings = TypeVar("AnySettings", bound=Settings)


class Pairs(NamedTuple):
    """Inputs and what is to be learned of them, (n, ...) each."""

    inputs: np.ndarray
    targets: np.ndarray

    @property
    def count(self) -> int:
        return len(self.inputs)

    def part(self, indices: np.ndarray) -> "Pairs":
        return Pairs(self.inputs[indices], self.targets[indices])


def split(pairs: Pairs, is_held_out: np.ndarray) -> tuple[Pairs, Pairs]:
    """Return what to train on, and what is held out."""
    return pairs.part(~is_held_out), pairs.part(is_held_out)


def batches(pairs: Pairs, size: int, seed: int) -> Iterator[Pairs]:
    """Yield all pairs in random order, less a last batch that is not full."""
    order = np.random.default_rng(seed).permutation(pairs.count)
    for start in range(0, pairs.count - size + 1, size):
        yield pairs.part(order[start : start + size])


class Trainer:
    """Parameters, optimizer and the compiled steps of a network.

    ``loss`` is a function of the network's outputs and the targets.
    """

    def __init__(
        self,
        network: nnx.Module,
        loss: Callable[[jax.Array, jax.Array], jax.Array],
        settings: Settings,
        train: Pairs,
    ):
        self._settings, self._train = settings, train
        graph, self._params = nnx.split(network, nnx.Param)
        steps = settings.epochs * (train.count // settings.batch)
        schedule = optax.cosine_decay_schedule(settings.learning_rate, steps)
        optimizer = optax.adamw(schedule, weight_decay=1e-2)

        def outputs(params: Any, inputs: jax.Array) -> jax.Array:
            model: Any = nnx.merge(graph, params)
            return model(inputs)

        def loss_of(params: Any, pairs: Pairs) -> jax.Array:
            return loss(outputs(params, jnp.asarray(pairs.inputs)), pairs.targets)

        def step(params: Any, state: Any, pairs: Pairs) -> tuple[Any, Any, jax.Array]:
            value, gradient = jax.value_and_grad(loss_of)(params, pairs)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        self._state = optimizer.init(self._params)
        self._step = jax.jit(step)
        self._outputs = jax.jit(outputs)

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(x.size for x in jax.tree.leaves(self._params))

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """Return what the network makes of inputs."""
        return np.asarray(self._outputs(self._params, inputs))

    def inspect(self) -> jax_cudnn.plans.Report:
        """Return where the kernels of one step run, and with which plan."""
        batch = next(batches(self._train, self._settings.batch, 0))
        return jax_cudnn.plans.inspect(self._step, self._params, self._state, batch)

    def epoch(self, seed: int) -> float:
        """See all pairs once; return the mean loss."""
        losses = []
        for batch in batches(self._train, self._settings.batch, seed):
            self._params, self._state, loss = self._step(
                self._params, self._state, batch
            )
            losses.append(loss)
        return float(np.mean(losses))

    def run(self, seed: int) -> None:
        """Train, and print where the kernels run and what the loss is."""
        print("\nWhere does each kernel of a training step run?")
        print("\n".join(f"  {line}" for line in str(self.inspect()).splitlines()))
        print("\nTraining:")
        start, epochs = time.monotonic(), self._settings.epochs
        for epoch in range(1, epochs + 1):
            loss = self.epoch(seed + epoch)
            elapsed = time.monotonic() - start
            print(
                f"  epoch {epoch:>3}/{epochs}  loss {loss:.4f}  {elapsed:3.0f} s",
                flush=True,
            )


def parse_arguments(
    description: str | None, *, picture: str | None = None
) -> argparse.Namespace:
    """Return the arguments that all of the examples take.

    ``picture`` is what the example can draw into a file, if it can.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, help="how often each image is seen")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--implementation",
        choices=("auto", "cudnn", "xla"),
        default="auto",
        help="who runs the kernels; default: auto",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny network for some seconds"
    )
    if picture is not None:
        parser.add_argument("--picture", type=Path, help=picture, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.epochs is not None and arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: at least 1 epoch is needed")
    return arguments


def choose_settings(
    arguments: argparse.Namespace, usual: AnySettings, quick: AnySettings
) -> AnySettings:
    """Return settings that suit the machine and the arguments."""
    settings = quick if arguments.quick else usual
    settings = replace(settings, implementation=arguments.implementation)
    if jax.default_backend() == "gpu":
        settings = replace(settings, dtype=jnp.bfloat16)
    if arguments.epochs is not None:
        settings = replace(settings, epochs=arguments.epochs)
    return settings


def describe(settings: Settings, trainer: Trainer, images: str, model: str) -> None:
    """Print what is trained, on what and where."""
    print(f"Device      {jax.devices()[0].device_kind}, {jnp.dtype(settings.dtype)}")
    print(f"Images      {images}")
    print(f"Model       {trainer.size:,} parameters, {model}")
    print(f"Training    {settings.epochs} epochs in batches of {settings.batch}")
