# SPDX-License-Identifier: Apache-2.0
"""Edits a graph, with work on its arrays before and after the kernel."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import (
    Attributes,
    DTypeName,
    Graph,
    Node,
    Target,
    Tensor,
    is_anchor,
)
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.walks import made_by
from jax_cudnn.legalize.common.legalization import (
    After,
    Arrays,
    Before,
    FastPath,
    Rewrite,
)
from jax_cudnn.reference.dtypes import jax_dtype

# Arrays by the names of their tensors.
Env = dict[str, jax.Array]
_BeforeStep = Callable[[Env], None]
_AfterStep = Callable[[Env, Env], None]


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def by_role(graph: Graph, operands: Sequence[jax.Array]) -> Env:
    """Return the operands of a graph of one node by their roles."""
    (node,) = graph.nodes
    role_of = {name: role for role, name in node.inputs}
    return {role_of[name]: x for name, x in zip(graph.inputs, operands, strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowPath:
    """A further first and last step, for operands of which ``is_needed`` is true.

    ``before`` edits the original operands. ``after`` gets the original operands and the
    results, which it edits.
    """

    is_needed: Callable[[Env], jax.Array]
    after: _AfterStep
    before: _BeforeStep | None = None


@dataclass(slots=True)
class GraphEditor:
    """A graph while it is edited; its tensors keep their names.

    ``before`` steps edit the operands, in order. ``after`` steps edit the results, the
    last added first, and get the original operands as well. ``slow_path`` adds a step
    before and after all of these. ``operands`` and ``results`` are what the original
    graph takes and gives. ``target`` is the GPU that it is for; None where that is not
    known, or does not matter.
    """

    tensors: dict[str, Tensor]
    nodes: list[Node]
    inputs: list[str]
    outputs: list[str]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    before: list[_BeforeStep] = field(default_factory=lambda: [])
    after: list[_AfterStep] = field(default_factory=lambda: [])
    slow_path: SlowPath | None = None
    notes: list[str] = field(default_factory=lambda: [])
    target: Target | None = None

    @classmethod
    def of(cls, graph: Graph) -> "GraphEditor":
        """Start from a graph, nothing edited yet."""
        return cls(
            tensors={tensor.name: tensor for tensor in graph.tensors},
            nodes=list(graph.nodes),
            inputs=list(graph.inputs),
            outputs=list(graph.outputs),
            operands=graph.inputs,
            results=graph.outputs,
        )

    @classmethod
    def by_role(cls, graph: Graph, target: Target | None = None) -> "GraphEditor":
        """Start from a graph of one node; its tensors are named and sorted by role."""
        (node,) = graph.nodes
        roles = roles_in(graph, node)
        role_of = {name: role for role, name in (*node.inputs, *node.outputs)}
        inputs, outputs = ([r for r, _ in x] for x in (node.inputs, node.outputs))
        named = Node.make(
            node.kind,
            {role: role for role in inputs},
            {role: role for role in outputs},
            node.attributes,
        )
        return cls(
            tensors={role: replace(x, name=role) for role, x in roles.items()},
            nodes=[named],
            inputs=inputs,
            outputs=outputs,
            operands=tuple(role_of[name] for name in graph.inputs),
            results=tuple(role_of[name] for name in graph.outputs),
            target=target,
        )

    # --- the graph --------------------------------------------------------------------

    @property
    def main(self) -> Node:
        """The node that cuDNN is there for; the others surround it."""
        return next(node for node in self.nodes if is_anchor(node))

    @property
    def roles(self) -> dict[str, str]:
        """The names of the main node's tensors, by role."""
        return dict((*self.main.inputs, *self.main.outputs))

    @property
    def constants(self) -> set[str]:
        """The names of the constants, whose dims stay 1."""
        return made_by(node for node in self.nodes if node.kind == "constant")

    @property
    def graph(self) -> Graph:
        """The graph as it is now."""
        return Graph(
            tensors=tuple(self.tensors.values()),
            nodes=tuple(self.nodes),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
        )

    def replace_main(self, new: Node) -> None:
        """Put a node in the place of the main one."""
        self.nodes[self.nodes.index(self.main)] = new

    def set_attributes(self, attributes: Attributes) -> None:
        """Give the main node other attributes."""
        self.replace_main(replace(self.main, attributes=attributes))

    def put_operand(self, tensor: Tensor) -> None:
        """Give the main node an operand, in the role that its name is."""
        name = tensor.name
        self.tensors[name] = tensor
        if name not in self.inputs:
            self.inputs.append(name)
            inputs = tuple(sorted((*self.main.inputs, (name, name))))
            self.replace_main(replace(self.main, inputs=inputs))

    def put_result(self, tensor: Tensor) -> None:
        """Have the main node give a result, in the role that its name is."""
        name = tensor.name
        self.tensors[name] = tensor
        self.outputs.append(name)
        outputs = tuple(sorted((*self.main.outputs, (name, name))))
        self.replace_main(replace(self.main, outputs=outputs))

    def drop(self, name: str) -> Tensor:
        """Take an operand or result of the main node out of the graph; return it."""
        for names in (self.inputs, self.outputs):
            if name in names:
                names.remove(name)
        node = self.main
        inputs, outputs = (
            tuple((role, each) for role, each in pairs if each != name)
            for pairs in (node.inputs, node.outputs)
        )
        self.replace_main(replace(node, inputs=inputs, outputs=outputs))
        return self.tensors.pop(name)

    # --- tensors with their arrays ----------------------------------------------------

    def rearrange(
        self,
        name: str,
        tensor: Tensor,
        into: Callable[[jax.Array], jax.Array] = _as_it_is,
        back: Callable[[jax.Array], jax.Array] = _as_it_is,
    ) -> None:
        """Replace a tensor; `into` makes its array of the old one, `back` undoes it."""
        self.tensors[name] = replace(tensor, name=name)
        if name in self.inputs:
            self.before.append(lambda env: env.update({name: into(env[name])}))
        elif name in self.outputs:
            self.after.append(lambda _, env: env.update({name: back(env[name])}))

    def reorder(self, name: str, order: tuple[int, ...]) -> None:
        """Store the axes of a tensor in another order."""
        tensor = self.tensors[name]
        into = tuple(tensor.order.index(axis) for axis in order)
        back = tuple(order.index(axis) for axis in tensor.order)
        self.rearrange(
            name,
            replace(tensor, order=order),
            lambda x: jnp.transpose(x, into),
            lambda x: jnp.transpose(x, back),
        )

    def pad(self, name: str, sizes: dict[int, int], *, groups: int = 1) -> None:
        """Pad axes of a tensor with zeros to new sizes; a result is cut back.

        Axes are of several ``groups``, each of which is padded.
        """
        tensor = self.tensors[name]
        dims = tuple(sizes.get(axis, size) for axis, size in enumerate(tensor.dims))
        padded = replace(tensor, dims=dims)

        def split(stored: Tensor) -> tuple[int, ...]:
            """Return a shape in which groups have an axis of their own."""
            pairs = (
                (groups, size // groups) if axis in sizes and groups > 1 else (size,)
                for axis, size in zip(stored.order, stored.stored_shape, strict=True)
            )
            return tuple(itertools.chain(*pairs))

        # 6 channels of 2 groups, padded to 16: (2, 3) -> (2, 8). Each group has 5 zeros
        # after its own channels.
        old, new = split(tensor), split(padded)
        extra = [(0, to - size, 0) for size, to in zip(old, new, strict=True)]

        def into(x: jax.Array) -> jax.Array:
            x = x if groups == 1 else x.reshape(old)
            x = jax.lax.pad(x, jnp.zeros((), x.dtype), extra)
            return x if groups == 1 else x.reshape(padded.stored_shape)

        def back(x: jax.Array) -> jax.Array:
            x = x if groups == 1 else x.reshape(new)
            x = jax.lax.slice(x, (0,) * x.ndim, old)
            return x if groups == 1 else x.reshape(tensor.stored_shape)

        self.rearrange(name, padded, into, back)

    def convert(self, name: str, dtype: DTypeName) -> None:
        """Give the kernel a tensor in another dtype."""
        tensor = self.tensors[name]
        old, new = jax_dtype(tensor.dtype), jax_dtype(dtype)
        self.rearrange(
            name,
            replace(tensor, dtype=dtype),
            lambda x: x.astype(new),
            lambda x: x.astype(old),
        )

    def expand(self, name: str, dims: tuple[int, ...]) -> None:
        """Broadcast an operand to larger dims before the kernel."""
        full = replace(self.tensors[name], dims=dims)
        self.rearrange(name, full, lambda x: jnp.broadcast_to(x, full.stored_shape))

    # --- what comes of it -------------------------------------------------------------

    def finish(self) -> Rewrite:
        """Return the edited graph, with the steps around it in their order."""
        graph, names, results = self.graph, self.operands, self.results
        first, last = tuple(self.before), tuple(reversed(self.after))

        def given(operands: Sequence[jax.Array]) -> Env:
            # fusion.py has none to give to a contraction's steps, which read none.
            return dict(zip(names, operands, strict=bool(operands)))

        def before_by(steps: tuple[_BeforeStep, ...]) -> Before:
            def before(operands: Sequence[jax.Array]) -> Arrays:
                env = given(operands)
                for step in steps:
                    step(env)
                return tuple(env[name] for name in graph.inputs)

            return before

        def after_by(steps: tuple[_AfterStep, ...]) -> After:
            def after(
                operands: Sequence[jax.Array], made: Sequence[jax.Array]
            ) -> Arrays:
                env = given(operands)
                found = dict(zip(graph.outputs, made, strict=True))
                for step in steps:
                    step(env, found)
                return tuple(found[name] for name in results)

            return after

        rewrite = Rewrite(
            graph=graph,
            before=before_by(first),
            after=after_by(last),
            notes=tuple(self.notes),
        )
        if (slow_path := self.slow_path) is None:
            return rewrite
        fast_path = FastPath(
            applies=lambda operands: ~slow_path.is_needed(given(operands)),
            before=rewrite.before,
            after=rewrite.after,
        )
        start = () if slow_path.before is None else (slow_path.before,)
        return replace(
            rewrite,
            before=before_by((*start, *first)),
            after=after_by((*last, slow_path.after)),
            fast_path=fast_path,
        )
