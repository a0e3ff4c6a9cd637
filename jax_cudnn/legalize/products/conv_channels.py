# SPDX-License-Identifier: Apache-2.0
"""Rewrites convolutions of few channels as ones of more: the first layers of networks.

cuDNN's engines load 8 channels or more at once. Of images of fewer, such as 3, they
read zeros for the most part, which are written out for them. These images are written
with more channels instead, in one of three ways. None multiplies an element by a zero
that the convolution does not have, but for those of its padding: NaN and infinities
stay where they are.

* Patches: where windows are whole steps, such as 4 x 4 in steps of 4, the elements
  within a step become channels. An image of 224 x 224 x 3 becomes one of 56 x 56 x 48,
  in which a window is a single element.
* Windows, for gradients of filters: all that a window reads becomes channels of each
  place, and the gradient is a product. Only where x is then no larger than the other
  operand.
* Rows: what a window reads along the last axis becomes channels of each place. Of a
  window of 7 x 7, one of 7 x 1 over 21 channels is left.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp

from jax_cudnn.graph import ConvAttributes, Graph, Node, Tensor
from jax_cudnn.graph.products.conv import TRIPLES, arrays_in, conv_attributes
from jax_cudnn.graph.windows import dilated
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.images import add_ends
from jax_cudnn.legalize.common.layout import (
    ELEMENTS_PER_LOAD,
    channels_last,
    rounded_up,
)

ChannelRewrite = Literal["patches", "windows", "rows"]

# Longer rows make an array of many times x's size, and a program of as many slices.
_LONGEST_ROW = 7
# Places in an image are counted in 32 bits.
_LARGEST_IMAGE = 2**31 - 1


def can_have_rows(graph: Graph, node: Node) -> bool:
    """Whether rows can be channels, with fewer zeros to be multiplied."""
    x, w, _ = arrays_in(graph, node)
    _, c, *window = w.dims
    unit = ELEMENTS_PER_LOAD.get(w.dtype, 1)
    whole = rounded_up(c, unit) * math.prod(window)
    rows = rounded_up(c * window[-1], unit) * math.prod(window[:-1])
    # The sum of x's gradient over what windows share would be rounded on its way.
    is_sum = node.kind == "conv_dgrad"
    is_short = window[-1] <= _LONGEST_ROW
    return not is_sum and is_short and rows < whole and _is_of_few(graph, node, x, w)


def more_channels(graph: Graph, node: Node) -> ChannelRewrite | None:
    """Return how x can be written with more channels; the node is the convolution.

    x has to be an operand of the kernel, or its only result.
    """
    attributes = conv_attributes(node)
    x, w, output = arrays_in(graph, node)
    if not _is_of_few(graph, node, x, w):
        return None
    outer, c, *window = w.dims
    unit = ELEMENTS_PER_LOAD.get(w.dtype, 1)
    if _has_patches(window, attributes):
        step = math.prod(attributes.window_strides)
        folded = rounded_up(c * step, unit) * math.prod(window) // step
        # Fewer zeros are multiplied, or no more.
        whole = rounded_up(c, unit) * math.prod(window)
        return "patches" if folded <= whole else None
    if node.kind == "conv_wgrad" and math.prod(window) > 1:
        channels = rounded_up(c * math.prod(window), unit)
        size = c * math.prod(_reach(attributes, w, output))
        if channels <= rounded_up(outer, unit) and size <= _LARGEST_IMAGE:
            return "windows"
    return "rows" if can_have_rows(graph, node) else None


def _is_of_few(graph: Graph, node: Node, x: Tensor, w: Tensor) -> bool:
    """Whether channels do not fill a load, and x is at an end of the kernel."""
    attributes = conv_attributes(node)
    is_forward = node.kind == "conv_fprop"
    ends = {*graph.inputs} if is_forward else {*graph.inputs, *graph.outputs}
    if not {x.name, w.name} <= ends or not (is_forward or len(graph.nodes) == 1):
        return False
    c = w.dims[1]
    is_few = x.dims[1] == c < ELEMENTS_PER_LOAD.get(w.dtype, 1)
    return is_few and {*attributes.lhs_dilation} == {1}


def _has_patches(window: Sequence[int], attributes: ConvAttributes) -> bool:
    """Whether windows are whole steps, and some step is longer than 1."""
    steps = attributes.window_strides
    are_whole = all(not size % step for size, step in zip(window, steps, strict=True))
    return are_whole and max(steps) > 1 and {*attributes.rhs_dilation} == {1}


def _reach(attributes: ConvAttributes, w: Tensor, output: Tensor) -> list[int]:
    """Return how much of each axis all windows read, with x's padding."""
    return [
        dilated(size, hole) + dilated(count, step) - 1
        for hole, size, step, count in zip(
            attributes.rhs_dilation,
            w.dims[2:],
            attributes.window_strides,
            output.dims[2:],
            strict=True,
        )
    ]


