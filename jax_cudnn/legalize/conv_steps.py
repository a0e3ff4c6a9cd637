# SPDX-License-Identifier: Apache-2.0
"""Strided convolutions of few channels, as ones of more channels without strides.

The first layer of a network reads images of 1 to 4 channels in steps. cuDNN's engines
load 8 or more channels at once, so they would read zeros for the most part. Instead,
the elements that lie within a step become channels: for steps of 4, an image of 224 x
224 x 3 is one of 56 x 56 x 48, in which a window of 4 x 4 is a single element. Where a
window is no multiple of the step, zeros complete it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import ConvAttributes, Graph, Node
from jax_cudnn.graph.conv import TRIPLES
from jax_cudnn.legalize.editor import GraphEditor
from jax_cudnn.legalize.images import add_ends
from jax_cudnn.legalize.layout import ELEMENTS_PER_LOAD, channels_last, rounded_up


def folds(graph: Graph, node: Node) -> bool:
    """Whether a convolution is faster with its steps as channels; the node computes it.

    So it is if it multiplies less by zeros that way. x has to be an operand of the
    kernel, or its only result. On an H100 with cuDNN 9.19, convolutions of 3 channels
    (7 x 7 in steps of 2, 4 x 4 in steps of 4, 16 x 16 in steps of 16) took 0.05 to 0.42
    of the time, their filters' gradients 0.02 to 0.6 with the best plans, and those of
    x 0.02 to 0.5 (bf16).
    """
    attributes, roles = node.attributes, {**dict(node.inputs), **dict(node.outputs)}
    assert isinstance(attributes, ConvAttributes)
    x, w, _ = (roles[role] for role in TRIPLES[node.kind])
    is_forward = node.kind == "conv_fprop"
    ends = {*graph.inputs} if is_forward else {*graph.inputs, *graph.outputs}
    if not {x, w} <= ends or not (is_forward or len(graph.nodes) == 1):
        return False
    channels, (_, c, *window) = graph.tensor(x).dims[1], graph.tensor(w).dims
    unit = ELEMENTS_PER_LOAD.get(graph.tensor(w).dtype, 1)
    steps = attributes.window_strides
    is_plain = {*attributes.lhs_dilation, *attributes.rhs_dilation} == {1}
    if channels != c or not c % unit or not is_plain or max(steps) == 1:
        return False
    whole = rounded_up(c, unit) * math.prod(window)
    folded = rounded_up(c * math.prod(steps), unit) * math.prod(_blocks(window, steps))
    return folded <= whole


def _blocks(window: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Return the numbers of steps that a window reaches into."""
    return [math.ceil(size / step) for size, step in zip(window, steps, strict=True)]


def fold_steps(editor: GraphEditor) -> None:
    """Make channels of what lies within a step, of x and of the filters."""
    node, attributes = editor.main, editor.main.attributes
    assert isinstance(attributes, ConvAttributes)
    roles = {**dict(node.inputs), **dict(node.outputs)}
    x, w, output = (roles[role] for role in TRIPLES[node.kind])
    steps, low = attributes.window_strides, attributes.padding_low
    places, window = editor.tensors[output].dims[2:], editor.tensors[w].dims[2:]
    blocks = _blocks(window, steps)
    # All that the windows read: more than x has, with its padding, or less.
    read = [a + b - 1 for a, b in zip(places, blocks, strict=True)]
    x_ends = _ends(low, editor.tensors[x].dims[2:], read, steps)
    w_ends = _ends((0,) * len(steps), window, blocks, steps)
    for name, ends in ((x, x_ends), (w, w_ends)):
        editor.reorder(name, channels_last(len(steps) + 2))
        add_ends(editor, name, ends)
        _fold(editor, name, steps)
    once, none = (1,) * len(steps), (0,) * len(steps)
    editor.set_attributes(
        replace(attributes, window_strides=once, padding_low=none, padding_high=none)
    )
    told = " x ".join(map(str, steps))
    editor.notes.append(f"what lies within steps of {told} is channels of {x}")


def _ends(
    low: Sequence[int],
    sizes: Sequence[int],
    blocks: Sequence[int],
    steps: Sequence[int],
) -> list[tuple[int, int]]:
    """Return what is added at both ends of each axis to have so many whole steps."""
    return [
        (before, step * count - before - size)
        for before, size, count, step in zip(low, sizes, blocks, steps, strict=True)
    ]


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
