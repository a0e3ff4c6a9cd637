# SPDX-License-Identifier: Apache-2.0
"""Defines what a training program has to know of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from language.settings import Settings
from language.text import Rows


class Layout(Protocol):
    """A mesh of devices, and what is split over it."""

    @property
    def mesh(self) -> Mesh:
        """Return the devices."""
        ...

    @property
    def rows(self) -> PartitionSpec:
        """Return how the arrays of a batch are split."""
        ...

    def of_state(self, state: Any) -> Any:
        """Return where each array of parameters or of the optimizer is kept."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model to train, and where it lies.

    ``initial`` draws the parameters. ``arrays_of`` makes the arrays of a batch from
    rows of text, each with one row for each of these. ``loss`` returns the sum of a
    batch's losses in nats, and how many there are. The batch is cut into ``parts``,
    whose gradients are added up (gradient accumulation). ``lookups`` are endings of the
    names of matrices that rows are taken from, without a product.
    """

    settings: Settings
    layout: Layout
    initial: Callable[[], nnx.State]
    arrays_of: Callable[[Rows], Any]
    loss: Callable[[nnx.State, Any], tuple[jax.Array, jax.Array]]
    lookups: tuple[str, ...]
    parts: int = 1
