# SPDX-License-Identifier: Apache-2.0
"""Defines the settings that decide the numbers of a run, for any of the models."""

from dataclasses import dataclass
from typing import Literal

BYTES = 256  # the text is read byte by byte


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the numbers of a run, but for rounding. Lengths are in bytes."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int  # over all devices together
    steps: int
    learning_rate: float
    dtype: str = "float32"  # of products and activations; parameters are f32
    seed: int = 0
    baseline: bool = False
    f8: bool = False  # the products of the blocks
    reduce_dtype: Literal["f32", "operands"] = "f32"  # of sums over devices

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens one step sees."""
        return self.batch * self.context
