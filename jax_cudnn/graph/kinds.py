# SPDX-License-Identifier: Apache-2.0
"""The registry of node kinds: what a row of node_kinds.json cannot say of them.

A new operation has a row there and registers a ``NodeKind`` here, from a module of its
own beside this one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.description import Description
from jax_cudnn.graph.shapes import check_attributes, check_tensors
from jax_cudnn.graph.spec import Attributes, Node, Tensor

if TYPE_CHECKING:
    from jax_cudnn.graph.spec import Graph
    from jax_cudnn.graph.writer import GradientWriter

# The tensors of one node by role.
Roles = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardGraph:
    """A gradient as one more graph, with where its operands come from.

    ``operands`` has one entry per input of ``graph``: ("input", i) is the forward
    graph's i-th operand, ("output", i) the i-th result of the forward graph with
    residuals, ("cotangent", i) the cotangent of the forward graph's i-th result.
    ``gradients[j]`` says which forward operand the j-th result is the gradient of;
    the gradients of operands that are not among them are zero.
    """

    graph: "Graph"
    operands: tuple[tuple[Literal["input", "output", "cotangent"], int], ...]
    gradients: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Derivative:
    """The derivative of a graph: extra results to save, and the gradient graph.

    ``with_residuals(graph, wanted)`` adds outputs after the existing ones; ``wanted``
    says which operands need a gradient. ``backward(graph, wanted, nonzero)`` takes the
    forward graph without them, and which results have a cotangent that is not known to
    be zero; None where all gradients are zero.
    """

    with_residuals: Callable[["Graph", tuple[bool, ...]], "Graph"]
    backward: Callable[
        ["Graph", tuple[bool, ...], tuple[bool, ...]], BackwardGraph | None
    ]


# Writes the cotangent of one input role of a node, given that of its output; None
# where it is zero everywhere.
Vjp = Callable[["GradientWriter", Node, str, str], str | None]
# Raises GraphError for what a row cannot say of a node's tensors and attributes.
Check = Callable[[Roles, Attributes], None]


def _nothing(roles: Roles) -> frozenset[str]:
    del roles
    return frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """All that the data layer knows of one kind of node.

    The gradient of a graph is its only node's ``derivative``, or else written node by
    node with their ``vjp``, where all nodes have one: the attributes of some have none
    (``has_vjp``). ``check`` is what the row cannot say of the tensors. A gradient
    kernel names the kind that it is the ``gradient_of``. ``cancelled`` names the
    results that hold nothing but the rounding errors of sums that cancel.
    """

    row: Description
    attributes: type[Attributes]
    check: Check | None = None
    derivative: Derivative | None = None
    vjp: Vjp | None = None
    has_vjp: Callable[[Attributes], bool] = lambda _: True
    gradient_of: str | None = None
    cancelled: Callable[[Roles], frozenset[str]] = _nothing

    @property
    def name(self) -> str:
        """The kind's name in the table."""
        return self.row.name


_KINDS: dict[str, NodeKind] = {}


def register_kind(kind: NodeKind) -> NodeKind:
    """Add what goes with a row of the table; each once, with the row's attributes."""
    if kind.name in _KINDS:
        raise ValueError(f"node kind {kind.name!r} is registered twice")
    declared = {field.name for field in fields(kind.attributes)}
    if declared != set(kind.row.attributes):
        raise ValueError(
            f"{kind.attributes.__name__} has {sorted(declared)}, but the row of "
            f"{kind.name!r} {sorted(kind.row.attributes)}"
        )
    _KINDS[kind.name] = kind
    return kind


def kind_named(name: str) -> NodeKind:
    """Return the kind of that name, or raise GraphError naming the known ones."""
    try:
        return _KINDS[name]
    except KeyError:
        known = ", ".join(sorted(_KINDS))
        raise GraphError(
            f"node kind {name!r} is not one of {known}. Export a program of another "
            "version of jax_cudnn again"
        ) from None


def all_kinds() -> Mapping[str, NodeKind]:
    """Return the kinds by name."""
    return _KINDS


def is_anchor(node: Node) -> bool:
    """Whether a kernel is there for this node, and others only come along."""
    return not kind_named(node.kind).row.is_around


def roles_of(node: Node, table: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the node's tensors, inputs and outputs, by role."""
    return {role: table[name] for role, name in (*node.inputs, *node.outputs)}


def roles_in(graph: "Graph", node: Node) -> dict[str, Tensor]:
    """Return the tensors of one of the graph's nodes by role."""
    return roles_of(node, {tensor.name: tensor for tensor in graph.tensors})


def row_of(node: Node) -> Description:
    """Return the row of the node's kind, as it is with the operands of the node."""
    return kind_named(node.kind).row.form(dict(node.inputs))


def check_node(node: Node, table: Mapping[str, Tensor]) -> None:
    """Raise GraphError unless the node's roles, attributes and shapes are legal."""
    kind = kind_named(node.kind)
    if type(node.attributes) is not kind.attributes:
        raise GraphError(
            f"{node.kind}: attributes are {type(node.attributes).__name__}, "
            f"not {kind.attributes.__name__}"
        )
    row = row_of(node)
    for label, pairs, declared in (
        ("input", node.inputs, row.inputs),
        ("output", node.outputs, row.outputs),
    ):
        known = {role.name for role in declared}
        given = [role for role, _ in pairs]
        if given != sorted(set(given)):
            raise GraphError(f"{node.kind}: {label} roles {given} not sorted or twice")
        for role, name in pairs:
            if role not in known:
                raise GraphError(f"{node.kind}: unknown {label} role {role!r}")
            if name not in table:
                raise GraphError(f"{node.kind}: {role} names unknown tensor {name!r}")
        for role in declared:
            if role.is_required and role.name not in given:
                raise GraphError(f"{node.kind}: {label} {role.name!r} is missing")
    roles = roles_of(node, table)
    check_attributes(row, node.attributes)
    check_tensors(row, roles, node.attributes)
    if kind.check is not None:
        kind.check(roles, node.attributes)
