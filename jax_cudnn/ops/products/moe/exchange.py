# SPDX-License-Identifier: Apache-2.0
"""Exchanges rows between devices that have different experts.

Each device sorts the rows of its own tokens by expert. The rows of one device's experts
are then one slice, which `jax.lax.ragged_all_to_all` sends as it is. XLA has no such
collective for a CPU. There, slices are padded to blocks of one size for
`jax.lax.all_to_all`. A gather sorts what arrived by expert, so that both ways give the
same rows in the same order. The way back is the same in reverse.

All devices know how many rows each sends to each expert. Everything else follows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import align_varying
from jax_cudnn.ops.products.moe.permutation import (
    Permutation,
    collect,
    inverse,
    placed,
    spread,
)


class Exchange(NamedTuple):
    """Which rows a device sends and gets.

    ``between`` says how many rows each device sends to each other one, (from, to), and
    ``got`` how many rows of each of its own experts a device gets, (from, expert).
    """

    permutation: Permutation
    between: jax.Array
    got: jax.Array


def exchange(permutation: Permutation, sizes: jax.Array, axes: Any) -> Exchange:
    """Return the exchange for numbers of rows (device, expert), of all devices."""
    count, experts = sizes.shape
    by_device = sizes.reshape(count, count, experts // count)
    got = jnp.take(by_device, jax.lax.axis_index(axes), axis=1)
    return Exchange(permutation, jnp.sum(by_device, axis=2), got)


def send(x: jax.Array, plan: Exchange, rows: int, axes: Any) -> jax.Array:
    """Return the rows of a device's own experts, sorted by expert.

    Args:
      x: (t, d), the device's tokens.
      plan: what is sent.
      rows: m, for how many rows there is room; those that nobody sent are 0.
      axes: the mesh axes along which devices have different experts.
    """
    return _by_platform(_send_slices, _send_blocks, rows, axes, x, plan)


def bring_back(y: jax.Array, plan: Exchange, axes: Any) -> jax.Array:
    """Return for each choice of a device's own tokens its row (t, k, n) of y (m, n)."""
    return _by_platform(_return_slices, _return_blocks, len(y), axes, y, plan)


def _by_platform(
    slices: Any, blocks: Any, rows: int, axes: Any, x: jax.Array, plan: Exchange
) -> jax.Array:
    leaves, structure = jax.tree.flatten((x, plan))
    x, plan = jax.tree.unflatten(structure, align_varying(leaves))
    return jax.lax.platform_dependent(
        x,
        plan,
        cuda=functools.partial(slices, rows=rows, axes=axes),
        default=functools.partial(blocks, rows=rows, axes=axes),
    )


def _sorted_by_expert(
    plan: Exchange, starts: jax.Array, rows: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """Return source and target of the rows that arrived, once they lie by expert.

    ``starts`` say where among ``size`` places the rows from each device begin.
    """
    got = plan.got
    first = starts[:, None] + jnp.cumsum(got, axis=1) - got
    source = placed(got.T.reshape(-1), first.T.reshape(-1), rows, size)
    return source, inverse(source, size)[:, None]


# --- slices ---------------------------------------------------------------------------


def _send_slices(x: jax.Array, plan: Exchange, rows: int, axes: Any) -> jax.Array:
    own = spread(x, plan.permutation.source, plan.permutation.target)
    arrived = _ragged(own, rows, plan.between, axes)
    begins = _starts(plan.between, 0)[:, jax.lax.axis_index(axes)]
    return spread(arrived, *_sorted_by_expert(plan, begins, rows, rows))


def _return_slices(y: jax.Array, plan: Exchange, rows: int, axes: Any) -> jax.Array:
    begins = _starts(plan.between, 0)[:, jax.lax.axis_index(axes)]
    arrived = collect(y, *_sorted_by_expert(plan, begins, rows, rows))[:, 0]
    permutation = plan.permutation
    own = _ragged(arrived, len(permutation.source), plan.between.T, axes)
    return collect(own, permutation.source, permutation.target)


def _starts(sizes: jax.Array, axis: int) -> jax.Array:
    """Return where each part begins of parts that lie side by side."""
    return jnp.cumsum(sizes, axis=axis) - sizes


def _ragged(x: jax.Array, rows: int, between: jax.Array, axes: Any) -> jax.Array:
    """Return the slices that arrive, side by side, of slices that lie side by side.

    ``between`` says how many rows each device sends to each other one, (from, to).
    """
    device = jax.lax.axis_index(axes)
    numbers = [
        _starts(between, 1)[device],
        between[device],
        _starts(between, 0)[device],
        between[:, device],
    ]
    if x.size:
        # JAX's rule for vmap wants all operands to have examples, or none of them. This
        # gives the numbers those of x.
        is_zero = x[0, 0] == 0
        numbers = [jnp.where(is_zero, each, each) for each in numbers]
    x, room = align_varying([x, jnp.zeros((rows, *x.shape[1:]), x.dtype)])
    return jax.lax.ragged_all_to_all(x, room, *numbers, axis_name=axes)


# --- padded blocks --------------------------------------------------------------------


def _send_blocks(x: jax.Array, plan: Exchange, rows: int, axes: Any) -> jax.Array:
    source, target = _to_blocks(plan, rows, axes)
    arrived = _all_to_all(spread(x, source, target), axes)
    return spread(arrived, *_from_blocks(plan, rows))


def _return_blocks(y: jax.Array, plan: Exchange, rows: int, axes: Any) -> jax.Array:
    arrived = _all_to_all(collect(y, *_from_blocks(plan, rows))[:, 0], axes)
    return collect(arrived, *_to_blocks(plan, rows, axes))


def _block(plan: Exchange, rows: int) -> int:
    """Return the number of rows that a device has to send to another one at most."""
    return min(len(plan.permutation.source), rows)


def _to_blocks(plan: Exchange, rows: int, axes: Any) -> tuple[jax.Array, jax.Array]:
    """Return source and target of a device's rows as a block for each device."""
    permutation, block = plan.permutation, _block(plan, rows)
    sizes = plan.between[jax.lax.axis_index(axes)]
    place = jnp.arange(block, dtype=jnp.int32)[None]
    row = _starts(sizes, 0)[:, None] + place
    none = permutation.target.size
    source = permutation.source.at[row].get(mode="fill", fill_value=none)
    source = jnp.where(place < sizes[:, None], source, none).reshape(-1)
    return source, inverse(source, none).reshape(permutation.target.shape)


def _from_blocks(plan: Exchange, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return source and target of the blocks that arrived, once they lie by expert."""
    count, block = len(plan.got), _block(plan, rows)
    starts = block * jnp.arange(count, dtype=jnp.int32)
    return _sorted_by_expert(plan, starts, rows, count * block)


def _all_to_all(x: jax.Array, axes: Any) -> jax.Array:
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
