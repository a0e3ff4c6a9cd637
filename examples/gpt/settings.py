# SPDX-License-Identifier: Apache-2.0
"""Defines the sizes of GPT-2 that the example trains."""

from language.settings import BYTES, Settings

VOCABULARY = BYTES


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
