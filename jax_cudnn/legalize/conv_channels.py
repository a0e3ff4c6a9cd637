# SPDX-License-Identifier: Apache-2.0
"""Convolutions of few channels, as ones of more: the first layers of networks.

cuDNN's engines load 8 channels or more at once. Of images of fewer, such as 3, they
read zeros for the most part, which are written out for them. These images are written
with more channels instead, in one of three ways. None multiplies an element by a zero
that the convolution does not have: NaN and infinities stay where they are.

* Patches: where windows are whole steps, such as 4 x 4 in steps of 4, the elements
  within a step become channels. An image of 224 x 224 x 3 becomes one of 56 x 56 x 48,
  in which a window is a single element.
* Rows: what a window reads along the last axis becomes channels of each place. Of a
  window of 7 x 7, one of 7 x 1 over 21 channels is left.
* Windows, for gradients of filters: all that a window reads becomes channels, and the
  gradient is a product. Only where x is then no larger than the other operand.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import ConvAttributes, Graph, Node
from jax_cudnn.graph.conv import TRIPLES
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.legalize.editor import GraphEditor
from jax_cudnn.legalize.images import add_ends
from jax_cudnn.legalize.layout import ELEMENTS_PER_LOAD, channels_last, rounded_up

# Longer rows make an array of many times x's size, and a program of as many slices.
_LONGEST_ROW = 7
# With its padding, it has fewer than 2^31 elements.
_LARGEST_IMAGE = 2**30
# What was measured: dtypes, and channels.
_DTYPES = ("bf16", "f16")
MOST_MEASURED = 4


def can_have_more(graph: Graph, node: Node) -> bool:
    """Whether x can be written with more channels; the node computes the convolution.

    x has to be an operand of the kernel, or its only result, and fewer zeros are to be
    multiplied then.
    """
    attributes, roles = node.attributes, roles_in(graph, node)
    assert isinstance(attributes, ConvAttributes)
    x, w, _ = (roles[role] for role in TRIPLES[node.kind])
    is_forward = node.kind == "conv_fprop"
    ends = {*graph.inputs} if is_forward else {*graph.inputs, *graph.outputs}
    if not {x.name, w.name} <= ends or not (is_forward or len(graph.nodes) == 1):
        return False
    channels, (_, c, *window) = x.dims[1], w.dims
    unit = ELEMENTS_PER_LOAD.get(w.dtype, 1)
    if channels != c or c >= unit or {*attributes.lhs_dilation} != {1}:
        return False
    whole = rounded_up(c, unit) * math.prod(window)
    if _has_patches(window, attributes):
        step = math.prod(attributes.window_strides)
        return rounded_up(c * step, unit) * math.prod(window) // step <= whole
    if node.kind == "conv_wgrad" and _has_small_windows(graph, node):
        return True
    # The sum of x's gradient over what windows share would be rounded on its way.
    rows = rounded_up(c * window[-1], unit) * math.prod(window[:-1])
    return node.kind != "conv_dgrad" and window[-1] <= _LONGEST_ROW and rows < whole


def is_faster_with_more(graph: Graph, node: Node) -> bool:
    """Whether x can be written so, and convolutions like this one were faster so.

    These were patches, convolutions over rows, and gradients of filters over windows,
    of 1 to 4 channels in 16 bits. For other gradients of filters, and for windows of
    one channel along two axes in steps of 1, cuDNN's first plan is often a slow one
    (docs/benchmarks/conv_ways.md).
    """
    attributes = node.attributes
    assert isinstance(attributes, ConvAttributes)
    filters = roles_in(graph, node)[TRIPLES[node.kind][1]]
    _, c, *window = filters.dims
    is_measured = filters.dtype in _DTYPES and c <= MOST_MEASURED and len(window) >= 2
    is_fast = node.kind == "conv_fprop" or _has_patches(window, attributes)
    if node.kind == "conv_wgrad" and _has_small_windows(graph, node):
        is_fast |= c > 1 or len(window) > 2 or max(attributes.window_strides) > 1
    return is_measured and is_fast and can_have_more(graph, node)


def _has_patches(window: Sequence[int], attributes: ConvAttributes) -> bool:
    """Whether windows are whole steps, and some step is longer than 1."""
    steps = attributes.window_strides
    are_whole = all(not size % step for size, step in zip(window, steps, strict=True))
    return are_whole and max(steps) > 1 and {*attributes.rhs_dilation} == {1}


def _has_small_windows(graph: Graph, node: Node) -> bool:
    """Whether a window has more than one element, and no more than there are filters.

    In loads that are full. Places in an image are counted in 32 bits.
    """
    x, w, _ = (roles_in(graph, node)[role] for role in TRIPLES[node.kind])
    outer, c, *window = w.dims
    unit = ELEMENTS_PER_LOAD.get(w.dtype, 1)
    whole = rounded_up(c * math.prod(window), unit)
    is_small = math.prod(window) > 1 and whole <= rounded_up(outer, unit)
    return is_small and math.prod(x.dims[1:]) <= _LARGEST_IMAGE


def add_channels(editor: GraphEditor) -> None:
    """Write x and the filters with more channels."""
    attributes = editor.main.attributes
    assert isinstance(attributes, ConvAttributes)
    x, w, output = (editor.roles[role] for role in TRIPLES[editor.main.kind])
    for name in (x, w):
        editor.reorder(name, channels_last(len(editor.tensors[name].dims)))
    if _has_patches(editor.tensors[w].dims[2:], attributes):
        _fold_steps(editor, x, w, output)
    elif editor.main.kind == "conv_wgrad" and _has_small_windows(
        editor.graph, editor.main
    ):
        _spread_windows(editor, x, w, output)
    else:
        _spread_rows(editor, x, w, output)


# --- patches --------------------------------------------------------------------------


def _fold_steps(editor: GraphEditor, x: str, w: str, output: str) -> None:
    attributes = editor.main.attributes
    assert isinstance(attributes, ConvAttributes)
    steps, low = attributes.window_strides, attributes.padding_low
    window, places = editor.tensors[w].dims[2:], editor.tensors[output].dims[2:]
    # All that the windows read: more than x has, with its padding, or less.
    read = [
        size + step * (count - 1)
        for size, step, count in zip(window, steps, places, strict=True)
    ]
    sizes = editor.tensors[x].dims[2:]
    add_ends(
        editor,
        x,
        [(a, n - a - size) for a, n, size in zip(low, read, sizes, strict=True)],
    )
    for name in (x, w):
        _fold(editor, name, steps)
    once, none = (1,) * len(steps), (0,) * len(steps)
    editor.set_attributes(
        replace(attributes, window_strides=once, padding_low=none, padding_high=none)
    )
    told = " x ".join(map(str, steps))
    editor.notes.append(f"what lies within steps of {told} is channels of {x}")


def _fold(editor: GraphEditor, name: str, steps: Sequence[int]) -> None:
    """Make channels of what lies within a step, of images with channels last."""
    tensor = editor.tensors[name]
    n, c, *sizes = tensor.dims
    counts = [size // step for size, step in zip(sizes, steps, strict=True)]
    axes = range(len(steps))
    pairs = [each for pair in zip(counts, steps, strict=True) for each in pair]
    first, last = 0, 1 + len(pairs)
    order = [first, *(1 + 2 * i for i in axes), *(2 + 2 * i for i in axes), last]
    inverse = [order.index(axis) for axis in range(len(order))]
    folded = replace(tensor, dims=(n, c * math.prod(steps), *counts))

    def into(x: jax.Array) -> jax.Array:
        x = jnp.transpose(jnp.reshape(x, (n, *pairs, c)), order)
        return jnp.reshape(x, folded.stored_shape)

    def back(x: jax.Array) -> jax.Array:
        x = jnp.transpose(jnp.reshape(x, (n, *counts, *steps, c)), inverse)
        return jnp.reshape(x, tensor.stored_shape)

    editor.rearrange(name, folded, into, back)


# --- rows -----------------------------------------------------------------------------


def _spread_rows(editor: GraphEditor, x: str, w: str, output: str) -> None:
    attributes = editor.main.attributes
    assert isinstance(attributes, ConvAttributes)
    image, filters = editor.tensors[x], editor.tensors[w]
    (*_, size), count = filters.dims, editor.tensors[output].dims[-1]
    step, hole = attributes.window_strides[-1], attributes.rhs_dilation[-1]
    low = attributes.padding_low[-1]
    ends = [(0, 0)] * (len(image.dims) - 3)
    reach = hole * (size - 1) + step * (count - 1) + 1
    add_ends(editor, x, [*ends, (low, reach - low - image.dims[-1])])
    n, c, *sizes = image.dims
    spread = replace(editor.tensors[x], dims=(n, size * c, *sizes[:-1], count))

    def rows(x: jax.Array) -> jax.Array:
        firsts = (hole * i for i in range(size))
        last = step * (count - 1) + 1
        seen = (
            jax.lax.slice_in_dim(x, first, first + last, step, -2) for first in firsts
        )
        return jnp.concatenate([*seen], -1)

    # x is an operand: of its gradient, places that windows share would be sums.
    editor.rearrange(x, spread, rows)
    o, _, *window = filters.dims
    taller = replace(filters, dims=(o, size * c, *window[:-1], 1))
    # Channels come last in memory, after the window's last axis: the same array.
    editor.rearrange(
        w,
        taller,
        lambda stored: jnp.reshape(stored, taller.stored_shape),
        lambda stored: jnp.reshape(stored, filters.stored_shape),
    )
    once = {
        "window_strides": (*attributes.window_strides[:-1], 1),
        "rhs_dilation": (*attributes.rhs_dilation[:-1], 1),
        "padding_low": (*attributes.padding_low[:-1], 0),
        "padding_high": (*attributes.padding_high[:-1], 0),
    }
    editor.set_attributes(replace(attributes, **once))
    editor.notes.append(f"what windows read along the last axis is channels of {x}")


# --- windows --------------------------------------------------------------------------


def _spread_windows(editor: GraphEditor, x: str, w: str, output: str) -> None:
    attributes = editor.main.attributes
    assert isinstance(attributes, ConvAttributes)
    image, filters = editor.tensors[x], editor.tensors[w]
    counts, window = editor.tensors[output].dims[2:], filters.dims[2:]
    steps, holes = attributes.window_strides, attributes.rhs_dilation
    reach = [
        hole * (size - 1) + step * (count - 1) + 1
        for hole, size, step, count in zip(holes, window, steps, counts, strict=True)
    ]
    add_ends(
        editor,
        x,
        [
            (low, whole - low - size)
            for low, whole, size in zip(
                attributes.padding_low, reach, image.dims[2:], strict=True
            )
        ],
    )
    n, c, *sizes = editor.tensors[x].dims
    taken = c * math.prod(window)
    channels = rounded_up(taken, ELEMENTS_PER_LOAD.get(image.dtype, 1))
    spread = replace(editor.tensors[x], dims=(n, channels, *counts))

    def windows(x: jax.Array) -> jax.Array:
        # Where each element is in an image. XLA computes it as it reads.
        number = functools.partial(
            jax.lax.broadcasted_iota, jnp.int32, (*counts, channels)
        )
        places, within, stride = number(len(counts)) % c, number(len(counts)) // c, c
        for axis in reversed(range(len(counts))):
            place = within % window[axis] * holes[axis] + number(axis) * steps[axis]
            places, within = places + place * stride, within // window[axis]
            stride *= sizes[axis]
        images = jnp.reshape(x, (n, stride))
        read = images.at[:, places.ravel()].get(mode="promise_in_bounds")
        read = jnp.reshape(read, spread.stored_shape)
        # What fills the last load.
        return jnp.where(number(len(counts)) < taken, read, jnp.zeros((), x.dtype))

    def narrow(w: jax.Array) -> jax.Array:
        return jnp.reshape(w[..., :taken], filters.stored_shape)

    editor.rearrange(x, spread, windows)
    once, none = (1,) * len(counts), (0,) * len(counts)
    small = replace(filters, dims=(filters.dims[0], channels, *once))
    # Channels come last in memory, after the window.
    editor.rearrange(w, small, back=narrow)
    editor.set_attributes(
        replace(
            attributes,
            window_strides=once,
            rhs_dilation=once,
            padding_low=none,
            padding_high=none,
        )
    )
    editor.notes.append(f"all that a window reads is channels of {x}")
