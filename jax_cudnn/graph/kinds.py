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
    from jax_cudnn.graph.writer import GradientWriter

# The tensors of one node by role.
Roles = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldRule:
    """How `n` examples enter the tensors of a graph, by tensor name.

    ``axes``: the logical axis that the examples merge into, as its slower part; a
    tensor that is not named here is shared by all examples and broadcasts as it is.
    ``sizes``: the size to which that axis is first broadcast, for a tensor that has 1
    there; a result that has 1 is that many times the same. ``sums``: results whose
    examples' own share of the axis is summed away after the call instead.
    """

    axes: Mapping[str, int]
    sizes: Mapping[str, int]
    sums: frozenset[str] = frozenset()


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
    """How a graph is differentiated: extra results to save, and the gradient graph.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """All that the data layer knows of one kind of node.

    A graph folds by the rule of its first node that has one (``fold`` returns None for
    a graph that it cannot fold). Its gradient is its only node's ``derivative``, or
    else written node by node with their ``vjp``, where all nodes have one: the
    attributes of some have none (``has_vjp``).
    """

    name: str
    attributes: type[Attributes]
    required_inputs: tuple[str, ...]
    optional_inputs: tuple[str, ...] = ()
    required_outputs: tuple[str, ...]
    optional_outputs: tuple[str, ...] = ()
    check: Callable[[Roles, Attributes], None]
    fold: Callable[["Graph", frozenset[str]], FoldRule | None] | None = None
    derivative: Derivative | None = None
    vjp: Vjp | None = None
    has_vjp: Callable[[Attributes], bool] = lambda _: True


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


def fold_rule(graph: "Graph", batched: frozenset[str]) -> FoldRule | None:
    """Return how examples of the `batched` inputs fold into the graph, if they do."""
    rules = (kind_named(node.kind).fold for node in graph.nodes)
    rule = next((rule for rule in rules if rule is not None), None)
    return None if rule is None else rule(graph, batched)


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
