# SPDX-License-Identifier: Apache-2.0
"""The derivative of a kind whose gradient is a kernel of its own, from both their rows.

The gradient's row says all: operands with the names of the kind's operands and results
are these, one named grad_x is the cotangent of the result x, and a result named grad_x
is the gradient of the operand x. What is optional there is left out where it is not
there, not wanted, or known to be zero.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.description import Role, describe
from jax_cudnn.graph.kinds import (
    BackwardGraph,
    Check,
    Derivative,
    NodeKind,
    Roles,
    kind_named,
    register_kind,
    roles_in,
    row_of,
)
from jax_cudnn.graph.shapes import result_like
from jax_cudnn.graph.spec import Attributes, Graph, Node, Tensor

Source = tuple[Literal["input", "output", "cotangent"], int]


def gradient_kernel(backward: str) -> Derivative:
    """Return the derivative of a kind, given the name of its gradient kernel."""

    def with_residuals(graph: Graph, wanted: tuple[bool, ...] = ()) -> Graph:
        del wanted  # The kernel computes all gradients at once.
        return _with_residuals(graph, backward)

    def gradient(
        graph: Graph, wanted: tuple[bool, ...], nonzero: tuple[bool, ...]
    ) -> BackwardGraph:
        return _gradient(graph, backward, wanted, nonzero)

    return Derivative(with_residuals=with_residuals, backward=gradient)


def register_with_gradient(
    name: str,
    attributes: type[Attributes],
    *,
    check: Check | None = None,
    check_gradient: Check | None = None,
    cancelled: Callable[[Roles], frozenset[str]] = lambda _: frozenset(),
) -> NodeKind:
    """Register a kind and its gradient's, which is named after it; return the first.

    ``cancelled`` is of the gradient: see `NodeKind`.
    """
    register_kind(
        NodeKind(
            row=describe(f"{name}_backward"),
            attributes=attributes,
            check=check_gradient,
            gradient_of=name,
            cancelled=cancelled,
        )
    )
    return register_kind(
        NodeKind(
            row=describe(name),
            attributes=attributes,
            check=check,
            derivative=gradient_kernel(f"{name}_backward"),
        )
    )


def single_node_graph(
    kind: str,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    attributes: Attributes,
) -> Graph:
    """Return a graph of one node, whose tensors are named by their roles."""
    for role, tensor in (*inputs.items(), *outputs.items()):
        if tensor.name != role:
            raise GraphError(f"{kind}: tensor {tensor.name!r} is given as {role!r}")
    node = Node.make(kind, {r: r for r in inputs}, {r: r for r in outputs}, attributes)
    return Graph(
        tensors=(*inputs.values(), *outputs.values()),
        nodes=(node,),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def forward_graph(graph: Graph) -> Graph | None:
    """Return the forward kernel of a graph that is one gradient kernel.

    Its operands are those of the gradient. Its results are what the gradient reads of
    them, and what the forward kernel always has. None where the gradient reads none.
    """
    node = graph.sole_node()
    forward = None if node is None else kind_named(node.kind).gradient_of
    if node is None or forward is None:
        return None
    row = kind_named(forward).row.form(dict(node.inputs))
    names = dict(node.inputs)

    def named(roles: Iterable[Role]) -> dict[str, Tensor]:
        return {
            role.name: replace(graph.tensor(names[role.name]), name=role.name)
            for role in roles
            if role.name in names
        }

    inputs, outputs = named(row.inputs), named(row.outputs)
    if not outputs:
        return None
    for role in row.outputs:
        if role.is_required and role.name not in outputs:
            cotangent = graph.tensor(names[f"grad_{role.name}"])
            outputs[role.name] = replace(cotangent, name=role.name)
    return single_node_graph(forward, inputs, outputs, node.attributes)


# Tracing asks for the same gradient several times.
@functools.lru_cache(maxsize=4096)
def _with_residuals(graph: Graph, backward: str) -> Graph:
    (node,) = graph.nodes
    row = row_of(node)
    after = kind_named(backward).row.form(dict(node.inputs))
    read = {role.name for role in after.inputs if role.is_required}
    roles = roles_in(graph, node)
    saved = [
        result_like(row, role.name, roles, node.attributes)
        for role in row.outputs
        if role.name in read and role.name not in roles
    ]
    if not saved:
        return graph
    outputs = {**dict(node.outputs), **{tensor.name: tensor.name for tensor in saved}}
    return Graph(
        tensors=(*graph.tensors, *saved),
        nodes=(Node.make(node.kind, dict(node.inputs), outputs, node.attributes),),
        inputs=graph.inputs,
        outputs=(*graph.outputs, *(tensor.name for tensor in saved)),
    )


@functools.lru_cache(maxsize=4096)
def _gradient(
    graph: Graph,
    backward: str,
    wanted: tuple[bool, ...],
    nonzero: tuple[bool, ...],
) -> BackwardGraph:
    # The gradient of sdpa(query, key, value) -> output reads all of these, `stats`,
    # which `_with_residuals` has added to the results, and grad_output. So `operands`
    # are ("input", 0), ("input", 1), ("input", 2), ("output", 0), ("output", 1) and
    # ("cotangent", 0).
    full = _with_residuals(graph, backward)
    (node,) = full.nodes
    row = kind_named(backward).row.form(dict(node.inputs))
    adds = row_of(node).adds
    assert not {*adds[1:]} & dict(node.inputs).keys(), "that of the rest is asked for"
    role_of = {name: role for role, name in (*node.inputs, *node.outputs)}
    inputs: dict[str, Tensor] = {}
    operands: list[Source] = []

    def add(role: str, like: str, source: Source) -> None:
        if role in row.roles and row.roles[role].is_input:
            inputs[role] = replace(full.tensor(like), name=role)
            operands.append(source)

    for i, name in enumerate(graph.inputs):
        add(role_of[name], name, ("input", i))
    for i, name in enumerate(full.outputs):
        add(role_of[name], name, ("output", i))
    for i, name in enumerate(graph.outputs):
        role = f"grad_{role_of[name]}"
        if nonzero[i] or (role in row.roles and row.roles[role].is_required):
            add(role, name, ("cotangent", i))

    outputs: dict[str, Tensor] = {}
    gradients: list[int] = []
    names = dict(node.inputs)
    for role in row.outputs:
        primal = names.get(role.name.removeprefix("grad_"))
        if primal is None:
            continue
        index = graph.inputs.index(primal)
        if role.is_required or wanted[index]:
            outputs[role.name] = replace(graph.tensor(primal), name=role.name)
            gradients.append(index)
    return BackwardGraph(
        graph=single_node_graph(backward, inputs, outputs, node.attributes),
        operands=tuple(operands),
        gradients=tuple(gradients),
    )