def add_channels(editor: GraphEditor) -> None:
    """Write x and the filters with more channels."""
    rewrite = more_channels(editor.graph, editor.main)
    x, w, _ = names = [editor.roles[role] for role in TRIPLES[editor.main.kind]]
    for name in (x, w):
        editor.reorder(name, channels_last(len(editor.tensors[name].dims)))
    if rewrite == "patches":
        _fold_steps(editor, *names)
    elif rewrite == "windows":
        _spread_windows(editor, *names)
    else:
        _spread_rows(editor, *names)


def _fit(editor: GraphEditor, x: str, reach: Sequence[int]) -> None:
    """Give x its padding, and cut off what no window reads."""
    attributes = conv_attributes(editor.main)
    sizes, lows = editor.tensors[x].dims[2:], attributes.padding_low
    add_ends(
        editor,
        x,
        [
            (low, whole - low - size)
            for low, whole, size in zip(lows, reach, sizes, strict=True)
        ],
    )


def _step_by_one(editor: GraphEditor) -> None:
    """Let windows be next to each other, without padding."""
    attributes = conv_attributes(editor.main)
    once = (1,) * len(attributes.window_strides)
    none = (0,) * len(once)
    editor.set_attributes(
        replace(
            attributes,
            window_strides=once,
            rhs_dilation=once,
            padding_low=none,
            padding_high=none,
        )
    )


# --- patches --------------------------------------------------------------------------


def _fold_steps(editor: GraphEditor, x: str, w: str, output: str) -> None:
    attributes = conv_attributes(editor.main)
    steps = attributes.window_strides
    # All that the windows read: more than x has, with its padding, or less.
    _fit(editor, x, _reach(attributes, editor.tensors[w], editor.tensors[output]))
    for name in (x, w):
        _fold(editor, name, steps)
    _step_by_one(editor)
    steps_text = " x ".join(map(str, steps))
    editor.notes.append(f"what lies within steps of {steps_text} is channels of {x}")


def _fold(editor: GraphEditor, name: str, steps: Sequence[int]) -> None:
    """Make channels of what lies within a step, of images with channels last."""
    # Images (n, 6, 8, 3), channels last, with strides of 2 x 2: (n, 3, 2, 4, 2, 3) is
    # transposed to (n, 3, 4, 2, 2, 3) and reshaped to (n, 3, 4, 12). Windows of 4 x 4
    # with stride 2 become windows of 2 x 2 with stride 1 and 12 channels.
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
    # Images (n, y, 9, 3), channels last, with windows of 5 and stride 2 along the last
    # axis: there are 3 windows, which read 0:5, 2:7 and 4:9. They become (n, y, 3, 15),
    # the 5 x 3 elements that each window reads.
    attributes = conv_attributes(editor.main)
    image, filters = editor.tensors[x], editor.tensors[w]
    (*_, size), count = filters.dims, editor.tensors[output].dims[-1]
    step, hole = attributes.window_strides[-1], attributes.rhs_dilation[-1]
    low = attributes.padding_low[-1]
    ends = [(0, 0)] * (len(image.dims) - 3)
    *_, reach = _reach(attributes, filters, editor.tensors[output])
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
    attributes = conv_attributes(editor.main)
    filters, result = editor.tensors[w], editor.tensors[output]
    counts, window = result.dims[2:], filters.dims[2:]
    steps, holes = attributes.window_strides, attributes.rhs_dilation
    _fit(editor, x, _reach(attributes, filters, result))
    image = editor.tensors[x]
    n, c, *sizes = image.dims
    read = c * math.prod(window)
    channels = rounded_up(read, ELEMENTS_PER_LOAD.get(image.dtype, 1))
    spread = replace(image, dims=(n, channels, *counts))

    def windows(x: jax.Array) -> jax.Array:
        # A 3 x 3 window of 2 channels without holes: channel 11 = (1 * 3 + 2) * 2 + 1
        # of the result is channel 1 at row 1, column 2 of the window. For output
        # position (i, j) that is row i * stride + 1, column j * stride + 2 of the
        # image.
        # Where each element is in an image. XLA computes it as it reads.
        number = functools.partial(
            jax.lax.broadcasted_iota, jnp.int32, (*counts, channels)
        )
        channel, axes = number(len(counts)), range(len(counts))
        places, within, stride = channel % c, channel // c, c
        for axis in reversed(axes):
            place = within % window[axis] * holes[axis] + number(axis) * steps[axis]
            places, within = places + place * stride, within // window[axis]
            stride *= sizes[axis]
        images = jnp.reshape(x, (n, stride))
        found = images.at[:, places.ravel()].get(mode="promise_in_bounds")
        found = jnp.reshape(found, spread.stored_shape)
        # Zeros fill the last load.
        return jnp.where(channel < read, found, jnp.zeros((), x.dtype))

    editor.rearrange(x, spread, windows)
    # Channels come last in memory, after the window.
    small = replace(filters, dims=(filters.dims[0], channels, *(1 for _ in counts)))
    editor.rearrange(
        w, small, back=lambda w: jnp.reshape(w[..., :read], filters.stored_shape)
    )
    _step_by_one(editor)
    editor.notes.append(f"all that a window reads is channels of {x}")
