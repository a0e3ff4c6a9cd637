# SPDX-License-Identifier: Apache-2.0
"""Editing a graph of several nodes: its tensors by name, with array steps around it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Node, Tensor
from jax_cudnn.legalize.rules import Legal

Env = dict[str, jax.Array]

# Elements in the 16 bytes that the fused engines load at once.
ELEMENTS_PER_LOAD = {
    "f64": 2,
    "f32": 4,
    "bf16": 8,
    "f16": 8,
    **dict.fromkeys(("i8", "u8", "f8_e4m3fn", "f8_e5m2"), 16),
}


@dataclass(slots=True)
class Edit:
    """A graph while it is being edited; tensors keep their names.

    ``before`` steps edit the operands in order, ``after`` steps the results, the last
    added first.
    """

    tensors: dict[str, Tensor]
    nodes: list[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    before: list[Callable[[Env], None]] = field(default_factory=lambda: [])
    after: list[Callable[[Env], None]] = field(default_factory=lambda: [])
    notes: list[str] = field(default_factory=lambda: [])

    @classmethod
    def of(cls, graph: Graph) -> "Edit":
        """Start from a graph, nothing edited yet."""
        return cls(
            tensors={t.name: t for t in graph.tensors},
            nodes=list(graph.nodes),
            inputs=graph.inputs,
            outputs=graph.outputs,
        )

    def rearrange(
        self,
        name: str,
        tensor: Tensor,
        into: Callable[[jax.Array], jax.Array],
        back: Callable[[jax.Array], jax.Array],
    ) -> None:
        """Replace a tensor; `into` makes its array of the old one, `back` undoes it."""
        self.tensors[name] = replace(tensor, name=name)
        if name in self.inputs:
            self.before.append(lambda env: env.update({name: into(env[name])}))
        elif name in self.outputs:
            self.after.append(lambda env: env.update({name: back(env[name])}))

    def pad(self, name: str, sizes: dict[int, int]) -> None:
        """Pad axes of a tensor with zeros to new sizes; a result is cut back."""
        tensor = self.tensors[name]
        dims = tuple(sizes.get(axis, size) for axis, size in enumerate(tensor.dims))
        extra = [(0, dims[axis] - tensor.dims[axis], 0) for axis in tensor.order]
        shape = tensor.stored_shape
        self.rearrange(
            name,
            replace(tensor, dims=dims),
            lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), extra),
            lambda x: jax.lax.slice(x, (0,) * x.ndim, shape),
        )

    def expand(self, name: str, dims: tuple[int, ...]) -> None:
        """Broadcast an operand to larger dims before the kernel."""
        tensor = self.tensors[name]
        full = replace(tensor, dims=dims)
        self.rearrange(
            name,
            full,
            lambda x: jnp.broadcast_to(x, full.stored_shape),
            lambda x: x,
        )

    def replace_node(self, old: Node, new: Node) -> None:
        """Put one node in the place of another."""
        self.nodes[self.nodes.index(old)] = new

    def finish(self) -> Legal:
        """Return the edited graph, with the steps around it in their order."""
        graph = Graph(
            tensors=tuple(self.tensors.values()),
            nodes=tuple(self.nodes),
            inputs=self.inputs,
            outputs=self.outputs,
        )
        first, last = tuple(self.before), tuple(reversed(self.after))

        def before(operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            env = dict(zip(graph.inputs, operands, strict=True))
            for step in first:
                step(env)
            return tuple(env[name] for name in graph.inputs)

        def after(
            _: Sequence[jax.Array], results: Sequence[jax.Array]
        ) -> tuple[jax.Array, ...]:
            env = dict(zip(graph.outputs, results, strict=True))
            for step in last:
                step(env)
            return tuple(env[name] for name in graph.outputs)

        return Legal(
            graph=graph,
            before=before,
            after=after,
            notes=tuple(self.notes),
        )


def constants(edit: Edit) -> set[str]:
    """Return the names of the constants, whose dims stay 1."""
    makers = (node for node in edit.nodes if node.kind == "constant")
    return {name for node in makers for _, name in node.outputs}
