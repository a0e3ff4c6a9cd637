# SPDX-License-Identifier: Apache-2.0
"""Draws for random problems: the generator, dtypes, sizes and texts.

Seeds are fixed, so that a problem is the same in every run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.products.shared.fusion_problems import ACTIVATIONS, CALLABLES, Operand

FLOATS: Sequence[str] = (
    "bfloat16",
    "bfloat16",
    "bfloat16",
    "float16",
    "float32",
    "float32",
)
# Fewer elements than this say little about a norm.
FEWEST = 64
# Products in a contraction: the whole ring is to take minutes.
MOST_PRODUCTS = 3e8


class Draw:
    """A random generator with the draws that problems have in common."""

    def __init__(self, seed: int, name: str) -> None:
        self.rng = np.random.default_rng([seed, *name.encode()])

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """Draw from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def normal(self, shape: Sequence[int], dtype: str, size: float = 1.0) -> jax.Array:
        values = self.rng.standard_normal(tuple(shape), np.float32) * np.float32(size)
        return jnp.asarray(values.astype(jnp.dtype(dtype)))

    def factors(self, shape: Sequence[int], dtype: str, size: float) -> jax.Array:
        """Draw numbers between 0.5 and 1.5 times a size."""
        values = (self.rng.random(tuple(shape), np.float32) + 0.5) * np.float32(size)
        return jnp.asarray(values.astype(jnp.dtype(dtype)))

    def activation(self) -> str | None:
        if self.chance(0.2):
            return None
        if self.chance(0.25):
            return self.one_of(CALLABLES)
        return self.one_of([name for name in ACTIVATIONS if name not in CALLABLES])


def activation_argument(name: str | None) -> Any:
    return ACTIVATIONS[name][0] if name in CALLABLES else name


def options_text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def operands_text(operands: Mapping[str, Operand]) -> str:
    return ", ".join(
        f"{name} {each.array.dtype}{list(each.array.shape)}"
        for name, each in operands.items()
    )
