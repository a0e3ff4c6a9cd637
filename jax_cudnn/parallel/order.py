# SPDX-License-Identifier: Apache-2.0
"""Orders the tokens of a sequence for sharing them out among devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.lowering.sharding.array_types import (
    explicit_spec,
    gathered_along,
    is_explicitly_sharded,
    typed_as,
)
from jax_cudnn.ops.common.arguments import as_operand, check_int, describe
from jax_cudnn.ops.common.meshes import AxisName
from jax_cudnn.parallel.axes import axis_size
from jax_cudnn.parallel.schedule import Order


def check_order(op: str, order: Order) -> Order:
    """Return the order, or raise ValueError where it is none."""
    if order not in get_args(Order):
        raise ValueError(
            f"{op}: order={order!r} is not one of "
            f"{', '.join(map(repr, get_args(Order)))}."
        )
    return order


def to_zigzag(x: ArrayLike, count: int, axis: int = 1) -> jax.Array:
    """Return an array with the tokens along an axis in zigzag order.

    The axis is cut into 2 * count chunks. Of the result's `count` equal shares, share i
    holds chunks i and 2 * count - 1 - i. So under a causal mask all shares have the
    same work: early tokens see few keys, late ones many.

    Apply it to all that has a token axis: queries, keys, values, positions, labels, and
    both token axes of a mask or bias. Before the sequence is put on several devices is
    the cheapest place, for example where batches are made. Layers that work on each
    token by itself need not know of it.

    Args:
      x: an array with tokens along `axis`, in the order of the sequence.
      count: how many devices the axis is to be sharded over.
      axis: the axis of the tokens; 1 in (batch, length, heads, head size). Default 1.

    Raises:
      ValueError: an axis that `x` lacks, or whose size is not a multiple of 2 * count.
      TypeError: an `axis` that is no int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn.parallel import from_zigzag, to_zigzag
      >>> to_zigzag(jnp.arange(8), 2, axis=0)
      Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
      >>> from_zigzag(to_zigzag(jnp.arange(8), 2, axis=0), 2, axis=0)
      Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    array, axis = _checked("to_zigzag", x, count, axis, chunks=2)
    shape = array.shape
    size = shape[axis] // (2 * count)
    split = (*shape[:axis], 2, count, size, *shape[axis + 1 :])

    def paired(array: jax.Array) -> jax.Array:
        halves = jnp.reshape(array, split)
        first, second = (jax.lax.index_in_dim(halves, i, axis, False) for i in (0, 1))
        return jnp.stack([first, jnp.flip(second, axis)], axis + 1)

    return _rearranged(array, axis, paired)


def from_zigzag(x: ArrayLike, count: int, axis: int = 1) -> jax.Array:
    """Return an array with the tokens in the order of the sequence again.

    The inverse of :func:`to_zigzag`, with the same arguments and errors.
    """
    array, axis = _checked("from_zigzag", x, count, axis, chunks=2)
    shape = array.shape
    size = shape[axis] // (2 * count)
    split = (*shape[:axis], count, 2, size, *shape[axis + 1 :])

    def halved(array: jax.Array) -> jax.Array:
        pairs = jnp.reshape(array, split)
        first, second = (
            jax.lax.index_in_dim(pairs, i, axis + 1, False) for i in (0, 1)
        )
        return jnp.stack([first, jnp.flip(second, axis)], axis)

    return _rearranged(array, axis, halved)


def to_striped(x: ArrayLike, count: int, axis: int = 1) -> jax.Array:
    """Return an array with the tokens along an axis in striped order.

    Of the result's `count` equal shares, share i holds the tokens i, i + count,
    i + 2 * count and so on. So all shares have the same part of each document of a
    packed sequence, however long it is, and the same work under a causal mask.

    Apply it to all that has a token axis, as with :func:`to_zigzag`.

    Args:
      x: an array with tokens along `axis`, in the order of the sequence.
      count: how many devices the axis is to be sharded over.
      axis: the axis of the tokens; 1 in (batch, length, heads, head size). Default 1.

    Raises:
      ValueError: an axis that `x` lacks, or whose size is not a multiple of count.
      TypeError: an `axis` that is no int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn.parallel import from_striped, to_striped
      >>> to_striped(jnp.arange(8), 2, axis=0)
      Array([0, 2, 4, 6, 1, 3, 5, 7], dtype=int32)
      >>> from_striped(to_striped(jnp.arange(8), 2, axis=0), 2, axis=0)
      Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    array, axis = _checked("to_striped", x, count, axis, chunks=1)
    return _transposed(array, axis, array.shape[axis] // count)


def from_striped(x: ArrayLike, count: int, axis: int = 1) -> jax.Array:
    """Return an array with the tokens in the order of the sequence again.

    The inverse of :func:`to_striped`, with the same arguments and errors.
    """
    array, axis = _checked("from_striped", x, count, axis, chunks=1)
    return _transposed(array, axis, count)


def _transposed(x: jax.Array, axis: int, rows: int) -> jax.Array:
    """Return an array of which an axis is taken for a matrix of rows, transposed."""
    shape = x.shape
    columns = shape[axis] // rows if rows else 0
    split = (*shape[:axis], rows, columns, *shape[axis + 1 :])
    return _rearranged(
        x, axis, lambda x: jnp.swapaxes(jnp.reshape(x, split), axis, axis + 1)
    )


def _rearranged(
    x: jax.Array, axis: int, move: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Return an array whose tokens were moved, sharded in its type as it was.

    Each device may need tokens of all others: they are gathered before they are moved.
    """
    moved = jnp.reshape(move(gathered_along(x, [axis])), x.shape)
    return typed_as(moved, explicit_spec(x), [x]) if is_explicitly_sharded(x) else moved


