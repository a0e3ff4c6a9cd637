# SPDX-License-Identifier: Apache-2.0
"""Finds which axes of a graph's tensors are the same axis.

The letters of its nodes say so. An axis of size 1 is not the same as a larger one with
its letter: it is broadcast, or what a sum leaves.
"""

import functools
import math
from collections.abc import Hashable, Mapping

from jax_cudnn.graph.kinds import roles_in, row_of
from jax_cudnn.graph.shapes import check_tensors, letters_of
from jax_cudnn.graph.spec import Graph

# A tensor's name, and one of its logical axes.
Axis = tuple[str, int]


@functools.lru_cache(maxsize=4096)
def axis_classes(graph: Graph, *, with_ones: bool = False) -> Mapping[Axis, int]:
    """Return a number for each axis of each tensor: equal for axes that are the same.

    Such axes have equal sizes. Each axis of size 1 is one of its own. ``with_ones``,
    they are the same as others whose letters have that size.
    """
    joined = _Union()
    for i, node in enumerate(graph.nodes):
        row = row_of(node)
        roles = roles_in(graph, node)
        sizes = check_tensors(row, roles, node.attributes)
        for role, tensor in roles.items():
            for axis, letters in enumerate(letters_of(row, role, roles)):
                size = math.prod(sizes[letter] for letter in letters)
                if letters and tensor.dims[axis] == size and (with_ones or size != 1):
                    joined.join((tensor.name, axis), (i, letters))
    axes = [(t.name, axis) for t in graph.tensors for axis in range(len(t.dims))]
    numbers: dict[Hashable, int] = {}
    return {axis: numbers.setdefault(joined.root(axis), len(numbers)) for axis in axes}


class _Union:
    """Sets that are merged by naming a member of each."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def root(self, member: Hashable) -> Hashable:
        while (above := self._above.get(member)) is not None:
            member = above
        return member

    def join(self, one: Hashable, other: Hashable) -> None:
        roots = self.root(one), self.root(other)
        if roots[0] != roots[1]:
            self._above[roots[0]] = roots[1]
