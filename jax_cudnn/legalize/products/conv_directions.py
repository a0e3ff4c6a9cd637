# SPDX-License-Identifier: Apache-2.0
"""Rewrites a convolution as the gradient of another one, and back.

Steps of x and zeros between its elements change places, and filters are flipped.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Node, Tensor
from jax_cudnn.graph.products.conv import TRIPLES, conv_attributes
from jax_cudnn.graph.windows import dilated
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.reference.products.contraction import exchanged


def is_transposed(editor: GraphEditor) -> bool:
    """Whether the convolution is the gradient of a strided one.

    With more padding than the window reaches, part of the result sees zeros only, for
    which the gradient of a convolution has no place.
    """
    attributes = conv_attributes(editor.main)
    window = editor.tensors[editor.roles[TRIPLES[editor.main.kind][1]]].dims[2:]
    reach = (
        dilated(size, hole) - 1
        for size, hole in zip(window, attributes.rhs_dilation, strict=True)
    )
    pads = zip(attributes.padding_low, attributes.padding_high, strict=True)
    is_plain = all(step == 1 for step in attributes.window_strides)
    return is_plain and all(
        max(pair) <= most for pair, most in zip(pads, reach, strict=True)
    )


def make_convolution(editor: GraphEditor) -> None:
    """Make a gradient in steps of 1 a convolution, if the filters have no holes."""
    attributes = conv_attributes(editor.main)
    once = {*attributes.window_strides, *attributes.rhs_dilation}
    if editor.main.kind == "conv_dgrad" and once == {1}:
        exchange_directions(editor)
        editor.notes.append(
            "the filters are flipped: the gradient is a convolution to cuDNN"
        )


def exchange_directions(editor: GraphEditor) -> None:
    """Make fprop with a dilated x the dgrad of a strided convolution, and back.

    The filters are flipped, and their in and out channels change places.
    """
    node = editor.main
    attributes = conv_attributes(editor.main)
    roles = editor.roles
    is_forward = node.kind == "conv_fprop"
    source = editor.tensors[roles["x" if is_forward else "grad_output"]]
    result = editor.tensors[roles["output" if is_forward else "grad_x"]]
    x = (source if is_forward else result).dims
    filters = editor.tensors[roles["w"]]
    groups = x[1] // filters.dims[1]
    editor.rearrange(
        roles["w"], _exchanged(filters, groups), lambda w: _flip(filters, groups, w)
    )
    editor.replace_main(
        Node.make(
            "conv_dgrad" if is_forward else "conv_fprop",
            {
                "grad_output" if is_forward else "x": source.name,
                "w": roles["w"],
            },
            {"grad_x" if is_forward else "output": result.name},
            attributes.of_other_direction(filters.dims[2:]),
        ),
    )


def exchange_arrays(editor: GraphEditor) -> None:
    """Have x and the output's gradient change places in the gradient of filters.

    The windows of the output's gradient then move over x in steps, where x had zeros
    between its elements.
    """
    node, roles = editor.main, editor.roles
    attributes = conv_attributes(node)
    filters = editor.tensors[roles["grad_w"]]
    groups = editor.tensors[roles["x"]].dims[1] // filters.dims[1]
    new = _exchanged(filters, groups)
    editor.rearrange(
        roles["grad_w"],
        new,
        back=lambda w: jnp.transpose(_flip(new, groups, w), filters.order),
    )
    editor.replace_main(
        Node.make(
            node.kind,
            {"x": roles["grad_output"], "grad_output": roles["x"]},
            {"grad_w": roles["grad_w"]},
            attributes.of_other_direction(filters.dims[2:]),
        )
    )


def _exchanged(filters: Tensor, groups: int) -> Tensor:
    """Return filters whose in and out channels have changed places."""
    out, channels, *window = filters.dims
    dims = (groups * channels, out // groups, *window)
    return replace(filters, dims=dims, order=tuple(range(len(dims))))


def _flip(filters: Tensor, groups: int, stored: jax.Array) -> jax.Array:
    """Return filters flipped in space, in and out channels of each group exchanged."""
    inverse = tuple(filters.order.index(axis) for axis in range(len(filters.order)))
    return exchanged(jnp.transpose(stored, inverse), groups)
