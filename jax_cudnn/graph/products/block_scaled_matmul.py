# SPDX-License-Identifier: Apache-2.0
"""The `block_scaled_matmul` node: a matmul of operands with a scale for each block.

Its tensors are described in node_kinds.json. A block is k neighbours along the
contraction, of which there are q. A stored number times the scale of its block is what
it stands for:

    output[m, n] = scale_output sum_qk a[m, qk] scale_a[m, q] b[qk, n] scale_b[q, n]

Sums are kept in f32. Numbers and scales are in f8_e4m3fn and f8_e8m0fnu in MXFP8, with
blocks of 32, and in f4_e2m1fn and f8_e4m3fn in NVFP4, with blocks of 16.

``is_tiled`` says that scales are stored as cuDNN's kernels read them: in tiles of 128
rows (or columns) by 4 blocks, row by row. A tile has the scale of its row 32 i + j and
its block p at [j, i, p]. Rows, columns and blocks fill their tiles then. The node has
no gradient: a cotangent has blocks of its own, along other axes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.description import describe
from jax_cudnn.graph.kinds import NodeKind, Roles, register_kind
from jax_cudnn.graph.shapes import result_dims
from jax_cudnn.graph.spec import Attributes, DTypeName, Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import single_node_graph

# Rows or columns, and blocks, of a tile of scales.
TILE_ROWS, TILE_BLOCKS = 128, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScaledAttributes(Attributes):
    """Whether scales are stored in tiles."""

    is_tiled: bool = False


def block_scaled_graph(inputs: Mapping[str, Tensor], dtype: DTypeName) -> Graph:
    """Build the one-node graph with a result of that dtype.

    ``inputs`` maps roles to tensors of the same name, in operand order.
    """
    attributes = BlockScaledAttributes()
    dims = result_dims(BLOCK_SCALED_MATMUL.row, "output", inputs, attributes)
    output = Tensor(name="output", dtype=dtype, dims=dims, order=(0, 1, 2))
    return single_node_graph(
        "block_scaled_matmul", inputs, {"output": output}, attributes
    )


def _check(roles: Roles, attributes: Attributes) -> None:
    assert isinstance(attributes, BlockScaledAttributes)
    (_, m, blocks), n = roles["scale_a"].dims, roles["b"].dims[2]
    is_whole = math.gcd(m, n) % TILE_ROWS == 0 and blocks % TILE_BLOCKS == 0
    if attributes.is_tiled and not is_whole:
        raise GraphError(
            f"block_scaled_matmul: {m} rows, {n} columns and {blocks} blocks do not "
            f"fill tiles of {TILE_ROWS} x {TILE_BLOCKS}"
        )


BLOCK_SCALED_MATMUL = register_kind(
    NodeKind(
        row=describe("block_scaled_matmul"),
        attributes=BlockScaledAttributes,
        check=_check,
    )
)
