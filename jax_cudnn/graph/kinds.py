# SPDX-License-Identifier: Apache-2.0
"""The registry of node kinds: roles, attributes, shape rule, batching, derivative.

A new operation registers a ``NodeKind`` here, from a module of its own beside this one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.spec import Attributes, Node, Tensor

if TYPE_CHECKING:
    from jax_cudnn.graph.spec import Graph

# The tensors of one node by role.
Roles = Mapping[str, Tensor]

# How an input takes part when `n` examples are folded into dimension 0:
# "keep": not batched, broadcasts as it is; "fold": `n` merges into dimension 0;
# "broadcast": dimension 0 is first broadcast to the node's batch, then as "fold".
# Outputs are always folded; "sum" means that dimension 0 was broadcast in the graph
# before folding, so that the examples' own batch is summed away after the call.
InputFold = Literal["keep", "fold", "broadcast"]
OutputFold = Literal["fold", "sum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldRule:
    """What a node kind answers when `n` examples are to be folded into dimension 0."""

    inputs: Mapping[str, InputFold]
    outputs: Mapping[str, OutputFold]
    batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardGraph:
    """A gradient as one more graph, with where its operands come from.

    ``operands`` has one entry per input of ``graph``: ("input", i) is the forward
    graph's i-th operand, ("output", i) the i-th result of the forward graph with
    residuals, ("cotangent", i) the cotangent of the forward graph's i-th result.
    ``gradients[j]`` says which forward operand the j-th result is the gradient of.
    """

    graph: "Graph"
    operands: tuple[tuple[Literal["input", "output", "cotangent"], int], ...]
    gradients: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Derivative:
    """How cuDNN differentiates a node: extra results to save, and the gradient graph.

    ``with_residuals(graph)`` adds outputs after the existing ones.
    ``backward(graph, wanted, nonzero)`` takes the forward graph, which operands need
    a gradient and which results have a cotangent that is not known to be zero.
    """

    with_residuals: Callable[["Graph"], "Graph"]
    backward: Callable[["Graph", tuple[bool, ...], tuple[bool, ...]], BackwardGraph]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """All that the data layer knows of one kind of node."""

    name: str
    attributes: type[Attributes]
    required_inputs: tuple[str, ...]
    optional_inputs: tuple[str, ...]
    required_outputs: tuple[str, ...]
    optional_outputs: tuple[str, ...]
    check: Callable[[Roles, Attributes], None]
    fold: Callable[[Roles, frozenset[str]], FoldRule]
    derivative: Derivative | None = None


_KINDS: dict[str, NodeKind] = {}


def register_kind(kind: NodeKind) -> NodeKind:
    """Add a node kind; each name once."""
    if kind.name in _KINDS:
        raise ValueError(f"node kind {kind.name!r} is registered twice")
    _KINDS[kind.name] = kind
    return kind


def kind_named(name: str) -> NodeKind:
    """Return the kind of that name, or raise GraphError naming the known ones."""
    try:
        return _KINDS[name]
    except KeyError:
        known = ", ".join(sorted(_KINDS))
        raise GraphError(f"node kind {name!r} is not one of {known}") from None


def roles_of(node: Node, table: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the node's tensors, inputs and outputs, by role."""
    return {role: table[name] for role, name in (*node.inputs, *node.outputs)}


def check_node(node: Node, table: Mapping[str, Tensor]) -> None:
    """Raise GraphError unless the node's roles, attributes and shapes are legal."""
    kind = kind_named(node.kind)
    if type(node.attributes) is not kind.attributes:
        raise GraphError(
            f"{node.kind}: attributes are {type(node.attributes).__name__}, "
            f"not {kind.attributes.__name__}"
        )
    for label, pairs, required, optional in (
        ("input", node.inputs, kind.required_inputs, kind.optional_inputs),
        ("output", node.outputs, kind.required_outputs, kind.optional_outputs),
    ):
        roles = [role for role, _ in pairs]
        if roles != sorted(set(roles)):
            raise GraphError(f"{node.kind}: {label} roles {roles} not sorted or twice")
        for role, name in pairs:
            if role not in (*required, *optional):
                raise GraphError(f"{node.kind}: unknown {label} role {role!r}")
            if name not in table:
                raise GraphError(f"{node.kind}: {role} names unknown tensor {name!r}")
        for role in required:
            if role not in roles:
                raise GraphError(f"{node.kind}: {label} {role!r} is missing")
    kind.check(roles_of(node, table), node.attributes)