def ordered(x: jax.Array, count: int, order: Order, axis: int = 1) -> jax.Array:
    """Return an array with the tokens of a sequence put in an order."""
    if order == "contiguous":
        return x
    return (to_zigzag if order == "zigzag" else to_striped)(x, count, axis)


def natural(x: jax.Array, count: int, order: Order, axis: int = 1) -> jax.Array:
    """Return an array with the tokens in the order of the sequence again."""
    if order == "contiguous":
        return x
    return (from_zigzag if order == "zigzag" else from_striped)(x, count, axis)


def _checked(
    op: str, x: ArrayLike, count: int, axis: int, *, chunks: int
) -> tuple[jax.Array, int]:
    """Return the array and a number of its axes, which has so many chunks a device."""
    array = as_operand(op, "x", x)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            f"{op}: count={count!r} is no number of devices. Pass an int, at least 1."
        )
    axis = check_int(op, "axis", axis)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"{op}: x is {describe(array)}, which has no axis {axis}.")
    if array.shape[axis] % (chunks * count):
        name = "count" if chunks == 1 else f"{chunks} * count"
        raise ValueError(
            f"{op}: x is {describe(array)}. Axis {axis} has {array.shape[axis]} "
            f"tokens, not a multiple of {name} = {chunks * count}. Pad the sequence, "
            "and pass its length to the attention."
        )
    return array, axis % array.ndim


def token_positions(
    length: int, *, axis_name: AxisName, order: Order = "contiguous"
) -> jax.Array:
    """Return where this device's tokens are in the sequence; inside `jax.shard_map`.

    For rotary and other embeddings of positions.

    Args:
      length: how many tokens of the sequence each device holds.
      axis_name: the mesh axis, or axes, that the sequence is sharded over.
      order: how its tokens are shared out, "contiguous" (default), "zigzag" or
        "striped".

    Returns:
      (length,) i32, in ascending order.

    Raises:
      ValueError: an axis that is not there, an unknown order, an odd length in zigzag
        order.
    """
    op = "token_positions"
    count = axis_size(op, axis_name)
    order = check_order(op, order)
    if order == "zigzag" and length % 2:
        raise ValueError(
            f"{op}: length={length} is odd. In zigzag order each device holds two "
            "chunks of equal length. Pad the sequence."
        )
    return positions_of(jax.lax.axis_index(axis_name), count, length, order)


def positions_of(device: jax.Array, count: int, length: int, order: Order) -> jax.Array:
    """Return the positions of a device's tokens."""
    index = jnp.arange(length, dtype=jnp.int32)
    if order == "contiguous":
        return device * length + index
    if order == "striped":
        return device + count * index
    half = length // 2
    later = 2 * count - 1 - device
    return jnp.where(index < half, device * half + index, later * half + index - half)


def run_length(order: Order, tokens: int) -> int:
    """Return how many of a device's tokens follow one another, at multiples of it."""
    return {"contiguous": tokens, "zigzag": tokens // 2, "striped": 1}[order]


def all_positions(count: int, length: int, order: Order) -> np.ndarray:
    """Return the positions of all devices' tokens, one device after another."""
    found = np.arange(count * length, dtype=np.int32)
    if order == "contiguous":
        return found
    if order == "striped":
        return np.reshape(np.reshape(found, (length, count)).T, -1)
    first, second = np.reshape(found, (2, count, -1))
    return np.reshape(np.stack([first, second[::-1]], 1), -1)


def visible_tokens(
    lengths: jax.Array, device: jax.Array, count: int, tokens: int, order: Order
) -> jax.Array:
    """Return how many of a device's tokens are within the sequences' lengths.

    These are its first ones, since its tokens are in ascending order.
    """
    if order == "contiguous":
        return jnp.clip(lengths - device * tokens, 0, tokens)
    if order == "striped":
        return jnp.clip((lengths - device + count - 1) // count, 0, tokens)
    half = tokens // 2
    first = jnp.clip(lengths - device * half, 0, half)
    return first + jnp.clip(lengths - (2 * count - 1 - device) * half, 0, half)
