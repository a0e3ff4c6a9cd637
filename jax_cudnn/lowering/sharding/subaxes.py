# SPDX-License-Identifier: Apache-2.0
"""Arrays with more axes than their tensors: the subaxes of a split axis.

A graph's matrix has rows. The array that a user passes for it may have a batch and a
sequence instead, and the examples of a vmap are one more axis. Such arrays enter the
primitives unmerged. They are merged only where a kernel or the reference needs it,
because merging a sharded axis that is not the slowest would gather it.

The subaxes of a stored axis of a tensor are the sizes of the array's axes that make it
up. Axes that are the same in several tensors have the same subaxes. An axis of size 1
has itself as its only subaxis, and no other axis has a subaxis of size 1.

For example, an array (2, 7, 24) is multiplied by a matrix (24, 5). The graph's tensor
for the array has a batch of 1 and 14 rows, which are two axes of the array:

>>> a = Tensor(name="a", dtype="f32", dims=(1, 14, 24), order=(0, 1, 2))
>>> subaxes_of(a, (1, 2, 7, 24))
((1,), (2, 7), (24,))

The rows of the result have the same subaxes, so its array is (2, 7, 5).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import MAX_RANK, Graph, Tensor, axis_classes

Shape = tuple[int, ...]
# The subaxes of each stored axis of a tensor.
Subaxes = tuple[Shape, ...]


def subaxes_of(tensor: Tensor, shape: Shape) -> Subaxes | None:
    """Return the subaxes of a tensor's axes in an array of that shape.

    Subaxes of size 1 do not count. None where the array's axes do not make up those of
    the tensor one after the other, or where nothing is left to say which do.
    """
    if tensor.is_empty:
        return _whole(tensor)
    # A tensor stored as (1, 14, 24) has the subaxes ((1,), (2, 7), (24,)) in an array
    # (2, 7, 24). In an array (4, 7, 12) it has none: 4 is less than 14, and 4 * 7 is
    # more.
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


def _whole(tensor: Tensor) -> Subaxes:
    return tuple((dim,) for dim in tensor.stored_shape)


@functools.lru_cache(maxsize=4096)
def all_subaxes(graph: Graph, shapes: tuple[Shape, ...]) -> Mapping[str, Subaxes]:
    """Return the subaxes of all tensors' axes, given the shapes of the operands.

    Where two operands disagree about an axis, it has one subaxis, itself.
    """
    classes = axis_classes(graph)
    found: dict[int, Shape] = {}
    for tensor, shape in zip(graph.input_tensors, shapes, strict=True):
        own = subaxes_of(tensor, shape) or _whole(tensor)
        for axis, subaxes in zip(tensor.order, own, strict=True):
            number = classes[tensor.name, axis]
            if found.setdefault(number, subaxes) != subaxes:
                found[number] = (tensor.dims[axis],)
    return {
        tensor.name: tuple(
            found.get(classes[tensor.name, axis], (tensor.dims[axis],))
            for axis in tensor.order
        )
        for tensor in graph.tensors
    }


def flat(subaxes: Subaxes) -> Shape:
    """Return the shape of an array whose axes are the subaxes."""
    return tuple(size for each in subaxes for size in each)


def reshaped(x: jax.Array, shape: Shape) -> jax.Array:
    """Return an array in a shape, itself if it has that shape already."""
    # Tracing a reshape takes longer than looking.
    return x if x.shape == shape else jnp.reshape(x, shape)


def unmerged(graph: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return operands in the shapes in which the primitives take them."""
    subaxes = all_subaxes(graph, tuple(x.shape for x in operands))
    return [
        reshaped(x, flat(subaxes[name]))
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
    subaxes = all_subaxes(graph, tuple(shapes))
    return [flat(subaxes[name]) for name in graph.outputs]


def as_results(
    graph: Graph, operands: Sequence[jax.Array], results: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return results in the shapes in which the primitive gives them."""
    shapes = result_shapes(graph, [x.shape for x in operands])
    return [reshaped(x, s) for x, s in zip(results, shapes, strict=True)]


def spread(graph: Graph, shapes: Sequence[Shape]) -> Graph | None:
    """Return a graph without kernels whose tensors have an axis for each subaxis.

    Elementwise nodes and sums have any number of axes. None if that is too many.
    """
    # A bias (5,) that is added to an array (2, 7, 5): the tensors (1, 1, 5) and
    # (1, 14, 5) become (1, 1, 1, 5) and (1, 2, 7, 5). The bias gets an axis of size 1
    # for each subaxis of the rows.
    subaxes = all_subaxes(graph, tuple(shapes))
    counts = _subaxis_counts(graph, subaxes)

    def own(tensor: Tensor) -> Tensor | None:
        stored = dict(zip(tensor.order, subaxes[tensor.name], strict=True))
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


def _subaxis_counts(
    graph: Graph, subaxes: Mapping[str, Subaxes]
) -> dict[tuple[str, int], int]:
    """Return how many subaxes an axis has beside those that it meets in a node."""
    found = {
        (tensor.name, axis): len(own)
        for tensor in graph.tensors
        for axis, own in zip(tensor.order, subaxes[tensor.name], strict=True)
    }
    # Nodes run in order, but what an operand meets last may be what it has to fit.
    for nodes in (graph.nodes, graph.nodes[::-1]):
        for node in nodes:
            names = [name for _, name in (*node.inputs, *node.outputs)]
            for axis in range(len(graph.tensor(names[0]).dims)):
                most = max(found[name, axis] for name in names)
                found |= dict.fromkeys([(name, axis) for name in names], most)
    return found
