# SPDX-License-Identifier: Apache-2.0
"""Exchanges rows between devices that have different experts.

Each device sorts the rows of its own tokens by expert, so those for one device's
experts are one slice. It sends each slice to its device. A gather sorts by expert what
arrives. The way back is the same in reverse.

All devices know how many rows each sends to each expert. Everything else follows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import exchange_slices
from jax_cudnn.ops.products.moe.permutation import (
    Permutation,
    collect,
    inverse,
    placed,
    spread,
)


class Exchange(NamedTuple):
    """Which rows a device sends and gets.

    ``permutation`` sorts the rows that the device sends. ``sizes`` are all numbers of
    rows, (from, to, expert) of the experts that a device has.
    """

    permutation: Permutation
    sizes: jax.Array
    axes: tuple[str, ...]

    @property
    def group_sizes(self) -> jax.Array:
        """How many rows each of the device's own experts gets, (e,)."""
        return jnp.sum(self._got, axis=0, dtype=jnp.int32)

    @property
    def _device(self) -> jax.Array:
        return jax.lax.axis_index(self.axes)

    @property
    def _got(self) -> jax.Array:
        return jnp.take(self.sizes, self._device, axis=1)

    @property
    def _between(self) -> jax.Array:
        """How many rows each device sends to each other one, (from, to)."""
        return jnp.sum(self.sizes, axis=2, dtype=jnp.int32)

    def send(self, x: jax.Array, rows: int) -> jax.Array:
        """Return the rows of the device's own experts, sorted by expert.

        There is room for so many rows. Those that nobody sent are 0.
        """
        own = spread(x, self.permutation.source, self.permutation.target)
        arrived = self._exchange(own, self._between, rows)
        return spread(arrived, *self._sorted(rows))

    def bring_back(self, y: jax.Array) -> jax.Array:
        """Return for each choice of the device's own tokens its row, (t, k, n)."""
        arrived = collect(y, *self._sorted(len(y)))[:, 0]
        permutation = self.permutation
        own = self._exchange(arrived, self._between.T, len(permutation.source))
        return collect(own, permutation.source, permutation.target)

    def _sorted(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """Return source and target of the rows that arrive, once they lie by expert."""
        # Rows arrive by sender. If device 0 sends 2 rows for expert 0 and 1 for expert
        # 1, and device 1 sends 1 and 3, the experts of rows 0 to 6 are 0, 0, 1, 0, 1, 1
        # and 1. `source` is (0, 1, 3, 2, 4, 5, 6).
        got = self._got
        begins = _starts(self._between, 0)[:, self._device]
        first = begins[:, None] + _starts(got, 1)
        source = placed(got.T.reshape(-1), first.T.reshape(-1), rows)
        return source, inverse(source, rows)[:, None]

    def _exchange(self, x: jax.Array, between: jax.Array, rows: int) -> jax.Array:
        """Return the slices that arrive, side by side, of slices that lie side by side.

        ``between`` are their lengths, (from, to).
        """
        device = self._device
        return exchange_slices(
            x,
            _starts(between, 1)[device],
            between[device],
            _starts(between, 0)[device],
            between[:, device],
            rows=rows,
            axes=self.axes,
        )


def _starts(sizes: jax.Array, axis: int) -> jax.Array:
    """Return where each part begins of parts that lie side by side."""
    return jnp.cumsum(sizes, axis=axis) - sizes
