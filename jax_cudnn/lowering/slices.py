# SPDX-License-Identifier: Apache-2.0
"""Sends slices of rows, whose lengths the devices know, between devices.

The meaning is that of `jax.lax.ragged_all_to_all`, which runs on NVIDIA GPUs. XLA has
no such collective for a CPU, so elsewhere each slice is padded to a block for
`jax.lax.all_to_all`. JAX's own rule for vmap needs examples of all operands or of none;
this primitive takes examples of any.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import _jax

# XLA copies between the GPUs of one process with a kernel that has a block of 128
# threads for each slice (openxla/xla#33386). A slice of 67 MB for each of two GPUs took
# 25 ms. So slices are cut into so many pieces, for at most so many
# devices as the kernel takes. Beyond them XLA sends each slice by NCCL, whole.
_PIECES = 1024
_MOST_DEVICES = 8

exchange_p = _jax.Primitive("cudnn_exchange_slices")


def exchange_slices(
    x: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    places: jax.Array,
    arriving: jax.Array,
    *,
    rows: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """Return the slices that all devices send to this one; 0 where none arrives.

    Inside `jax.shard_map`, with n devices along the axes.

    Args:
      x: (m, d), the rows of this device.
      starts: (n,) i32, where in x the slice for each device begins.
      sizes: (n,) i32, how long it is.
      places: (n,) i32, where it begins in that device's result.
      arriving: (n,) i32, how long the slice from each device is.
      rows: the length of the result.
      axes: names of axes of the mesh.

    Returns:
      (rows, d).
    """
    operands = _jax.align_varying([x, starts, sizes, places, arriving])
    longest = min(len(x), rows)
    return exchange_p.bind(*operands, rows=rows, axes=axes, longest=longest)


def _aval(x: Any, *numbers: Any, rows: int, axes: Any, longest: int) -> Any:
    del axes, longest
    return _jax.output_aval((rows, *x.shape[1:]), x.dtype, (x, *numbers))


def _ragged(
    x: jax.Array, *numbers: jax.Array, rows: int, axes: Any, longest: int
) -> jax.Array:
    del longest
    room = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    room, *_ = _jax.align_varying([room, x])
    if jax.process_count() == 1 and jax.lax.axis_size(axes) <= _MOST_DEVICES:
        # If the number is even, each block takes a part of several pieces.
        count = (_PIECES // len(numbers[0]) - 1) | 1
        numbers = _cut(*numbers, count=max(1, count))
    return jax.lax.ragged_all_to_all(x, room, *numbers, axis_name=axes)


def _cut(
    starts: jax.Array,
    sizes: jax.Array,
    places: jax.Array,
    arriving: jax.Array,
    *,
    count: int,
) -> tuple[jax.Array, ...]:
    """Return the numbers of the same slices in so many pieces each.

    Of 5 rows in 3 pieces, 2 begin at 0, 2 at 2, and 1 at 4. Both devices of a slice
    know its length, so they cut it alike.
    """

    def pieces(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes = sizes[:, None]
        number = jnp.arange(count + 1, dtype=sizes.dtype)[None]
        ends = jnp.minimum(number * -(-sizes // count), sizes)
        return ends[:, :-1], ends[:, 1:] - ends[:, :-1]

    begins, sent = pieces(sizes)
    _, got = pieces(arriving)
    found = (starts[:, None] + begins, sent, places[:, None] + begins, got)
    return tuple(each.reshape(-1) for each in found)


def _by_blocks(
    x: jax.Array,
    starts: jax.Array,
    sizes: jax.Array,
    places: jax.Array,
    arriving: jax.Array,
    *,
    rows: int,
    axes: Any,
    longest: int,
) -> jax.Array:
    """Return the same by blocks, each as long as the longest slice there may be."""
    # With longest=3, a slice of rows 5 and 6 is sent as a block of rows 5, 6 and
    # len(x), which is out of bounds and filled with 0. The receiver drops the third
    # row, since `arriving` is 2.
    number = jnp.arange(longest, dtype=starts.dtype)[None]
    source = jnp.where(number < sizes[:, None], starts[:, None] + number, x.shape[0])
    blocks = x.at[source.reshape(-1)].get(mode="fill", fill_value=0)
    blocks = _all_to_all(blocks, axes)
    begins = _all_to_all(places, axes)
    target = jnp.where(number < arriving[:, None], begins[:, None] + number, rows)
    block = jnp.arange(len(blocks), dtype=starts.dtype)
    origin = jnp.full((rows,), len(blocks), starts.dtype)
    origin = origin.at[target.reshape(-1)].set(block, mode="drop")
    return blocks.at[origin].get(mode="fill", fill_value=0)


def _all_to_all(x: jax.Array, axes: Any) -> jax.Array:
    return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[jax.Array, Any]:
    x, *numbers = primals
    result = exchange_p.bind(x, *numbers, **params)
    moved = _jax.instantiate_zero(tangents[0])
    return result, exchange_p.bind(moved, *numbers, **params)


def _transpose(
    cotangent: Any, x: Any, *numbers: jax.Array, axes: Any, **params: Any
) -> list[Any]:
    """Return the slices of the cotangent, sent back to where they are from."""
    if _jax.is_zero(cotangent):
        return [_jax.zero_like(x.aval)] + [None] * len(numbers)
    starts, sizes, places, arriving = numbers
    back = (_all_to_all(places, axes), arriving, _all_to_all(starts, axes), sizes)
    params["rows"] = x.aval.shape[0]
    gradient = exchange_p.bind(cotangent, *back, axes=axes, **params)
    return [gradient] + [None] * len(numbers)


def _batch(
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    rows: int,
    **params: Any,
) -> tuple[jax.Array, int]:
    x, *numbers = args
    count = next(
        x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None
    )
    if dims[0] is None:
        x = jnp.broadcast_to(x[None], (count, *x.shape))
    else:
        x = jnp.moveaxis(x, dims[0], 0)
    bind = functools.partial(exchange_p.bind, **params)
    if all(dim is None for dim in dims[1:]):
        # Examples of the rows lie side by side: each row becomes a longer one.
        wide = jnp.moveaxis(x, 0, 1)
        return bind(wide, *numbers, rows=rows), 1
    # Slices of all examples become slices of one array, for each device side by side.
    starts, sizes, places, arriving = (
        jnp.broadcast_to(each[:, None], (len(each), count))
        if dim is None
        else jnp.moveaxis(each, dim, 1)
        for each, dim in zip(numbers, dims[1:], strict=True)
    )
    # With 2 examples of 8 rows, row 1 of example 1 is row 9 of the merged array. Each
    # of n devices gets 2 slices, of examples 0 and 1, so there are 2n slices.
    example = jnp.arange(count, dtype=starts.dtype)[None]
    starts = starts + example * x.shape[1]
    places = places + example * rows
    flat = (each.reshape(-1) for each in (starts, sizes, places, arriving))
    merged = x.reshape(count * x.shape[1], *x.shape[2:])
    result = bind(merged, *flat, rows=count * rows)
    return result.reshape(count, rows, *result.shape[1:]), 0


exchange_p.def_abstract_eval(_aval)
_jax.set_jvp(exchange_p, _jvp)
_jax.set_transpose(exchange_p, _transpose)
_jax.set_batching(exchange_p, _batch)


def _results(function: Any) -> Any:
    return lambda *args, **params: [function(*args, **params)]


_jax.set_lowering(exchange_p, _jax.lower_function(_results(_by_blocks)))
_jax.set_lowering(exchange_p, _jax.lower_function(_results(_ragged)), "cuda")
