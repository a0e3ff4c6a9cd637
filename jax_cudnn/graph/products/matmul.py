# SPDX-License-Identifier: Apache-2.0
"""The `matmul` node, described in node_kinds.json, and its gradient.

Sums are kept in f32 (f64 for f64, i32 for 8-bit integers).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_cudnn.graph.description import describe
from jax_cudnn.graph.kinds import NodeKind, register_kind
from jax_cudnn.graph.rules import broadcast
from jax_cudnn.graph.spec import Attributes, Node

if TYPE_CHECKING:
    from jax_cudnn.graph.writer import GradientWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulAttributes(Attributes):
    """A matmul has no options: transposed operands are dims in another order."""


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
    NodeKind(row=describe("matmul"), attributes=MatmulAttributes, vjp=_vjp)
)
