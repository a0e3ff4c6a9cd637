# SPDX-License-Identifier: Apache-2.0
"""vmap of a graph: folds the examples into axes of its tensors.

The node kinds say which axes (graph/folding.py); here is what that means for
arrays.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import FoldRule, Graph, Tensor, fold_rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """A graph over `count` examples at once, and how arrays enter and leave it."""

    original: Graph
    graph: Graph
    count: int
    rule: FoldRule

    def part(self, graph: Graph) -> Graph:
        """Return a graph that is part of the original one, folded alike."""
        return replace(
            graph,
            tensors=tuple(
                _folded_tensor(t, self.rule, self.count) for t in graph.tensors
            ),
        )

    def input(self, index: int, x: jax.Array, axis: int | None) -> jax.Array:
        """Return the operand for the folded graph; `axis` holds the examples."""
        tensor = self.original.input_tensors[index]
        return self.fold_array(tensor, tensor.name, x, axis)

    def fold_array(
        self, tensor: Tensor, name: str, x: jax.Array, axis: int | None
    ) -> jax.Array:
        """Merge the example axis into the axis where the tensor `name` folds."""
        if name not in self.rule.axes:
            assert axis is None, f"{name} has examples but is shared"
            return x
        size = self.rule.sizes[name]
        place = tensor.order.index(self.rule.axes[name])
        x = jnp.expand_dims(x, place) if axis is None else jnp.moveaxis(x, axis, place)
        shape = list(x.shape)
        shape[place], shape[place + 1] = self.count, size
        x = jnp.broadcast_to(x, shape)
        return jnp.reshape(x, (*shape[:place], self.count * size, *shape[place + 2 :]))

    def output(self, index: int, x: jax.Array) -> jax.Array:
        """Return a result of the folded graph with the examples as axis 0."""
        tensor = self.original.output_tensors[index]
        place = tensor.order.index(self.rule.axes[tensor.name])
        shape = x.shape
        size = self.rule.sizes[tensor.name]
        x = jnp.reshape(x, (*shape[:place], self.count, size, *shape[place + 1 :]))
        if tensor.name in self.rule.sums:
            # jnp.sum accumulates 16-bit floats in f32.
            x = jnp.sum(x, axis=place + 1, keepdims=True)
        elif tensor.stored_shape[place] != size:
            x = jax.lax.slice_in_dim(x, 0, 1, axis=place + 1)
        return jnp.moveaxis(x, place, 0)


def fold_graph(graph: Graph, count: int, is_batched: tuple[bool, ...]) -> Fold | None:
    """Return the graph that runs `count` examples, given which inputs have them.

    None where the graph does not fold.
    """
    batched = frozenset(
        name for name, is_in in zip(graph.inputs, is_batched, strict=True) if is_in
    )
    rule = fold_rule(graph, batched)
    if rule is None:
        return None
    fold = Fold(original=graph, graph=graph, count=count, rule=rule)
    return replace(fold, graph=fold.part(graph))


def _folded_tensor(tensor: Tensor, rule: FoldRule, count: int) -> Tensor:
    if tensor.name not in rule.axes:
        return tensor
    axis = rule.axes[tensor.name]
    dims = list(tensor.dims)
    dims[axis] = count * rule.sizes[tensor.name]
    return replace(tensor, dims=tuple(dims))
