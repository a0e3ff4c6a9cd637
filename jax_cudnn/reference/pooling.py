# SPDX-License-Identifier: Apache-2.0
"""Pooling and the gradient of an average in jax.lax.

Roles, axis letters and attributes are those of graph/pooling.py.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph.pooling import AvgPoolAttributes, MaxPoolAttributes, PoolAttributes
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.graph.windows import dilated
from jax_cudnn.reference.dtypes import DTYPES
from jax_cudnn.reference.windows import cut

Operands = Mapping[str, jax.Array]


def max_pool(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the maximum of each window."""
    assert isinstance(attributes, MaxPoolAttributes)
    if outputs["output"].is_empty:
        return _zeros("output", outputs)
    return {"output": _over_windows(attributes, inputs["x"], maxima)}


def least(dtype: np.dtype) -> np.ndarray:
    """Return the number that no other is less than."""
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).min, dtype)
    # Some 8-bit floats have no infinity.
    lowest = np.asarray(-np.inf, dtype)
    return lowest if lowest == lowest else np.asarray(jnp.finfo(dtype).min, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def maxima(
    x: jax.Array,
    window: tuple[int, ...],
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
) -> jax.Array:
    """Return the maximum of each window; window, strides and padding are of all axes.

    The derivative is that of the first largest element, a NaN before all others. JAX's
    own rule is not used: its gradient is wrong where windows overlap and XLA divides a
    spatial axis among devices (JAX 0.10 and 0.12, on CPU devices), and padding may take
    the gradient of -inf.
    """
    return jax.lax.reduce_window(
        x, least(x.dtype), jax.lax.max, window, strides, padding
    )


@maxima.defjvp
def _derivative_of_maxima(
    window: tuple[int, ...],
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (x,), (moved,) = primals, tangents
    output = maxima(x, window, strides, padding)
    if output.size == 0:
        return output, jnp.zeros_like(output, moved.dtype)
    offsets = list(itertools.product(*map(range, window)))
    sizes = [
        size if n > 1 or any(pad) else 1
        for size, n, pad in zip(x.shape, window, padding, strict=True)
    ]
    inside = jnp.asarray(np.pad(np.ones(sizes, np.bool_), padding))
    numbers = _padded(x, padding, least(x.dtype))
    slopes = _padded(moved, padding, np.zeros((), moved.dtype))

    def at(array: jax.Array, offset: Any) -> jax.Array:
        """Return the element of each window at an offset from its start."""
        # Windows of 3 in steps of 2 over 7 numbers: there are 3 windows, and offset 1
        # is x[1:6:2], the second number of each of them.
        axes = zip(array.shape, output.shape, strides, offset, strict=True)
        starts, spans, steps = zip(
            *(
                (start, (count - 1) * stride + 1, stride) if size > 1 else (0, 1, 1)
                for size, count, stride, start in axes
            ),
            strict=True,
        )
        if isinstance(offset, tuple):
            ends = [start + span for start, span in zip(starts, spans, strict=True)]
            return jax.lax.slice(array, starts, ends, steps)
        begin = [jnp.asarray(start, jnp.int32) for start in starts]
        array = jax.lax.dynamic_slice(array, begin, spans)
        return jax.lax.slice(array, [0] * array.ndim, array.shape, steps)

    def look(
        best: tuple[jax.Array, jax.Array], number: Any, offset: Any
    ) -> tuple[jax.Array, jax.Array]:
        value, place = best
        new = at(numbers, offset)
        is_nan = (new != new) & (value == value)
        is_better = (place < 0) | (new > value) | is_nan
        takes = at(inside, offset) & is_better
        return jnp.where(takes, new, value), jnp.where(takes, number, place)

    def pick(total: jax.Array, number: Any, offset: Any) -> jax.Array:
        return jnp.where(place == number, at(slopes, offset), total)

    # Like the operands, so that they vary inside shard_map as those do.
    none = jnp.full_like(output, least(x.dtype)), jnp.full_like(output, -1, jnp.int32)
    _, place = _each(offsets, none, look)
    return output, _each(offsets, jnp.zeros_like(output, slopes.dtype), pick)


# Windows of more elements are looked through by a loop.
_MOST_UNROLLED = 32


def _each(
    offsets: list[tuple[int, ...]], carry: Any, step: Callable[[Any, Any, Any], Any]
) -> Any:
    """Return what is left after a step for each offset, with its number."""
    if len(offsets) <= _MOST_UNROLLED:
        for number, offset in enumerate(offsets):
            carry = step(carry, np.int32(number), offset)
        return carry
    numbers = np.arange(len(offsets), dtype=np.int32)
    table = np.array(offsets, np.int32)
    return jax.lax.scan(
        lambda carry, each: (step(carry, *each), None), carry, (numbers, table)
    )[0]


def _padded(
    x: jax.Array, padding: Sequence[tuple[int, int]], number: np.ndarray
) -> jax.Array:
    return jax.lax.pad(x, number, [(low, high, 0) for low, high in padding])


def avg_pool(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the average of each window, from sums in f32 (f64 for f64)."""
    assert isinstance(attributes, AvgPoolAttributes)
    if outputs["output"].is_empty:
        return _zeros("output", outputs)
    return {"output": _average(attributes, _widened(inputs["x"]))}


def avg_pool_backward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the gradient of x: each window's cotangent, shared out to its elements."""
    assert isinstance(attributes, AvgPoolAttributes)
    grad = _widened(inputs["grad_output"])
    tensor = outputs["grad_x"]
    if tensor.is_empty or grad.size == 0:
        return _zeros("grad_x", outputs)
    return {"grad_x": _shared_out(attributes, grad, tensor.dims[2:])}


def _shared_out(
    attributes: AvgPoolAttributes, grad: jax.Array, space: tuple[int, ...]
) -> jax.Array:
    """Return for each element the sum over its windows of cotangent over count.

    These are windows, too, over cotangents that lie as far apart as windows do.
    """
    grad = grad / _divisors(attributes, space, grad.dtype)
    padding: list[tuple[int, int, int]] = [(0, 0, 0), (0, 0, 0)]
    for i, size in enumerate(space):
        window, stride = attributes.window_shape[i], attributes.window_strides[i]
        low = window - 1 - attributes.padding_low[i]
        high = size + window - 1 - dilated(grad.shape[i + 2], stride) - low
        padding.append((low, high, stride - 1))
    spread = jax.lax.pad(grad, np.zeros((), grad.dtype), padding)
    return jax.lax.reduce_window(
        spread,
        np.zeros((), grad.dtype),
        jax.lax.add,
        (1, 1, *attributes.window_shape),
        (1,) * grad.ndim,
        "VALID",
    )


def elements_in_windows(
    size: int, window: int, *, stride: int, padding: tuple[int, int]
) -> np.ndarray:
    """Return how many elements of an axis are in each of its windows."""
    low, high = padding
    starts = np.arange(0, max(size + low + high - window + 1, 0), stride) - low
    first, end = np.maximum(starts, 0), np.minimum(starts + window, size)
    return np.maximum(end - first, 0)


def _average(attributes: AvgPoolAttributes, x: jax.Array) -> jax.Array:
    def sums_of(x: jax.Array, *windows: Any) -> jax.Array:
        zero = np.zeros((), x.dtype)
        return jax.lax.reduce_window(x, zero, jax.lax.add, *windows)

    sums = _over_windows(attributes, x, sums_of)
    return sums / _divisors(attributes, x.shape[2:], x.dtype)


def _divisors(
    attributes: AvgPoolAttributes, space: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Return by what the sum of each window is divided, as (1, 1, *z) or a number."""
    if attributes.count_include_pad:
        return np.asarray(math.prod(attributes.window_shape), dtype)
    return _counts(attributes, space).astype(dtype)


def _counts(attributes: AvgPoolAttributes, space: tuple[int, ...]) -> np.ndarray:
    """Return how many elements are in each window, as (1, 1, *z)."""
    pads = zip(attributes.padding_low, attributes.padding_high, strict=True)
    axes = [
        elements_in_windows(size, window, stride=stride, padding=pad)
        for size, window, stride, pad in zip(
            space,
            attributes.window_shape,
            attributes.window_strides,
            pads,
            strict=True,
        )
    ]
    return functools.reduce(np.multiply.outer, axes)[None, None]


def _over_windows(
    attributes: PoolAttributes, x: jax.Array, function: Callable[..., jax.Array]
) -> jax.Array:
    """Return a function of an array, and of window, strides and padding of all axes."""
    pads = zip(attributes.padding_low, attributes.padding_high, strict=True)
    x, padding = cut(x, [(0, 0), (0, 0), *pads])
    window = (1, 1, *attributes.window_shape)
    return function(x, window, (1, 1, *attributes.window_strides), tuple(padding))


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _zeros(role: str, outputs: Mapping[str, Tensor]) -> dict[str, jax.Array]:
    tensor = outputs[role]
    return {role: jnp.zeros(tensor.dims, DTYPES[tensor.dtype])}
