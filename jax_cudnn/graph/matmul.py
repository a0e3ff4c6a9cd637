# SPDX-License-Identifier: Apache-2.0
"""The `matmul` node: shapes, batching, gradient.

Axis letters: b batch, m rows, n columns, r contraction.

========  ==================  ===================================================
role      dims                meaning
========  ==================  ===================================================
a         (b or 1, m, r)      floats or 8-bit integers
b         (b or 1, r, n)      of a's dtype class
output    (b, m, n)           sums over r in f32 (f64 for f64, i32 for integers)
========  ==================  ===================================================
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.folding import propagate
from jax_cudnn.graph.kinds import FoldRule, NodeKind, Roles, register_kind
from jax_cudnn.graph.rules import broadcast, expect_dims
from jax_cudnn.graph.spec import Attributes, Graph, Node

if TYPE_CHECKING:
    from jax_cudnn.graph.writer import GradientWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulAttributes(Attributes):
    """A matmul has no options: transposed operands are dims in another order."""


def _check(roles: Roles, attributes: Attributes) -> None:
    del attributes
    for role in ("a", "b", "output"):
        if len(roles[role].dims) != 3:
            raise GraphError(f"matmul: {role} has rank {len(roles[role].dims)}, not 3")
        if roles[role].dtype == "bool":
            raise GraphError(f"matmul: {role} is bool")
    a, b = roles["a"].dims, roles["b"].dims
    if a[2] != b[1]:
        raise GraphError(f"matmul: a has {a[2]} columns but b {b[1]} rows")
    if a[0] != b[0] and 1 not in (a[0], b[0]):
        raise GraphError(f"matmul: a has batch {a[0]} but b {b[0]}")
    batch = b[0] if a[0] == 1 else a[0]
    expect_dims("matmul", roles, "output", (batch, a[1], b[2]))


def _fold(graph: Graph, batched: frozenset[str]) -> FoldRule | None:
    """Fold examples into the rows of products whose b they share, else the batch."""
    return _fold_rows(graph, batched) or propagate(
        graph, batched, {tensor.name: 0 for tensor in graph.tensors}
    )


def _fold_rows(graph: Graph, batched: frozenset[str]) -> FoldRule | None:
    """Fold examples into the rows, if they enter every product by its a alone.

    Not where a sum over the rows would keep them all until the examples are apart.
    """
    axes = {tensor.name: 1 for tensor in graph.tensors}
    for node in graph.nodes:
        if node.kind == "matmul":
            sides = {role: _sources(graph, name) for role, name in node.inputs}
            if batched.isdisjoint(sides["a"]):
                return None
            for name in sides["b"]:
                axes.pop(name, None)
    rule = propagate(graph, batched, axes)
    return None if rule is None or rule.sums else rule


def _sources(graph: Graph, name: str) -> set[str]:
    found = {name}
    for node in reversed(graph.nodes):
        if found.intersection(each for _, each in node.outputs):
            found.update(each for _, each in node.inputs)
    return found


def _vjp(writer: "GradientWriter", node: Node, cotangent: str, role: str) -> str:
    """Give da = dout b^T and db = a^T dout, summed over a broadcast batch."""
    names = dict(node.inputs)
    tensor = writer.forward(names[role])
    other = writer.view(names["b" if role == "a" else "a"], (0, 2, 1))
    grad, other = writer.factors(cotangent, other)
    inputs = {"a": grad, "b": other} if role == "a" else {"a": other, "b": grad}
    batch = broadcast(*(writer[name].dims[:1] for name in inputs.values()))
    product = writer.node(
        "matmul",
        inputs,
        MatmulAttributes(),
        dims=(*batch, *tensor.dims[1:]),
        order=tensor.order,
    )
    return writer.reduce_to(product, tensor.dims)


MATMUL = register_kind(
    NodeKind(
        name="matmul",
        attributes=MatmulAttributes,
        required_inputs=("a", "b"),
        required_outputs=("output",),
        check=_check,
        fold=_fold,
        vjp=_vjp,
    )
)
