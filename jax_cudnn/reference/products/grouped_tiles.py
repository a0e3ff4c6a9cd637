# SPDX-License-Identifier: Apache-2.0
"""Multiplies each row by the matrix of its own group, in a loop over tiles of rows.

XLA's own code for ``ragged_dot`` on a GPU multiplies all rows by the matrix of each
group. Here a loop goes over tiles of rows, and a tile lies within one group. How many
tiles there may be follows from the shapes, so the loop has a fixed number of rounds and
the host waits for nothing; tiles that are not needed have no rows.

On an H100, with JAX 0.11.2 and random sizes, the loops took 0.42 and 0.22 of the time
of ``ragged_dot`` (16384 rows with 8 groups of 4096 x 4096, and with 64 of 2048 x 2048),
and 0.81 and 0.37 of it for the gradient of the matrices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The loop pays from here on: fewer groups have fewer rows to spare, and a round takes
# some 20 us besides the product.
_GROUPS = 8
_MULTIPLICATIONS = 2**34
# A tile has twice as many rows as a group has on average, within these bounds: 512 rows
# were the fastest for 64 groups, and 1024 for 8.
_FEWEST_ROWS, _MOST_ROWS = 128, 1024


class _Tiles(NamedTuple):
    """A tile of ``rows`` rows from ``first`` on holds rows ``begin`` to ``end``.

    These are of one group; what else the tile has is of others. All are (tiles,).
    """

    group: jax.Array
    first: jax.Array
    begin: jax.Array
    end: jax.Array

    @classmethod
    def of_sizes(cls, sizes: jax.Array, total: int, rows: int) -> "_Tiles":
        """Return the tiles of groups that follow each other in so many rows."""
        # Groups of 3 and 5 rows in tiles of 4 have the tiles 0:3, 3:7 and 7:8, and a
        # fourth tile without rows. `first` of the third one is 4, since a tile has 4
        # rows: 4:7 are not its own.
        sums = jnp.cumsum(sizes, dtype=jnp.int32)
        ends, starts = (jnp.clip(x, 0, total) for x in (sums, sums - sizes))
        each = -(-jnp.maximum(ends - starts, 0) // rows)
        last = jnp.cumsum(each, dtype=jnp.int32)
        # Every group but the last may end within a tile.
        tile = jnp.arange(-(-total // rows) + len(sizes), dtype=jnp.int32)
        group = jnp.sum(last[None] <= tile[:, None], 1, dtype=jnp.int32)
        is_needed = group < len(sizes)
        group = jnp.minimum(group, len(sizes) - 1)
        begin = starts[group] + (tile - (last - each)[group]) * rows
        end = jnp.where(is_needed, jnp.minimum(begin + rows, ends[group]), begin)
        return cls(group, jnp.clip(begin, 0, total - rows), begin, end)

    def own(self, tile: jax.Array, rows: int) -> jax.Array:
        """Return which of a tile's rows are its own, as (rows, 1)."""
        row = self.first[tile] + jnp.arange(rows, dtype=jnp.int32)[:, None]
        return (self.begin[tile] <= row) & (row < self.end[tile])


def pays(a: jax.Array, b: jax.Array, groups: int) -> bool:
    """Whether a loop over tiles is faster than ``ragged_dot``, for these operands.

    They are rows (m, k) and what they are multiplied by: matrices, or rows (m, n).
    """
    multiplications = a.size * b.shape[-1]
    return groups >= _GROUPS and multiplications >= _MULTIPLICATIONS


def product(
    a: jax.Array, b: jax.Array, sizes: jax.Array, dtype: Any, precision: Any
) -> jax.Array:
    """Return each row (m, k) times the matrix (g, k, n) of its group, or 0 for none."""
    total = len(a)
    rows = _rows_of_tile(total, len(b))
    tiles = _Tiles.of_sizes(sizes, total, rows)

    def add(tile: jax.Array, found: jax.Array) -> jax.Array:
        first = tiles.first[tile]
        made = jnp.matmul(
            jax.lax.dynamic_slice_in_dim(a, first, rows),
            jax.lax.dynamic_index_in_dim(b, tiles.group[tile], keepdims=False),
            precision=precision,
            preferred_element_type=dtype,
        )
        there = jax.lax.dynamic_slice_in_dim(found, first, rows)
        mine = jnp.where(tiles.own(tile, rows), made, there)
        return jax.lax.dynamic_update_slice_in_dim(found, mine, first, 0)

    # Like an operand, so that it varies inside shard_map as those do.
    nothing = jnp.zeros_like(a, dtype, (total, b.shape[2]))
    return jax.lax.fori_loop(0, len(tiles.group), add, nothing)


def product_over_rows(
    a: jax.Array, b: jax.Array, sizes: jax.Array, sums: Any, precision: Any
) -> jax.Array:
    """Return for each group the product of its rows (m, k) and (m, n), as (g, k, n).

    It has the dtype of the operands; ``sums`` is that in which products are added.
    """
    total, groups = len(a), len(sizes)
    rows = _rows_of_tile(total, groups)
    tiles = _Tiles.of_sizes(sizes, total, rows)

    def add(
        tile: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        sum_of_group, found = carry
        is_own = tiles.own(tile, rows)
        # Both: the one may have a NaN in a row of another group where the other has 0.
        ours, theirs = (
            jnp.where(
                is_own,
                jax.lax.dynamic_slice_in_dim(x, tiles.first[tile], rows),
                jnp.zeros((), x.dtype),
            )
            for x in (a, b)
        )
        made = jnp.matmul(
            ours.T, theirs, precision=precision, preferred_element_type=sums
        )
        group = tiles.group[tile]
        goes_on = (tile > 0) & (tiles.group[tile - 1] == group)
        sum_of_group = made + jnp.where(goes_on, sum_of_group, jnp.zeros((), sums))
        # Until the last tile of a group, what is written here is written over.
        return sum_of_group, jax.lax.dynamic_update_index_in_dim(
            found, sum_of_group.astype(found.dtype), group, 0
        )

    shape = (a.shape[1], b.shape[1])
    nothing = (
        jnp.zeros_like(a, sums, shape),
        jnp.zeros_like(a, shape=(groups, *shape)),
    )
    return jax.lax.fori_loop(0, len(tiles.group), add, nothing)[1]


def _rows_of_tile(total: int, groups: int) -> int:
    rows = _FEWEST_ROWS
    while rows < _MOST_ROWS and rows * groups < 2 * total:
        rows *= 2
    return min(rows, total)
