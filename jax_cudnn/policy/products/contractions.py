# SPDX-License-Identifier: Apache-2.0
"""Reads the properties of a contraction that a table's rows and kernels name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax_cudnn.graph import Graph, is_anchor
from jax_cudnn.graph.products.conv import TRIPLES, arrays_in
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.legalize.products import conv_depthwise
from jax_cudnn.legalize.products.fusion import WITHIN
from jax_cudnn.policy.nearest import Kernel
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.products.orders import (
    depthwise_of,
    is_first_with_more,
    order_of,
)
from jax_cudnn.policy.products.properties import (
    NARROW,
    Convolution,
    GroupedProduct,
    Matmul,
    contraction_in,
    is_short_sum_in,
)
from jax_cudnn.policy.tables import Tables


@dataclass(frozen=True, slots=True)
class Contraction:
    """A graph with one contraction: all of a part, or what is left of it."""

    graph: Graph
    is_whole: bool

    def point(self, tables: Tables) -> Kernel | None:
        """Return what it is measured as; None where it is not all of its part.

        So it is where no measured convolution is like it.
        """
        if not self.is_whole or kernels.is_unlike_all(self.graph):
            return None
        return kernels.kernel_of(self.graph, tables)


def contraction_of(part: Graph, rewrite: Rewrite) -> Contraction | None:
    """Return the contraction whose kernel a rewrite of a part chooses, if any."""
    if rewrite.core is None or rewrite.problem is None or WITHIN in rewrite.names:
        return None
    is_whole = any(node.kind in kernels.KINDS for node in filter(is_anchor, part.nodes))
    return Contraction(rewrite.problem, is_whole)


def properties_of(
    part: Graph, rewrite: Rewrite, rewrites: Sequence[Rewrite], tables: Tables
) -> tuple[str, object]:
    """Return what rows are about a rewrite of a product, and its properties."""
    if part.nodes and part.nodes[0].kind.startswith("grouped_matmul"):
        return "grouped products", GroupedProduct(part, rewrite)
    if WITHIN in rewrite.names:
        return "products with sums", None
    if rewrite.core is None or rewrite.problem is None:
        return "", None
    if contraction_in(rewrite.problem).kind == "matmul":
        return "matmuls", Matmul(rewrite.problem)
    convolution = Convolution(rewrite.problem)
    if not convolution.is_depthwise:
        convolution.is_first_with_more = is_first_with_more(rewrite.problem, tables)
        return "convolutions", convolution
    alike = [each for each in rewrites if each.core == rewrite.core]
    is_first = order_of(rewrite.core, alike, tables)[0] == rewrite.names[0]
    return "depthwise", depthwise_of(rewrite, alike, is_first=is_first)


def point_of(part: Graph, rewrite: Rewrite) -> Kernel | None:
    """Return what a depthwise convolution is measured as; None for other parts."""
    contraction = contraction_of(part, rewrite)
    if contraction is None or not contraction.is_whole:
        return None
    graph = contraction.graph
    node = contraction_in(graph)
    if node.kind not in TRIPLES or not conv_depthwise.is_depthwise(graph, node):
        return None
    _, w, output = arrays_in(graph, node)
    channels, _, *window = w.dims
    bits = "16 bits" if output.dtype in NARROW else output.dtype
    words = [node.kind, bits, "depthwise", f"{len(window)} axes"]
    words += ["few taps"] if is_short_sum_in(graph) else []
    words += [] if len(graph.nodes) == 1 else ["more"]
    return Kernel(
        name=", ".join(words),
        rows=math.prod(output.dims) / output.dims[1],
        columns=channels,
        depth=math.prod(window),
    )


def measured_as(part: Graph, rewrite: Rewrite, tables: Tables) -> Kernel | None:
    """Return what a part with a contraction is measured as, if it is."""
    point = point_of(part, rewrite)
    if point is not None or contraction_of(part, rewrite) is None:
        return point
    return kernels.kernel_of(part, tables)
