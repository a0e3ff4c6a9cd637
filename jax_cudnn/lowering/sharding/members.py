# SPDX-License-Identifier: Apache-2.0
"""Arrays with more axes than their tensors: the members of an axis, unmerged.

A graph's matrix has rows. The array that a user gives for it may have a batch and a
sequence instead, and the examples of a vmap are one more axis. Such arrays enter the
primitives as they are, and are merged only where a kernel or the reference needs it:
merging a sharded axis that is not the slowest would gather it.

The sizes of the array's axes that make up one axis of a tensor, as it is stored, are
the axis's members. Axes that are the same in several tensors have the same members. An
axis of size 1 has itself as its only member, and no other axis has a member of size 1.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import MAX_RANK, Graph, Tensor, axis_classes

Shape = tuple[int, ...]
# The members of each stored axis of a tensor.
Members = tuple[Shape, ...]


def members_of(tensor: Tensor, shape: Shape) -> Members | None:
    """Return the members of a tensor's axes in an array of that shape.

    Members of size 1 do not count. None where the array's axes do not make up those of
    the tensor one after the other, or where nothing is left to say which do.
    """
    if tensor.is_empty:
        return _whole(tensor)
    remaining = iter([size for size in shape if size != 1])
    found: list[Shape] = []
    for dim in tensor.stored_shape:
        own: list[int] = []
        while math.prod(own) < dim:
            if (size := next(remaining, None)) is None:
                return None
            own.append(size)
        if math.prod(own) != dim:
            return None
        found.append(tuple(own) or (1,))
    return tuple(found) if next(remaining, None) is None else None


def _whole(tensor: Tensor) -> Members:
    return tuple((dim,) for dim in tensor.stored_shape)


@functools.lru_cache(maxsize=4096)
def all_members(graph: Graph, shapes: tuple[Shape, ...]) -> Mapping[str, Members]:
    """Return the members of all tensors' axes, given the shapes of the operands.

    Where two operands disagree about an axis, it has one member, itself.
    """
    classes = axis_classes(graph)
    found: dict[int, Shape] = {}
    for tensor, shape in zip(graph.input_tensors, shapes, strict=True):
        own = members_of(tensor, shape) or _whole(tensor)
        for axis, members in zip(tensor.order, own, strict=True):
            number = classes[tensor.name, axis]
            if found.setdefault(number, members) != members:
                found[number] = (tensor.dims[axis],)
    return {
        tensor.name: tuple(
            found.get(classes[tensor.name, axis], (tensor.dims[axis],))
            for axis in tensor.order
        )
        for tensor in graph.tensors
    }


def flat(members: Members) -> Shape:
    """Return the shape of an array whose axes are the members."""
    return tuple(size for each in members for size in each)


def reshaped(x: jax.Array, shape: Shape) -> jax.Array:
    """Return an array in a shape, itself if it has that shape already."""
    # Tracing a reshape takes longer than looking.
    return x if x.shape == shape else jnp.reshape(x, shape)


def unmerged(graph: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return operands in the shapes in which the primitives take them."""
    members = all_members(graph, tuple(x.shape for x in operands))
    return [
        reshaped(x, flat(members[name]))
        for name, x in zip(graph.inputs, operands, strict=True)
    ]


def merged(graph: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return operands in the stored shapes of their tensors."""
    return [
        reshaped(x, tensor.stored_shape)
        for tensor, x in zip(graph.input_tensors, operands, strict=True)
    ]


def result_shapes(graph: Graph, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of the primitive's results, given those of its operands."""
    members = all_members(graph, tuple(shapes))
    return [flat(members[name]) for name in graph.outputs]


def as_results(
    graph: Graph, operands: Sequence[jax.Array], results: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return results in the shapes in which the primitive gives them."""
    shapes = result_shapes(graph, [x.shape for x in operands])
    return [reshaped(x, s) for x, s in zip(results, shapes, strict=True)]


def spread(graph: Graph, shapes: Sequence[Shape]) -> Graph | None:
    """Return a graph without kernels whose tensors have an axis for each member.

    Elementwise nodes and sums have any number of axes. None if that is too many.
    """
    members = all_members(graph, tuple(shapes))
    counts = _member_counts(graph, members)

    def own(tensor: Tensor) -> Tensor | None:
        stored = dict(zip(tensor.order, members[tensor.name], strict=True))
        by_axis = [
            (1,) * counts[tensor.name, axis] if dim == 1 else stored[axis]
            for axis, dim in enumerate(tensor.dims)
        ]
        starts = [sum(map(len, by_axis[:axis])) for axis in range(len(by_axis))]
        dims = flat(tuple(by_axis))
        if len(dims) > MAX_RANK:
            return None
        order = tuple(
            starts[axis] + i for axis in tensor.order for i in range(len(by_axis[axis]))
        )
        return replace(tensor, dims=dims, order=order)

    tensors = [own(tensor) for tensor in graph.tensors]
    if any(tensor is None for tensor in tensors):
        return None
    return replace(graph, tensors=tuple(t for t in tensors if t is not None))


def _member_counts(
    graph: Graph, members: Mapping[str, Members]
) -> dict[tuple[str, int], int]:
    """Return how many members an axis has beside those that it meets in a node."""
    found = {
        (tensor.name, axis): len(own)
        for tensor in graph.tensors
        for axis, own in zip(tensor.order, members[tensor.name], strict=True)
    }
    # Nodes run in order, but what an operand meets last may be what it has to fit.
    for nodes in (graph.nodes, graph.nodes[::-1]):
        for node in nodes:
            names = [name for _, name in (*node.inputs, *node.outputs)]
            for axis in range(len(graph.tensor(names[0]).dims)):
                most = max(found[name, axis] for name in names)
                found |= dict.fromkeys([(name, axis) for name in names], most)
    return found
