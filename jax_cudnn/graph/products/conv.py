# SPDX-License-Identifier: Apache-2.0
"""The convolution nodes and their gradients.

Their tensors are described in node_kinds.json. `conv_fprop` is a cross-correlation, as
lax computes it; `conv_dgrad` gives the gradient of x and `conv_wgrad` that of w. The
number of groups is x's channels over w's. Sums are kept in f32 (f64 for f64, i32 for
8-bit integers).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_cudnn.graph.description import describe
from jax_cudnn.graph.kinds import NodeKind, register_kind
from jax_cudnn.graph.spec import Attributes, Graph, Node, Tensor
from jax_cudnn.graph.windows import dilated

if TYPE_CHECKING:
    from jax_cudnn.graph.writer import GradientWriter


# Of such a sum.
_MOST_TAPS = 8


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

    def of_other_direction(self, taps: Sequence[int]) -> "ConvAttributes":
        """Return steps as zeros between elements, and padding for flipped filters."""
        low, high = (
            tuple(
                dilated(size, hole) - 1 - pad
                for size, hole, pad in zip(taps, self.rhs_dilation, pads, strict=True)
            )
            for pads in (self.padding_low, self.padding_high)
        )
        return ConvAttributes(
            window_strides=self.lhs_dilation,
            padding_low=low,
            padding_high=high,
            lhs_dilation=self.window_strides,
            rhs_dilation=self.rhs_dilation,
        )


def conv_attributes(node: Node) -> ConvAttributes:
    """Return the attributes of a convolution, or of a gradient of one."""
    assert isinstance(node.attributes, ConvAttributes)
    return node.attributes


def arrays_in(graph: Graph, node: Node) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w and output of a convolution, or their gradients."""
    names = dict((*node.inputs, *node.outputs))
    x, w, output = (graph.tensor(names[role]) for role in TRIPLES[node.kind])
    return x, w, output


def is_short_sum(images: Sequence[int], filters: Sequence[int]) -> bool:
    """Whether a convolution is written for XLA as a sum of shifted products.

    That is a depthwise one along one axis, of up to 8 taps. XLA's own convolution takes
    10 to 20 times as long (an H200: `python -m benchmarks.xla_forms --only depthwise`).
    Along two axes it was the faster one, by up to 11 times.
    """
    channels, of_each, *taps = filters
    along = [i for i, size in enumerate(images[2:]) if size > 1 or taps[i] > 1]
    is_depthwise = of_each == 1 < channels == images[1]
    return is_depthwise and len(along) == 1 and math.prod(taps) <= _MOST_TAPS


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
