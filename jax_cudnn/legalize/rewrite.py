# SPDX-License-Identifier: Apache-2.0
"""Rewriting a graph of one node: its tensors by role, with steps before and after.

The steps of legalize/sdpa_steps.py edit a ``Rewrite``; ``start`` makes one from a graph
and ``finish`` turns it into a ``Legal``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Attributes, Graph, Node, Tensor
from jax_cudnn.graph.kinds import roles_of
from jax_cudnn.legalize.rules import Arrays, Legal, Usual
from jax_cudnn.reference.interpreter import to_stored

Env = dict[str, jax.Array]

# Stands for the log-sum-exp of an attention row whose probabilities are to be 0:
# exp(score - it) is.
DEAD_STATS = 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class Rare:
    """A last step on the results, for the operands that ``happens`` tells."""

    happens: Callable[[Env], jax.Array]
    after: Callable[[Env, Env], None]


@dataclass(slots=True)
class Rewrite:
    """A graph's tensors by role while they are being rewritten.

    ``before`` steps edit the operands in order; ``after`` steps edit the results, the
    last added first, and see the original operands too. ``rare`` comes after these.
    """

    node: Node
    attributes: Attributes
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    before: list[Callable[[Env], None]] = field(default_factory=lambda: [])
    after: list[Callable[[Env, Env], None]] = field(default_factory=lambda: [])
    rare: Rare | None = None

    @property
    def roles(self) -> dict[str, Tensor]:
        """The tensors that cuDNN sees, by role."""
        return {**self.inputs, **self.outputs}

    def resize(self, role: str, axis: int, size: int) -> None:
        """Change one dimension of the tensor in that role, if it is there."""
        for table in (self.inputs, self.outputs):
            if role in table:
                dims = list(table[role].dims)
                dims[axis] = size
                table[role] = replace(table[role], dims=tuple(dims))


def start(graph: Graph) -> Rewrite:
    """Return the graph's tensors by role, nothing rewritten yet."""
    (node,) = graph.nodes
    table = {tensor.name: tensor for tensor in graph.tensors}
    roles = roles_of(node, table)
    return Rewrite(
        node=node,
        attributes=node.attributes,
        inputs={r: replace(roles[r], name=r) for r, _ in node.inputs},
        outputs={r: replace(roles[r], name=r) for r, _ in node.outputs},
    )


def finish(graph: Graph, rewrite: Rewrite) -> Legal:
    """Return the rewritten graph, with the steps around it in their order."""
    input_roles = {name: role for role, name in rewrite.node.inputs}
    output_roles = {name: role for role, name in rewrite.node.outputs}
    inputs, outputs = tuple(rewrite.inputs), tuple(rewrite.outputs)
    legal_graph = Graph(
        tensors=(*rewrite.inputs.values(), *rewrite.outputs.values()),
        nodes=(
            Node.make(
                rewrite.node.kind,
                {r: r for r in inputs},
                {r: r for r in outputs},
                rewrite.attributes,
            ),
        ),
        inputs=inputs,
        outputs=outputs,
    )

    def environment(operands: Sequence[jax.Array]) -> Env:
        names = zip(graph.inputs, operands, strict=True)
        return {input_roles[name]: x for name, x in names}

    def before(operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        env = environment(operands)
        for step in rewrite.before:
            step(env)
        return tuple(env[role] for role in inputs)

    steps = [*reversed(rewrite.after)]

    def after(operands: Sequence[jax.Array], results: Sequence[jax.Array]) -> Arrays:
        env = environment(operands)
        by_role = dict(zip(outputs, results, strict=True))
        for step in steps:
            step(env, by_role)
        return tuple(by_role[output_roles[name]] for name in graph.outputs)

    if (rare := rewrite.rare) is None:
        return Legal(graph=legal_graph, before=before, after=after)

    def usual_holds(operands: Sequence[jax.Array]) -> jax.Array:
        return ~rare.happens(environment(operands))

    def whole(operands: Sequence[jax.Array], results: Sequence[jax.Array]) -> Arrays:
        env = environment(operands)
        by_name = dict(zip(graph.outputs, after(operands, results), strict=True))
        by_role = {role: by_name[name] for name, role in output_roles.items()}
        rare.after(env, by_role)
        return tuple(by_role[output_roles[name]] for name in graph.outputs)

    usual = Usual(holds=usual_holds, after=after)
    return Legal(graph=legal_graph, before=before, after=whole, usual=usual)


def name_of(graph: Graph, role: str) -> str:
    """Return the name of the tensor in a role of the only node."""
    (node,) = graph.nodes
    return dict((*node.inputs, *node.outputs))[role]


def where_logical(
    tensor: Tensor, condition: jax.Array, x: jax.Array, fill: float
) -> jax.Array:
    """Return stored `x` where a condition over logical axes holds, else `fill`."""
    return jnp.where(to_stored(tensor, condition), x, jnp.asarray(fill, x.dtype))


def unfolded(x: jax.Array) -> jax.Array:
    """Return x as something that XLA does not know at compile time.

    It would compute for seconds what follows from a large constant, such as a mask that
    a jitted function captured. The barrier is around a number: one around the array
    would have it written to memory where it is made from others.
    """
    known_at_run_time = jax.lax.optimization_barrier(jnp.ones((), bool))
    return jnp.where(known_at_run_time, x, jnp.zeros((), x.dtype))


def pad_axis(
    rewrite: Rewrite, roles: tuple[str, ...], axis: int, size: int, padded: int
) -> None:
    """Pad one logical axis of some roles with zeros for cuDNN, and cut results back."""
    padded_inputs = {r: rewrite.inputs[r] for r in roles if r in rewrite.inputs}
    cut_outputs = {r: rewrite.outputs[r] for r in roles if r in rewrite.outputs}
    for role in roles:
        rewrite.resize(role, axis, padded)

    def before(env: Env) -> None:
        for role, tensor in padded_inputs.items():
            widths = [(0, 0, 0)] * len(tensor.dims)
            widths[tensor.order.index(axis)] = (0, padded - size, 0)
            zero = jnp.zeros((), env[role].dtype)
            env[role] = jax.lax.pad(env[role], zero, widths)

    def after(_: Env, results: Env) -> None:
        for role, tensor in cut_outputs.items():
            results[role] = jax.lax.slice_in_dim(
                results[role], 0, size, axis=tensor.order.index(axis)
            )

    rewrite.before.append(before)
    rewrite.after.append(after)
