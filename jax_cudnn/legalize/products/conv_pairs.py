# SPDX-License-Identifier: Apache-2.0
"""Rewrites filter gradients of 24 to 32 channels: two neighbouring places are one.

A tile of cuDNN's kernels has at least 64 columns, and 32 channels leave half of it
empty. Two places along the last axis are taken as one with twice the channels, of x
and of the result. In memory, with the channels last, these are the same arrays. Each
filter then appears twice in the gradient, which is summed. What else is in it is left
out, so that no NaN gets where it does not belong. It is computed in vain, which is
faster all the same (docs/internals/measured/conv_ways.md).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import ConvAttributes, Graph, Node, Tensor
from jax_cudnn.graph.products.conv import TRIPLES, arrays_in, conv_attributes
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.layout import channels_last

# The name of the rewrite with pairs.
PAIRS = "pairs"
# Channels that leave a tile half empty and fill loads. With 16, pairs were slower.
_LEAST, _MOST, _UNIT = 24, 32, 8


def pairs(graph: Graph, node: Node) -> bool:
    """Whether places can be taken in pairs; the node computes the convolution."""
    if node.kind != "conv_wgrad" or len(graph.nodes) > 1:
        return False
    attributes = conv_attributes(node)
    x, w, output = arrays_in(graph, node)
    (o, c, *window), (*_, size), (*_, places) = w.dims, x.dims, output.dims
    once = (
        *attributes.window_strides,
        *attributes.lhs_dilation,
        *attributes.rhs_dilation,
    )
    blocks = _Blocks.of(attributes, window[-1], size, places)
    return (
        x.dtype == w.dtype == output.dtype
        and x.dims[1] == c
        and not (c % _UNIT or o % _UNIT or size % 2 or places % 2)
        and _LEAST <= min(o, c) <= max(o, c) <= _MOST
        and {*once} == {1}
        # Otherwise x would have to be written once more.
        and blocks.low == blocks.high >= 0
        and len(window) >= 2
        and window[-1] >= 3
    )


def pair_places(editor: GraphEditor) -> None:
    """Take places in pairs for the gradient of the filters."""
    attributes = conv_attributes(editor.main)
    x, w, output = (editor.roles[role] for role in TRIPLES["conv_wgrad"])
    filters = editor.tensors[w]
    out, c, *window, last = filters.dims
    blocks = _Blocks.of(
        attributes, last, editor.tensors[x].dims[-1], editor.tensors[output].dims[-1]
    )
    for name in (x, output):
        _pair(editor, name)
    paired = replace(
        filters,
        dims=(2 * out, 2 * c, *window, blocks.count),
        order=tuple(range(len(filters.dims))),
    )
    editor.rearrange(w, paired, back=_summed(filters, attributes, blocks))
    low = (*attributes.padding_low[:-1], blocks.low)
    high = (*attributes.padding_high[:-1], blocks.high)
    editor.set_attributes(replace(attributes, padding_low=low, padding_high=high))
    editor.notes.append(
        f"places of the last axis are taken in pairs, and the two halves of {w} summed"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks:
    """The window over pairs of places: its length, and x's padding."""

    count: int
    low: int
    high: int

    @classmethod
    def of(
        cls, attributes: ConvAttributes, window: int, size: int, places: int
    ) -> "_Blocks":
        before = attributes.padding_low[-1]
        low = -(-before // 2)
        count = low + (window - before) // 2 + 1
        return cls(count=count, low=low, high=(places - size) // 2 - low + count - 1)


def _pair(editor: GraphEditor, name: str) -> None:
    """Make channels of two neighbours, which is what is stored already."""
    editor.reorder(name, channels_last(len(editor.tensors[name].dims)))
    tensor = editor.tensors[name]
    n, c, *sizes, last = tensor.dims
    paired = replace(tensor, dims=(n, 2 * c, *sizes, last // 2))
    editor.rearrange(
        name,
        paired,
        lambda x: jnp.reshape(x, paired.stored_shape),
        lambda x: jnp.reshape(x, tensor.stored_shape),
    )


def _summed(
    filters: Tensor, attributes: ConvAttributes, blocks: _Blocks
) -> Callable[[jax.Array], jax.Array]:
    """Return what adds up, for each filter, where the two places of a pair have it."""
    out, c, *window, last = filters.dims
    before = attributes.padding_low[-1]

    def back(stored: jax.Array) -> jax.Array:
        w = jnp.reshape(stored, (2, out, 2, c, *window, blocks.count))
        is_wide = jnp.finfo(w.dtype).bits >= 32
        w = w if is_wide else w.astype(jnp.float32)
        found: list[jax.Array] = []
        for place in range(last):
            # Place 0 of a window of 3 with padding 1: the first output of a pair reads
            # the element before the pair, which is the second half of the previous
            # pair: a=-1, r=1. The second output reads the first half of its own pair:
            # b=0, s=0.
            (a, r), (b, s) = (divmod(place + p - before, 2) for p in range(2))
            first = w[0, :, r, ..., a + blocks.low]
            found.append(first + w[1, :, s, ..., b + blocks.low])
        summed = jnp.stack(found, -1).astype(stored.dtype)
        return jnp.transpose(summed, filters.order)

    return back
