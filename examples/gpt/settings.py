# SPDX-License-Identifier: Apache-2.0
"""Defines the settings that decide the numbers of a run."""

from dataclasses import dataclass

VOCABULARY = 256  # the text is bytes


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

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context


# Layers, width, heads, context and learning rate of the larger ones are GPT-2's and
# GPT-3's (arXiv:2005.14165, table 2.1). There are 256 tokens instead of 50,257.
SIZES = {
    "tiny": Settings(
        layers=2,
        width=192,
        heads=6,
        context=64,
        batch=8,
        steps=2000,
        learning_rate=3e-3,
    ),
    "small": Settings(
        layers=12,
        width=768,
        heads=12,
        context=1024,
        batch=32,
        steps=2000,
        learning_rate=6e-4,
    ),
    "medium": Settings(
        layers=24,
        width=1024,
        heads=16,
        context=1024,
        batch=32,
        steps=2000,
        learning_rate=3e-4,
    ),
    "large": Settings(
        layers=36,
        width=1280,
        heads=20,
        context=1024,
        batch=32,
        steps=2000,
        learning_rate=2.5e-4,
    ),
}

# Dense bf16 FLOP/s, from NVIDIA's data sheets.
