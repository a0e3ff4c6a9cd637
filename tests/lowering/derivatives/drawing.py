# SPDX-License-Identifier: Apache-2.0
"""What draws of random calls have in common: a generator, and activations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.ops.common.activations import ActivationName
from tests.products.shared.fusion_problems import ACTIVATIONS

Shape = tuple[int, ...]

# The other activations are passed as functions.
NAMED = get_args(ActivationName)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function of arrays of these shapes, and the same in plain jax.numpy."""

    text: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[Shape, ...]


class Random:
    """A random generator with the draws that calls have in common."""

    def __init__(self, *seeds: int | str) -> None:
        """Start; equal seeds draw alike."""
        entropy = [ord(each) for seed in seeds for each in str(seed)]
        self._rng = np.random.default_rng(entropy)

    def one_of(self, *values: Any) -> Any:
        """Draw one of the values."""
        return values[int(self._rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        """Draw True as often as that."""
        return bool(self._rng.random() < probability)

    def order(self, count: int) -> tuple[int, ...]:
        """Draw a permutation."""
        return tuple(int(i) for i in self._rng.permutation(count))

    def normal(self, shape: Shape) -> jax.Array:
        """Draw normal numbers in f64."""
        return jnp.asarray(self._rng.standard_normal(shape))

    def part_of(self, shape: Shape) -> Shape:
        """Draw a shape that broadcasts to that one."""
        some = tuple(size if self.chance(0.6) else 1 for size in shape)
        return some[int(self._rng.integers(len(some) + 1)) :]


def activate(activation: str | None, x: jax.Array) -> jax.Array:
    """Apply an activation as JAX has it."""
    return x if activation is None else ACTIVATIONS[activation][0](x)


def as_argument(activation: str | None) -> Any:
    """Return an activation as the operations take it."""
    if activation is None or activation in NAMED:
        return activation
    return ACTIVATIONS[activation][0]


def some(random: Random, most: int = 2, **shapes: Shape) -> dict[str, Shape]:
    """Draw which of these operands are there."""
    chosen = {name for name in shapes if random.chance(most / len(shapes))}
    return {name: shape for name, shape in shapes.items() if name in chosen}
