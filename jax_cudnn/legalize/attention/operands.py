# SPDX-License-Identifier: Apache-2.0
"""Legalises attention as attention over other operands, such as a mask for a window."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax

from jax_cudnn.graph import Graph, SdpaAttributes, Target, Tensor
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.transforms.gradient_kernel import single_node_graph
from jax_cudnn.legalize.common.editor import Env, by_role
from jax_cudnn.legalize.common.legalization import Arrays, Legalization, Rule, around


def attributes_in(graph: Graph) -> SdpaAttributes:
    """Return the attributes of a graph of one attention, except over a cache."""
    (node,) = graph.nodes
    assert isinstance(node.attributes, SdpaAttributes)
    return node.attributes


def by_other_operands(
    graph: Graph,
    target: Target | None,
    rule: Rule,
    *,
    tensors: Mapping[str, Tensor],
    attributes: SdpaAttributes,
    made: Callable[[Env], Env],
    note: str,
) -> Legalization:
    """Legalise a graph by a rule for other operands and attributes.

    ``tensors`` are the operands by role, and ``made`` makes their arrays of the graph's
    own. ``note`` is added to each rewrite.
    """
    (node,) = graph.nodes
    role_of = {name: role for role, name in node.outputs}
    outputs = {role_of[name]: graph.tensor(name) for name in graph.outputs}
    inputs, outputs = (
        {role: replace(tensor, name=role) for role, tensor in each.items()}
        for each in (tensors, outputs)
    )
    other = single_node_graph(node.kind, inputs, outputs, attributes)

    def given(operands: Sequence[jax.Array]) -> Arrays:
        env = made(by_role(graph, operands))
        return tuple(env[role] for role in other.inputs)

    found = rule(other, target)
    rewrites = (around(rewrite, given, notes=(note,)) for rewrite in found.candidates)
    return replace(found, candidates=tuple(rewrites))


def operands_in(graph: Graph) -> dict[str, Tensor]:
    """Return the operands of a graph of one node by role."""
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    return {role: roles[role] for role, _ in node.inputs}
