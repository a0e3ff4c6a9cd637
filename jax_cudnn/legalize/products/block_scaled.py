# SPDX-License-Identifier: Apache-2.0
"""Rewrites block-scaled matmuls for cuDNN; letters and roles as in node_kinds.json.

cuDNN reads scales in tiles of 128 rows by 4 blocks. Rows, columns and blocks that do
not fill tiles are padded: numbers with zeros, scales with ones. Both operands are
stored along the contraction, as numbers of 4 bits have to be (9.27, "Sub-byte
block-scale GEMM requires A=RowMajor, B=ColumnMajor").
"""

import jax
import jax.numpy as jnp

from jax_cudnn.graph import BlockScaledAttributes, Graph, Target
from jax_cudnn.graph.products.block_scaled_matmul import TILE_BLOCKS, TILE_ROWS
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import Legalization
from jax_cudnn.reference.products.block_scaled import tiled

# How the operands are stored: the contraction last.
_STORED = {"a": (0, 1, 2), "b": (0, 2, 1)}


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one block-scaled matmul."""
    del target
    editor = GraphEditor.by_role(graph)
    (_, m, blocks), n = editor.tensors["scale_a"].dims, editor.tensors["b"].dims[2]
    block = editor.tensors["a"].dims[2] // max(blocks, 1)
    m, n = (-(-size // TILE_ROWS) * TILE_ROWS for size in (m, n))
    blocks = -(-blocks // TILE_BLOCKS) * TILE_BLOCKS
    is_padded = False
    for side, order in _STORED.items():
        rows = {"a": m, "b": n}[side]
        for name, size in ((side, blocks * block), (f"scale_{side}", blocks)):
            editor.reorder(name, order)
            dims = editor.tensors[name].dims
            full = (dims[0], *((rows, size)[axis - 1] for axis in order[1:]))
            is_padded |= full != dims
            _fill(editor, name, full, is_scale=name != side)
    output = editor.tensors["output"]
    editor.pad("output", {1: m, 2: n})
    if output.order != (0, 1, 2):
        editor.reorder("output", (0, 1, 2))
    editor.set_attributes(BlockScaledAttributes(is_tiled=True))
    editor.notes.append("scales are stored in tiles of 128 x 4 before the kernel")
    if is_padded:
        editor.notes.append(
            "operands are padded: rows and columns to multiples of 128, the "
            f"contraction to one of {TILE_BLOCKS * block}"
        )
    return Legalization(candidates=(editor.finish(),))


def _fill(
    editor: GraphEditor, name: str, dims: tuple[int, ...], *, is_scale: bool
) -> None:
    """Pad an operand to dims that fill tiles; scales are then stored in these."""
    tensor = editor.tensors[name]
    padded = type(tensor)(name=name, dtype=tensor.dtype, dims=dims, order=tensor.order)
    extra = [
        (0, to - size, 0)
        for size, to in zip(tensor.stored_shape, padded.stored_shape, strict=True)
    ]

    def into(x: jax.Array) -> jax.Array:
        # f8_e8m0fnu has no zero.
        filling = jnp.ones((), x.dtype) if is_scale else jnp.zeros((), x.dtype)
        x = jax.lax.pad(x, filling, extra)
        return tiled(x) if is_scale else x

    editor.rearrange(name, padded, into)
