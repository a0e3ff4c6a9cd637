# SPDX-License-Identifier: Apache-2.0
"""Maps the axes of a function's arrays to the axes of a kernel's tensors.

A matmul's result has a batch, rows and columns, and the function's array may have any
number of axes for each of them. A convolution's has its axes in the function's layout.
Reshapes and transposes that keep the axes of each group side by side move nothing: the
tensor is then stored in another order, or its axes are divided otherwise.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.ops.common.fusion import Operand, in_groups

Shape = tuple[int, ...]


class View(NamedTuple):
    """An array's sizes in groups, and which axis of the tensor each group is."""

    groups: tuple[Shape, ...]
    order: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        """The array's shape."""
        return tuple(size for group in self.groups for size in group)

    @property
    def stored_shape(self) -> Shape:
        """The shape that the tensor is stored in."""
        return tuple(map(math.prod, self.groups))

    def transposed(self, axes: Sequence[int]) -> "View | None":
        """Return the view of the transposed array; None if groups do not stay whole."""
        owners = [i for i, group in enumerate(self.groups) for _ in group]
        shape = tuple(self.shape[axis] for axis in axes)
        moved = [axis for axis in axes if self.shape[axis] != 1]
        inner = [[axis for axis in moved if owners[axis] == i] for i in set(owners)]
        if any(axes != sorted(axes) for axes in inner):
            return None
        return self._grouped(shape, [owners[axis] for axis in moved])

    def reshaped(self, shape: Shape) -> "View | None":
        """Return the view of the reshaped array; None if an axis is in two groups."""
        if 0 in shape:
            return self if shape == self.shape else None
        sizes = [size for size in shape if size != 1]
        owners: list[int] = []
        for i, whole in enumerate(self.stored_shape):
            taken = 1
            while taken < whole and len(owners) < len(sizes):
                taken *= sizes[len(owners)]
                owners.append(i)
            if taken != whole:
                return None
        return self._grouped(shape, owners)

    def _grouped(self, shape: Shape, owners: list[int]) -> "View | None":
        """Return the view of a shape, given the group of each size other than 1."""
        present = list(dict.fromkeys(owners))
        # The sizes of one group have to lie side by side.
        if sorted(owners, key=present.index) != owners:
            return None
        # Groups of one element are stored anywhere.
        groups = [*(i for i in range(len(self.groups)) if i not in present), *present]
        sizes: dict[int, list[int]] = {i: [] for i in groups}
        remaining = iter(owners)
        current = groups[0]
        for size in shape:
            current = current if size == 1 else next(remaining)
            sizes[current].append(size)
        return View(
            tuple(tuple(sizes[i]) for i in groups),
            tuple(self.order[i] for i in groups),
        )

    def reduced(self, axes: Sequence[int]) -> "View | None":
        """Return the view without axes of the array; None if a group loses some only.

        Axes of one element may go from any group.
        """
        groups: list[Shape] = []
        first = 0
        for group in self.groups:
            places = range(first, first + len(group))
            first += len(group)
            kept = tuple(
                size for i, size in zip(places, group, strict=True) if i not in axes
            )
            if math.prod(kept) not in (1, math.prod(group)):
                return None
            groups.append(kept)
        return View(tuple(groups), self.order)

    def operand(self, array: jax.Array) -> Operand:
        """Return an array of the view's rank that broadcasts to it as an operand."""
        return in_groups(array, self.groups, self.order)

    def array(self, stored: jax.Array, order: tuple[int, ...]) -> jax.Array:
        """Return the array of a tensor that is stored in an order."""
        if order != self.order:
            sizes = dict(zip(self.order, self.stored_shape, strict=True))
            stored = jnp.reshape(stored, [sizes[axis] for axis in order])
            stored = jnp.transpose(stored, [order.index(axis) for axis in self.order])
        return jnp.reshape(stored, self.shape)
