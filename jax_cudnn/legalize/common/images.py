# SPDX-License-Identifier: Apache-2.0
"""Gives images, (n, c, *y), two spatial axes with channels last, as cuDNN needs them.

For convolutions and pooling. The lists of the main node's attributes have an entry for
each spatial axis.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph.kinds import kind_named
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.layout import channels_last


def add_spatial_axis(editor: GraphEditor) -> None:
    """Give images of one spatial axis another before it, of size 1."""
    if all(len(tensor.dims) != 3 for tensor in editor.tensors.values()):
        return
    for name, tensor in list(editor.tensors.items()):
        # The new axis 2 is stored just before the old one.
        order = [axis + (axis >= 2) for axis in tensor.order]
        order.insert(order.index(3), 2)
        dims = (*tensor.dims[:2], 1, *tensor.dims[2:])
        wider = replace(tensor, dims=dims, order=tuple(order))
        editor.rearrange(
            name, wider, _reshaper(wider.stored_shape), _reshaper(tensor.stored_shape)
        )
    node = editor.main
    attributes: Any = node.attributes
    longer = {
        name: (0 if "padding" in name else 1, *getattr(attributes, name))
        for name, field in kind_named(node.kind).row.attributes.items()
        if field.letter
    }
    editor.set_attributes(replace(attributes, **longer))


def _reshaper(shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.reshape(x, shape)


def store_channels_last(editor: GraphEditor) -> None:
    """Transpose what is not stored with its channels last."""
    for name, tensor in list(editor.tensors.items()):
        order = channels_last(len(tensor.dims))
        if tensor.order == order:
            continue
        moved = [axis for axis in tensor.order if tensor.dims[axis] != 1]
        stays = moved == [axis for axis in order if tensor.dims[axis] != 1]
        if not stays and name in (*editor.inputs, *editor.outputs):
            editor.notes.append(
                f"{name} is transposed to channels-last, in which cuDNN computes"
            )
        editor.reorder(name, order)


def add_ends(editor: GraphEditor, name: str, ends: list[tuple[int, int]]) -> None:
    """Add zeros at both ends of each spatial axis of a tensor, or cut there."""
    tensor = editor.tensors[name]
    both = [(0, 0), (0, 0), *ends]
    dims = tuple(size + sum(pair) for size, pair in zip(tensor.dims, both, strict=True))
    widths = [(*both[axis], 0) for axis in tensor.order]
    inverse = [(-low, -high, 0) for low, high, _ in widths]
    editor.rearrange(
        name,
        replace(tensor, dims=dims),
        lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), widths),
        lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), inverse),
    )
