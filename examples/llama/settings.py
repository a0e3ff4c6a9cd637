# SPDX-License-Identifier: Apache-2.0
"""Defines the settings of Llama, and the sizes that the example trains."""

from dataclasses import dataclass

from language.settings import BYTES, Settings

# Llama's vocabulary begins with three tokens for unknown, begin and end. Those of the
# 256 bytes follow.
FIRST_BYTE = 3


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(Settings):
    """What decides the numbers of a run, but for rounding."""

    key_heads: int  # each serves heads / key_heads query heads
    hidden: int  # width of the perceptron's hidden layer
    vocabulary: int
    packed: bool = False  # whether tokens see those of their own document only
    epsilon: float = 1e-5  # of the norms
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ValueError(
                f"--heads {self.heads} is not a multiple of --key-heads "
                f"{self.key_heads}"
            )
        if self.width % self.heads or self.head_size % 2:
            raise ValueError(
                f"--width {self.width} is not an even multiple of --heads "
                f"{self.heads}: the rotary embedding turns pairs of a head's features"
            )
        if self.vocabulary < FIRST_BYTE + BYTES:
            raise ValueError(
                f"--vocabulary {self.vocabulary}: it must be at least "
                f"{FIRST_BYTE + BYTES}, of which {BYTES} tokens are bytes"
            )

    @property
    def head_size(self) -> int:
        """Return how many features a head has."""
        return self.width // self.heads


SIZES = {
    "tiny": LlamaSettings(
        layers=2,
        width=128,
        heads=4,
        key_heads=2,
        hidden=352,
        vocabulary=272,
        context=64,
        batch=8,
        steps=2000,
        learning_rate=3e-3,
    ),
    # TinyLlama (arXiv:2401.02385).
    "1B": LlamaSettings(
        layers=22,
        width=2048,
        heads=32,
        key_heads=4,
        hidden=5632,
        vocabulary=32_000,
        context=2048,
        batch=16,
        steps=2000,
        learning_rate=4e-4,
    ),
    # Llama-2 (arXiv:2307.09288).
    "7B": LlamaSettings(
        layers=32,
        width=4096,
        heads=32,
        key_heads=32,
        hidden=11_008,
        vocabulary=32_000,
        context=4096,
        batch=16,
        steps=2000,
        learning_rate=3e-4,
    ),
}
