# SPDX-License-Identifier: Apache-2.0
"""Panels of dots, made by scripts/pictures.py and drawn by scripts/drawing.py."""

from typing import NamedTuple

# Contenders, in the order in which they are drawn.
CONTENDERS = {
    "jax_cudnn": "jax_cudnn",
    "untuned": "jax_cudnn, untuned",
    "torch": "PyTorch, compiled",
    "torch cudnn": "PyTorch, cuDNN",
    "torch flash": "PyTorch, flash",
    "jax.nn xla": "jax.nn, XLA",
    "time": "time of a training step",
    "memory": "memory that it needs",
}


class Dot(NamedTuple):
    """A ratio of times with its lowest and highest of all rounds."""

    median: float
    low: float
    high: float


# A row of a panel: what was run, and the ratios of each contender, one for each size.
Row = tuple[str, dict[str, list[Dot]]]


class Panel(NamedTuple):
    """Rows of dots, all relative to the same contender."""

    title: str
    axis: str
    rows: list[Row]
    smallest: float  # ratios beyond either of these are written at the edge
    largest: float
    is_one_lane: bool = False  # whether the dots of a row share one line
