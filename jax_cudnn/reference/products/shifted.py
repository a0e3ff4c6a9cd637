# SPDX-License-Identifier: Apache-2.0
"""Convolutions as sums over taps, where XLA's own convolution is far slower.

Depthwise convolutions of few taps along one axis are sums of shifted products. XLA
computes such a sum in one pass over the array, or for the gradient of the filter in a
pass for every two taps. Its own convolution takes 10 to 20 times as long.

The gradient of a dilated filter is a matmul for each tap. XLA's own form of it is a
convolution by a window as large as the image, as no convolution of XLA's is the
gradient of a filter with holes.

Axes are the batch, the channels and then those of images.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph.products.conv import is_short_sum
from jax_cudnn.graph.windows import dilated

_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Which elements of an array meet the taps of a filter.

    The array is padded, with ``inner`` - 1 zeros between its elements. Tap t of output
    o meets element o * ``strides`` + t * ``dilation``.
    """

    taps: tuple[int, ...]
    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    inner: Sequence[int]
    dilation: Sequence[int]

    @property
    def has_holes(self) -> bool:
        """Whether there are holes between taps."""
        along = zip(self.taps, self.dilation, strict=True)
        return any(taps > 1 and hole > 1 for taps, hole in along)

    @property
    def is_symmetric(self) -> bool:
        """Whether the array is padded alike at both ends of every axis."""
        return all(low == high for low, high in self.padding)

    def padded(self, x: jax.Array, order: Sequence[int]) -> jax.Array:
        """Return the array as it is padded, its axes in the order."""
        padding = [(0, 0, 0)] * 2
        padding += [(*self.padding[i], self.inner[i] - 1) for i in range(x.ndim - 2)]
        return jax.lax.pad(
            jnp.transpose(x, order),
            jnp.zeros((), x.dtype),
            [padding[axis] for axis in order],
        )

    def sizes(self, dims: Sequence[int]) -> list[int]:
        """Return the sizes of images of the result."""
        padded = [
            dilated(size, self.inner[i]) + sum(self.padding[i])
            for i, size in enumerate(dims[2:])
        ]
        return [
            (size - dilated(self.taps[i], self.dilation[i])) // self.strides[i] + 1
            for i, size in enumerate(padded)
        ]


def applies(x: jax.Array, other: jax.Array, filters: Sequence[int]) -> bool:
    """Whether x with filters of these sizes is such a sum, and all are floats."""
    has_floats = all(str(each.dtype) in _FLOATS for each in (x, other))
    return has_floats and is_short_sum(x.shape, filters)


def convolved(
    x: jax.Array, w: jax.Array, windows: Windows, order: Sequence[int]
) -> jax.Array:
    """Return the sums, of which each channel has its own; ``order`` is the result's."""
    wide = _wide(x)
    shape = [1] * x.ndim
    shape[order.index(1)] = -1
    terms = (
        shifted.astype(wide) * w[(slice(None), 0, *tap)].astype(wide).reshape(shape)
        for tap, shifted in _shifted(x, windows, order)
    )
    sums = functools.reduce(jnp.add, terms)
    return jnp.transpose(sums, [order.index(axis) for axis in range(x.ndim)])


def filter_gradient(x: jax.Array, grad: jax.Array, windows: Windows) -> jax.Array:
    """Return the gradient of the filter.

    XLA keeps the arrays in the order in which they are stored.
    """
    wide, natural = _wide(x), range(x.ndim)
    others = tuple(axis for axis in natural if axis != 1)
    factor = grad.astype(wide)
    sums = [
        jnp.sum(shifted.astype(wide) * factor, axis=others)
        for _, shifted in _shifted(x, windows, natural)
    ]
    return jnp.stack(sums, axis=-1).reshape(x.shape[1], 1, *windows.taps)


def filter_gradient_by_matmuls(
    x: jax.Array, grad: jax.Array, windows: Windows, groups: int, **options: Any
) -> jax.Array:
    """Return the gradient of the filter, by a matmul for each tap and group.

    ``options`` are those of the matmuls.
    """
    factor = _in_groups(grad, groups)
    summed = (0, *range(3, factor.ndim))
    products = [
        jax.lax.dot_general(
            factor, _in_groups(shifted, groups), ((summed, summed), ((1,), (1,))),
            **options,
        )
        for _, shifted in _shifted(x, windows, range(x.ndim))
    ]  # fmt: skip
    stacked = jnp.stack(products, axis=-1)
    return stacked.reshape(grad.shape[1], x.shape[1] // groups, *windows.taps)


def _in_groups(x: jax.Array, groups: int) -> jax.Array:
    """Split the channels of an array by groups, which come first."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def _wide(x: jax.Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _shifted(
    x: jax.Array, windows: Windows, order: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Yield each tap and what it meets, in an array whose axes are in the order."""
    padded = windows.padded(x, order)
    sizes = windows.sizes(x.shape)
    for tap in itertools.product(*map(range, windows.taps)):
        slices = [slice(None)] * 2
        for i, number in enumerate(tap):
            first, step = number * windows.dilation[i], windows.strides[i]
            slices.append(slice(first, first + (sizes[i] - 1) * step + 1, step))
        yield tap, padded[tuple(slices[axis] for axis in order)]
