# SPDX-License-Identifier: Apache-2.0
"""Reads the properties that a table's rows name of products by cuBLASLt."""

from dataclasses import dataclass

from jax_cudnn.graph import Graph, is_anchor, to_json
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.native import has_cublaslt_plan
from jax_cudnn.policy.products.properties import NARROW


@dataclass(frozen=True, slots=True)
class CublasLtProduct:
    """A product with an epilogue of cuBLASLt's.

    ``epilogue`` is the mode of its activation or activation's gradient, "" where there
    is none. ``gives_argument`` is whether the activation's argument is a result, too.
    ``bits`` are those of its operands, ``depth`` is the terms of a sum, and ``width``
    the lesser of its rows and columns.
    """

    epilogue: str
    gives_argument: bool
    bits: str
    depth: int
    width: int


def cublaslt_product(rewrite: Rewrite) -> CublasLtProduct | None:
    """Return the product that a rewrite of a part is, if cuBLASLt computes it."""
    graph = rewrite.graph
    if len(graph.nodes) > _MOST_NODES or graph.nodes[0].kind != "matmul":
        return None
    return _product(graph) if has_cublaslt_plan(to_json(graph)) else None


def _product(graph: Graph) -> CublasLtProduct:
    (node,) = filter(is_anchor, graph.nodes)
    roles = roles_in(graph, node)
    dtypes = {roles["a"].dtype, roles["b"].dtype}
    bits = "8 bits" if dtypes <= set(EIGHT_BIT) else "f32"
    bits = "16 bits" if dtypes <= set(NARROW) else bits
    modes = [getattr(each.attributes, "mode", "") for each in graph.nodes]
    activations = [mode for mode in modes if mode in _ACTIVATIONS]
    return CublasLtProduct(
        epilogue=activations[0] if activations else "",
        gives_argument=len(graph.outputs) > 1,
        bits=bits,
        depth=roles["a"].dims[2],
        width=min(roles["a"].dims[1], roles["b"].dims[2]),
    )


_ACTIVATIONS = ("relu", "gelu_tanh", "gelu_tanh_grad")
# Two factors, a bias, an activation and its argument, and two roundings.
_MOST_NODES = 8
