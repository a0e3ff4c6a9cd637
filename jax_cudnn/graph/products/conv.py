# SPDX-License-Identifier: Apache-2.0
"""The convolution nodes and their gradients.

Their tensors are described in node_kinds.json. `conv_fprop` is a cross-correlation, as
lax computes it; `conv_dgrad` gives the gradient of x and `conv_wgrad` that of w. The
number of groups is x's channels over w's. Sums are kept in f32 (f64 for f64, i32 for
8-bit integers).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_cudnn.graph.description import describe
from jax_cudnn.graph.kinds import NodeKind, register_kind
from jax_cudnn.graph.spec import Attributes, Node

if TYPE_CHECKING:
    from jax_cudnn.graph.writer import GradientWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvAttributes(Attributes):
    """Static configuration of a convolution; one entry per spatial axis.

    ``lhs_dilation`` puts zeros between x's elements (a transposed convolution),
    ``rhs_dilation`` between w's. Padding may be negative: it then cuts.
    """

    window_strides: tuple[int, ...]
    padding_low: tuple[int, ...]
    padding_high: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]


def conv_attributes(node: Node) -> ConvAttributes:
    """Return the attributes of a convolution, or of a gradient of one."""
    assert isinstance(node.attributes, ConvAttributes)
    return node.attributes


# The roles of x, w and output in each kind.
TRIPLES = {
    "conv_fprop": ("x", "w", "output"),
    "conv_dgrad": ("grad_x", "w", "grad_output"),
    "conv_wgrad": ("x", "grad_w", "grad_output"),
}


# --- derivative -----------------------------------------------------------------------


def _vjp(writer: "GradientWriter", node: Node, cotangent: str, role: str) -> str:
    names = dict(node.inputs)
    tensor = writer.forward(names[role])
    other_role = "w" if role == "x" else "x"
    grad, other = writer.factors(cotangent, writer.use(names[other_role]))
    return writer.node(
        "conv_dgrad" if role == "x" else "conv_wgrad",
        {"grad_output": grad, other_role: other},
        node.attributes,
        output=f"grad_{role}",
        dims=tensor.dims,
        order=tensor.order,
    )


CONV_FPROP = register_kind(
    NodeKind(row=describe("conv_fprop"), attributes=ConvAttributes, vjp=_vjp)
)
CONV_DGRAD = register_kind(
    NodeKind(row=describe("conv_dgrad"), attributes=ConvAttributes)
)
CONV_WGRAD = register_kind(
    NodeKind(row=describe("conv_wgrad"), attributes=ConvAttributes)
)
