# SPDX-License-Identifier: Apache-2.0
"""Estimates from sizes alone which kernels take longest."""

import math

from jax_cudnn.graph import Graph, Node, is_anchor
from jax_cudnn.graph.kinds import roles_in, row_of
from jax_cudnn.graph.shapes import check_tensors, letters_of
from jax_cudnn.reference.dtypes import jax_dtype

# An H100 multiplies about so many numbers of 16 bits while it reads a byte.
_PER_BYTE = 150


def expected_bytes(part: Graph) -> float:
    """Return the bytes that a part's kernels move, its multiplications as bytes too.

    That is for putting parts in order. It knows nothing of caches, masks and dtypes.
    """
    moved = sum(
        math.prod(each.dims) * jax_dtype(each.dtype).itemsize
        for each in (*part.input_tensors, *part.output_tensors)
    )
    anchors = filter(is_anchor, part.nodes)
    return moved + sum(_multiplications(part, node) for node in anchors) / _PER_BYTE


def _multiplications(part: Graph, node: Node) -> int:
    row, roles = row_of(node), roles_in(part, node)
    sizes = check_tensors(row, roles, node.attributes)
    if row.windows:
        # One for each element of a window, at each place that a window has.
        inner = {inner for inner, _ in row.windows.values()}
        return math.prod(n for letter, n in sizes.items() if letter[0] not in inner)
    letters = {
        letter
        for role in [each.name for each in row.inputs if each.name in roles][:2]
        for axis in letters_of(row, role, roles)
        for letter in axis
    }
    return math.prod(sizes[letter] for letter in letters)
