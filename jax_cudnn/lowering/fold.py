# SPDX-License-Identifier: Apache-2.0
"""vmap of a graph: folds the examples into dimension 0 of its tensors.

The node kinds say which tensors take part (graph/kinds.py, FoldRule); here is what
that means for arrays.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Tensor, kind_named
from jax_cudnn.graph.kinds import FoldRule, roles_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """A graph over `count` examples at once, and how arrays enter and leave it."""

    original: Graph
    graph: Graph
    count: int
    rule: FoldRule

    def input(self, index: int, x: jax.Array, axis: int | None) -> jax.Array:
        """Return the operand for the folded graph; `axis` holds the examples."""
        name = self.original.inputs[index]
        if self.rule.inputs[_role_of(self.original, name)] == "keep":
            return x
        return self.fold_array(self.original.tensor(name), x, axis)

    def fold_array(self, tensor: Tensor, x: jax.Array, axis: int | None) -> jax.Array:
        """Merge the example axis into the stored place of dimension 0."""
        batch = self.rule.batch
        place = tensor.order.index(0)
        shared = axis is None
        x = jnp.expand_dims(x, place) if shared else jnp.moveaxis(x, axis, place)
        shape = list(x.shape)
        shape[place], shape[place + 1] = self.count, batch
        x = jnp.broadcast_to(x, shape)
        return jnp.reshape(x, (*shape[:place], self.count * batch, *shape[place + 2 :]))

    def output(self, index: int, x: jax.Array) -> jax.Array:
        """Return a result of the folded graph with the examples as axis 0."""
        name = self.original.outputs[index]
        tensor = self.original.tensor(name)
        place = tensor.order.index(0)
        shape = x.shape
        x = jnp.reshape(
            x, (*shape[:place], self.count, self.rule.batch, *shape[place + 1 :])
        )
        if self.rule.outputs[_role_of(self.original, name)] == "sum":
            # jnp.sum accumulates 16-bit floats in f32.
            x = jnp.sum(x, axis=place + 1, keepdims=True)
        return jnp.moveaxis(x, place, 0)


def fold_graph(graph: Graph, count: int, is_batched: tuple[bool, ...]) -> Fold:
    """Return the graph that runs `count` examples, given which inputs have them."""
    node = graph.sole_node()
    if node is None:
        raise NotImplementedError("vmap of a graph with several nodes")
    roles = roles_of(node, {t.name: t for t in graph.tensors})
    batched = frozenset(
        _role_of(graph, name)
        for name, is_in in zip(graph.inputs, is_batched, strict=True)
        if is_in
    )
    rule = kind_named(node.kind).fold(roles, batched)
    folded = Graph(
        tensors=tuple(
            _folded_tensor(t, _role_of(graph, t.name), rule, count)
            for t in graph.tensors
        ),
        nodes=graph.nodes,
        inputs=graph.inputs,
        outputs=graph.outputs,
    )
    return Fold(original=graph, graph=folded, count=count, rule=rule)


def _folded_tensor(tensor: Tensor, role: str, rule: FoldRule, count: int) -> Tensor:
    if rule.inputs.get(role) == "keep":
        return tensor
    return replace(tensor, dims=(count * rule.batch, *tensor.dims[1:]))


def _role_of(graph: Graph, name: str) -> str:
    (node,) = graph.nodes
    return next(r for r, n in (*node.inputs, *node.outputs) if n == name)
