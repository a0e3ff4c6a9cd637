# SPDX-License-Identifier: Apache-2.0
"""Matmuls of operands with a scale for each block, and tiles of scales.

The formula and the layout of tiles are in graph/products/block_scaled_matmul.py. A
number of 8 or 4 bits times its scale is exact in bf16, which every platform multiplies,
except where it is below bf16's smallest normal number.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_cudnn.graph.products.block_scaled_matmul import (
    TILE_BLOCKS,
    TILE_ROWS,
    BlockScaledAttributes,
)
from jax_cudnn.graph.spec import Attributes, Tensor

# A tile's rows are stored 32 apart: row 32 i + j is the i-th of four.
_FOUR = 4


def forward(
    attributes: Attributes,
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, Tensor],
) -> dict[str, jax.Array]:
    """Return the product, in f32."""
    del outputs
    assert isinstance(attributes, BlockScaledAttributes)
    # As (batch, rows or columns, contraction), in which blocks are side by side.
    a, scale_a = inputs["a"], inputs["scale_a"]
    b, scale_b = (jnp.swapaxes(inputs[role], 1, 2) for role in ("b", "scale_b"))
    if attributes.is_tiled:
        scale_a, scale_b = untiled(scale_a), untiled(scale_b)
    product = jnp.matmul(
        dequantized(a, scale_a),
        jnp.swapaxes(dequantized(b, scale_b), 1, 2),
        preferred_element_type=jnp.float32,
    )
    if (factor := inputs.get("scale_output")) is not None:
        product = product * factor
    return {"output": product}


def dequantized(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Return what numbers stand for, in bf16; blocks are side by side on the last axis.

    The scales have the axes of the numbers, and one entry for each block on the last.
    """
    *rows, blocks = scales.shape
    size = values.shape[-1] // blocks if blocks else 0
    wide = values.astype(jnp.bfloat16).reshape(*rows, blocks, size)
    return (wide * scales.astype(jnp.bfloat16)[..., None]).reshape(values.shape)


def tiled(scales: jax.Array) -> jax.Array:
    """Return scales (b, rows, blocks) stored in tiles, in an array of the same shape.

    The rows are multiples of 128 and the blocks of 4.
    """
    batch, rows, blocks = scales.shape
    split = scales.reshape(
        batch, -1, _FOUR, TILE_ROWS // _FOUR, blocks // TILE_BLOCKS, TILE_BLOCKS
    )
    return split.transpose(0, 1, 4, 3, 2, 5).reshape(batch, rows, blocks)


def untiled(scales: jax.Array) -> jax.Array:
    """Undo `tiled`."""
    batch, rows, blocks = scales.shape
    split = scales.reshape(
        batch, -1, blocks // TILE_BLOCKS, TILE_ROWS // _FOUR, _FOUR, TILE_BLOCKS
    )
    return split.transpose(0, 1, 4, 3, 2, 5).reshape(batch, rows, blocks)
