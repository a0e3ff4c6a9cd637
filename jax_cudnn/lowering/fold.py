# SPDX-License-Identifier: Apache-2.0
"""vmap of a graph: folds the examples into axes of its tensors.

The node kinds say which axes (graph/transforms/folding.py); here is what that means for
arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import FoldRule, Graph, Tensor, fold_rule
from jax_cudnn.lowering.sharding.subaxes import Shape, Subaxes, all_subaxes, flat


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """A graph over `count` examples at once, and how arrays enter and leave it.

    ``subaxes`` are those of the tensors of the original graph (subaxes.py). The
    examples become the first subaxis of the axis that they fold into.
    """

    original: Graph
    graph: Graph
    count: int
    rule: FoldRule
    subaxes: Mapping[str, Subaxes]

    def part(self, graph: Graph) -> Graph:
        """Return a graph that is part of the original one, folded alike."""
        nodes = graph.nodes
        if self.count > 1:
            nodes = tuple(
                replace(node, attributes=node.attributes.folded(self.rule.letter))
                for node in nodes
            )
        return replace(
            graph,
            tensors=tuple(
                _folded_tensor(t, self.rule, self.count) for t in graph.tensors
            ),
            nodes=nodes,
        )

    def input(self, index: int, x: jax.Array, axis: int | None) -> jax.Array:
        """Return the operand for the folded graph; `axis` holds the examples."""
        return self.fold_array(self.original.input_tensors[index], x, axis)

    def fold_array(self, tensor: Tensor, x: jax.Array, axis: int | None) -> jax.Array:
        """Put the examples into the axis where a tensor folds, as its first subaxis."""
        if tensor.name not in self.rule.axes:
            assert axis is None, f"{tensor.name} has examples but is shared"
            return x
        # An array (1, 2, 7, 24) has 14 rows with subaxes (2, 7). Three examples fold
        # into 42 rows: (3, 1, 2, 7, 24) -> (1, 3, 2, 7, 24). The bias that is added to
        # these rows is broadcast to all of them: (3, 1, 1, 5) -> (1, 3, 2, 7, 5).
        before, own, after = self._split(tensor)
        place = len(before)
        x = jnp.expand_dims(x, place) if axis is None else jnp.moveaxis(x, axis, place)
        full = self._full(tensor)
        if own == (1,):
            x = jnp.reshape(x, (*x.shape[: place + 1], *(1 for _ in full), *after))
        x = jnp.broadcast_to(x, (*before, self.count, *full, *after))
        folded = _without_singletons((self.count, *full))
        return jnp.reshape(x, (*before, *folded, *after))

    def output(self, index: int, x: jax.Array) -> jax.Array:
        """Return a result of the folded graph with the examples as axis 0."""
        tensor = self.original.output_tensors[index]
        before, own, after = self._split(tensor)
        full = self._full(tensor)
        x = jnp.reshape(x, (*before, self.count, *full, *after))
        first = len(before) + 1
        if tensor.name in self.rule.sums:
            # jnp.sum accumulates 16-bit floats in f32.
            x = jnp.sum(x, axis=tuple(range(first, first + len(full))))
        elif own != full:
            for _ in full:
                x = jax.lax.index_in_dim(x, 0, first, keepdims=False)
        x = jnp.reshape(x, (*before, self.count, *own, *after))
        return jnp.moveaxis(x, len(before), 0)

    def _split(self, tensor: Tensor) -> tuple[Shape, Shape, Shape]:
        """Return the subaxes before, in and after the axis where a tensor folds."""
        subaxes = self.subaxes[tensor.name]
        place = tensor.order.index(self.rule.axes[tensor.name])
        return flat(subaxes[:place]), subaxes[place], flat(subaxes[place + 1 :])

    def _full(self, tensor: Tensor) -> Shape:
        """Return the subaxes of that axis after it is broadcast to what it meets."""
        # For a bias (1, 1, 5) that is added to 14 rows with subaxes (2, 7), return
        # (2, 7).
        size = self.rule.sizes[tensor.name]
        for each in (tensor, *self.original.tensors):
            if each.name in self.rule.axes:
                axis = self.rule.axes[each.name]
                if each.dims[axis] == size:
                    return self.subaxes[each.name][each.order.index(axis)]
        return (size,)


def fold_graph(
    graph: Graph,
    count: int,
    is_batched: tuple[bool, ...],
    shapes: tuple[Shape, ...] | None = None,
) -> Fold | None:
    """Return the graph that runs `count` examples, given which inputs have them.

    `shapes` are those of one example's operands, by default as their tensors are
    stored. None where the graph does not fold.
    """
    batched = frozenset(
        name for name, is_in in zip(graph.inputs, is_batched, strict=True) if is_in
    )
    rule = fold_rule(graph, batched)
    if rule is None:
        return None
    if shapes is None:
        shapes = tuple(tensor.stored_shape for tensor in graph.input_tensors)
    fold = Fold(
        original=graph,
        graph=graph,
        count=count,
        rule=rule,
        subaxes=all_subaxes(graph, shapes),
    )
    return replace(fold, graph=fold.part(graph))


def _without_singletons(subaxes: Shape) -> Shape:
    return tuple(size for size in subaxes if size != 1) or (1,)


def _folded_tensor(tensor: Tensor, rule: FoldRule, count: int) -> Tensor:
    if tensor.name not in rule.axes:
        return tensor
    axis = rule.axes[tensor.name]
    dims = list(tensor.dims)
    dims[axis] = count * rule.sizes[tensor.name]
    return replace(tensor, dims=tuple(dims))
