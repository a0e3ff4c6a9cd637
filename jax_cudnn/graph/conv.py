# SPDX-License-Identifier: Apache-2.0
"""The convolution nodes and their gradients: shapes, batching, derivative.

Axis letters: n image, c in channels, o out channels, y one to three spatial axes, f
the filter's. The number of groups g is x's channels over w's.

==============  ======================  ============================================
kind            roles                   meaning
==============  ======================  ============================================
conv_fprop      x, w -> output          cross-correlation, as lax computes it
conv_dgrad      grad_output, w          the gradient of x
                -> grad_x
conv_wgrad      grad_output, x          the gradient of w
                -> grad_w
==============  ======================  ============================================

x is (n, c, *y), w (o, c/g, *f) and output (n, o, *y'), as are their gradients. Sums are
kept in f32 (f64 for f64, i32 for 8-bit integers).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.folding import families, propagate
from jax_cudnn.graph.kinds import FoldRule, NodeKind, Roles, register_kind
from jax_cudnn.graph.rules import expect_dims
from jax_cudnn.graph.spec import Attributes, Graph, Node

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

    def __post_init__(self) -> None:
        rank = len(self.window_strides)
        for name in ("padding_low", "padding_high", "lhs_dilation", "rhs_dilation"):
            if len(getattr(self, name)) != rank:
                raise GraphError(f"conv: {name} has not {rank} entries")
        for name in ("window_strides", "lhs_dilation", "rhs_dilation"):
            if any(value < 1 for value in getattr(self, name)):
                raise GraphError(
                    f"conv: {name} {list(getattr(self, name))} has an entry below 1"
                )


def dilated(size: int, dilation: int) -> int:
    """Return the size of an axis with zeros put between its elements."""
    return (size - 1) * dilation + 1 if size else 0


def output_size(attributes: ConvAttributes, axis: int, x: int, w: int) -> int:
    """Return the size of a spatial axis of the output."""
    padded = (
        dilated(x, attributes.lhs_dilation[axis])
        + attributes.padding_low[axis]
        + attributes.padding_high[axis]
    )
    room = padded - dilated(w, attributes.rhs_dilation[axis])
    return room // attributes.window_strides[axis] + 1 if room >= 0 else 0


# --- shape rules ----------------------------------------------------------------------

# The roles of x, w and output in each kind.
TRIPLES = {
    "conv_fprop": ("x", "w", "output"),
    "conv_dgrad": ("grad_x", "w", "grad_output"),
    "conv_wgrad": ("x", "grad_w", "grad_output"),
}


def _check(kind: str, roles: Roles, attributes: Attributes) -> None:
    assert isinstance(attributes, ConvAttributes)
    rank = len(attributes.window_strides) + 2
    if not 3 <= rank <= 5:
        raise GraphError(f"{kind}: {rank - 2} spatial axes are not 1 to 3")
    for role in TRIPLES[kind]:
        if len(roles[role].dims) != rank:
            raise GraphError(
                f"{kind}: {role} has rank {len(roles[role].dims)}, not {rank}"
            )
        if roles[role].dtype == "bool":
            raise GraphError(f"{kind}: {role} is bool")
    x, w = (roles[role].dims for role in TRIPLES[kind][:2])
    if (w[1] == 0) != (x[1] == 0) or (w[1] and x[1] % w[1]):
        raise GraphError(f"{kind}: {x[1]} channels do not divide by {w[1]} of a group")
    groups = x[1] // w[1] if w[1] else 1
    if w[0] % groups:
        raise GraphError(
            f"{kind}: {w[0]} out channels do not divide by {groups} groups"
        )
    spatial = (output_size(attributes, i, x[i + 2], w[i + 2]) for i in range(rank - 2))
    expect_dims(kind, roles, TRIPLES[kind][2], (x[0], w[0], *spatial))


# --- batching -------------------------------------------------------------------------

_FAMILIES = {
    "x": "image",
    "grad_x": "image",
    "output": "image",
    "grad_output": "image",
    "w": "filter",
    "grad_w": "filter",
}


def _fold(graph: Graph, batched: frozenset[str]) -> FoldRule | None:
    """Fold examples into the images where all share the filters, else into groups."""
    family = families(graph, _FAMILIES)
    images = {name: 0 for name, kind in family.items() if kind == "image"}
    has_sums = any(node.kind in ("reduction", "conv_wgrad") for node in graph.nodes)
    if not has_sums and (rule := propagate(graph, batched, images)) is not None:
        return rule
    channels = {name: int(kind == "image") for name, kind in family.items()}
    rule = propagate(graph, batched, channels, together=TRIPLES)
    # A sum over channels would mix the examples that are folded into them.
    return None if rule is None or rule.sums else rule


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
    NodeKind(
        name="conv_fprop",
        attributes=ConvAttributes,
        required_inputs=("x", "w"),
        required_outputs=("output",),
        check=lambda roles, attributes: _check("conv_fprop", roles, attributes),
        fold=_fold,
        vjp=_vjp,
    )
)

CONV_DGRAD = register_kind(
    NodeKind(
        name="conv_dgrad",
        attributes=ConvAttributes,
        required_inputs=("grad_output", "w"),
        required_outputs=("grad_x",),
        check=lambda roles, attributes: _check("conv_dgrad", roles, attributes),
        fold=_fold,
    )
)

CONV_WGRAD = register_kind(
    NodeKind(
        name="conv_wgrad",
        attributes=ConvAttributes,
        required_inputs=("grad_output", "x"),
        required_outputs=("grad_w",),
        check=lambda roles, attributes: _check("conv_wgrad", roles, attributes),
        fold=_fold,
    )
)
