# SPDX-License-Identifier: Apache-2.0
"""Rewrites convolutions for cuDNN; letters and roles as in graph/products/conv.py.

What cuDNN's convolutions lack is added around them:

* one spatial axis becomes two, the first of size 1;
* arrays are transposed to channels-last, the layout of the fused engines;
* zeros between the elements of x make the convolution a gradient (dgrad) of another
  one, and x the output's gradient in that of filters, or are written out where that is
  not possible;
* padding that differs between the two ends, or cuts, is done on the array;
* channels are padded to what the engines load at once;
* groups are merged, or those of odd sizes padded (conv_groups.py), but for most
  depthwise convolutions (conv_depthwise.py);
* where channels are few, x is written with more of them (conv_channels.py);
* filters' gradients of few channels are computed for pairs of places (conv_pairs.py);
* operands of the epilogue have one value a channel, or one an element.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Tensor, is_anchor
from jax_cudnn.graph.products.conv import TRIPLES, conv_attributes
from jax_cudnn.graph.windows import dilated
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.images import (
    add_ends,
    add_spatial_axis,
    store_channels_last,
)
from jax_cudnn.legalize.common.layout import ELEMENTS_PER_LOAD, rounded_up
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.legalize.products import conv_depthwise, conv_groups
from jax_cudnn.legalize.products.conv_channels import add_channels, more_channels
from jax_cudnn.legalize.products.conv_directions import (
    exchange_arrays,
    exchange_directions,
    is_transposed,
)
from jax_cudnn.legalize.products.conv_groups import as_it_is
from jax_cudnn.legalize.products.conv_pairs import PAIRS, pair_places, pairs

# The name of the rewrite that leaves groups and places as they are.
PLAIN = "plain"


def candidates(graph: Graph) -> tuple[Rewrite, ...]:
    """Return the rewrites of a convolution with what surrounds it."""
    (node,) = filter(is_anchor, graph.nodes)
    if conv_depthwise.is_depthwise(graph, node):
        return _depthwise(graph)
    if conv_groups.channels_of(GraphEditor.of(graph))[0] > 1:
        return _in_groups(graph)
    rewrites: list[Rewrite | None] = []
    if (more := more_channels(graph, node)) is not None:
        rewrite = _candidate(graph, _pad_if_odd, first=add_channels)
        rewrites.append(rewrite and rewrite.named(more))
    if pairs(graph, node):
        paired = _candidate(graph, as_it_is, first=pair_places)
        # Both halves are rounded to the gradient's dtype before they are summed.
        rewrites.append(paired and replace(paired, rounds_sums=True).named(PAIRS))
    # The engines that take channels which do not fill a load are slow, and some of
    # cuDNN 9.19's give wrong results on an H200
    # (tests/products/gpu/test_fusion_numerics.py).
    plain = _candidate(graph, _pad_channels) or _candidate(graph, as_it_is)
    rewrites.append(plain and plain.named(PLAIN))
    return tuple(rewrite for rewrite in rewrites if rewrite is not None)


def _in_groups(graph: Graph) -> tuple[Rewrite, ...]:
    """Return the rewrites of a convolution in groups of several channels."""
    found: list[Rewrite] = []
    for each in conv_groups.group_rewrites(GraphEditor.of(graph)):
        rewrite = _candidate(graph, each.change, first=each.first)
        if rewrite is not None:
            found.append(rewrite.named(each.name))
    return tuple(found)


def _depthwise(graph: Graph) -> tuple[Rewrite, ...]:
    """Return the rewrites of a depthwise convolution."""
    changed = _candidate(graph, as_it_is, first=conv_depthwise.rewrite)
    same = _candidate(graph, as_it_is)
    assert changed is not None
    assert same is not None
    own = [same] if changed.graph == same.graph else [changed, same]
    merged = _candidate(graph, conv_groups.merge)
    return (
        *(rewrite.named(conv_depthwise.OWN) for rewrite in own),
        *([merged.named(conv_groups.MERGED)] if merged is not None else []),
    )


def _candidate(
    graph: Graph,
    change: Callable[[GraphEditor], bool],
    *,
    first: Callable[[GraphEditor], None] = lambda _: None,
) -> Rewrite | None:
    """Return a rewrite; None where the change has nothing to change.

    What comes ``first`` sees the padding as the graph has it.
    """
    editor = GraphEditor.of(graph)
    add_spatial_axis(editor)
    _complete_operands(editor)
    _write_out_lhs_dilation(editor)
    first(editor)
    _even_padding(editor)
    if not change(editor):
        return None
    store_channels_last(editor)
    return editor.finish()


def _pad_if_odd(editor: GraphEditor) -> bool:
    _pad_channels(editor)
    return True


def _complete_operands(editor: GraphEditor) -> None:
    """Broadcast what surrounds the kernel, but for one value a channel or in all.

    Operands with 1 along other axes plan, and give wrong results (cuDNN 9.19 on an
    H200: tests/products/gpu/test_fusion_numerics.py).
    """
    node = editor.main
    role = "grad_x" if node.kind == "conv_dgrad" else "output"
    if role not in editor.roles:
        return
    dims = editor.tensors[editor.roles[role]].dims
    vector = (1, dims[1], *(1,) * (len(dims) - 2))
    contracted = dict(node.inputs).values()
    for name in editor.inputs:
        taken = (dims, vector, (1,) * len(dims))
        if name not in contracted and editor.tensors[name].dims not in taken:
            editor.expand(name, dims)


def _set_attributes(editor: GraphEditor, **changes: tuple[int, ...]) -> None:
    editor.set_attributes(replace(conv_attributes(editor.main), **changes))


# --- dilation of x --------------------------------------------------------------------


def _write_out_lhs_dilation(editor: GraphEditor) -> None:
    attributes = conv_attributes(editor.main)
    if all(step == 1 for step in attributes.lhs_dilation):
        return
    node = editor.main
    if node.kind in ("conv_fprop", "conv_dgrad") and is_transposed(editor):
        exchange_directions(editor)
        editor.notes.append(
            "the filters are flipped: a dilated x is a gradient to cuDNN"
        )
        return
    # Nothing may follow: the kernel's filters have other axes than the gradient.
    if node.kind == "conv_wgrad" and len(editor.nodes) == 1 and is_transposed(editor):
        exchange_arrays(editor)
        editor.notes.append(
            "x and grad_output change places: a dilated x is a gradient to cuDNN"
        )
        return
    # With lhs_dilation=3, (a, b, c) is written as (a, 0, 0, b, 0, 0, c): 3 -> 7.
    # Zeros between the elements of x, written out; dgrad's are cut out again.
    name = editor.roles[TRIPLES[node.kind][0]]
    tensor = editor.tensors[name]
    spread = attributes.lhs_dilation
    dims = tuple(
        dilated(size, spread[axis - 2]) if axis >= 2 else size
        for axis, size in enumerate(tensor.dims)
    )
    gaps = [(0, 0, spread[axis - 2] - 1 if axis >= 2 else 0) for axis in tensor.order]
    steps = [spread[axis - 2] if axis >= 2 else 1 for axis in tensor.order]
    if name in editor.outputs or name in editor.inputs:
        editor.notes.append(f"the zeros of lhs_dilation are written into {name}")
    editor.rearrange(
        name,
        replace(tensor, dims=dims),
        lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), gaps),
        lambda x: jax.lax.slice(x, (0,) * x.ndim, x.shape, steps),
    )
    _set_attributes(editor, lhs_dilation=(1,) * len(spread))


# --- padding --------------------------------------------------------------------------


def _even_padding(editor: GraphEditor) -> None:
    """Pad x on the array where its two ends differ, and cut where padding is negative.

    What both ends have in common stays with cuDNN. x's gradient is cut, or filled up
    with zeros, to undo it.
    """
    attributes = conv_attributes(editor.main)
    pairs = list(zip(attributes.padding_low, attributes.padding_high, strict=True))
    common = tuple(max(min(low, high), 0) for low, high in pairs)
    ends = [(low - c, high - c) for (low, high), c in zip(pairs, common, strict=True)]
    if all(pair == (0, 0) for pair in ends):
        return
    if editor.main.kind == "conv_dgrad":
        name, done = editor.roles["grad_x"], "fitted"
        dims = editor.tensors[name].dims
        names = [
            each
            for each, tensor in editor.tensors.items()
            if _follows_result(editor, each, tensor, dims)
        ]
    else:
        name, done = editor.roles["x"], "padded"
        names = [name]
    for each in names:
        add_ends(editor, each, ends)
    editor.notes.append(f"{name} is {done} outside the kernel: its two ends differ")
    _set_attributes(editor, padding_low=common, padding_high=common)


def _follows_result(
    editor: GraphEditor, name: str, tensor: Tensor, dims: tuple[int, ...]
) -> bool:
    apart = {n for _, n in editor.main.inputs} | editor.constants
    return name not in apart and tensor.dims[2:] == dims[2:]


# --- channels -------------------------------------------------------------------------


def _pad_channels(editor: GraphEditor) -> bool:
    """Pad channels of an ungrouped convolution to what is loaded at once.

    Returns whether there was anything to pad.
    """
    groups, c, o = conv_groups.channels_of(editor)
    # In a gradient, x is the result, which may have the dtype of the sums.
    x, w, _ = (editor.tensors[editor.roles[r]] for r in TRIPLES[editor.main.kind])
    unit = ELEMENTS_PER_LOAD.get(x.dtype) or ELEMENTS_PER_LOAD[w.dtype]
    sizes = rounded_up(c, unit), rounded_up(o, unit)
    if groups > 1 or sizes == (c, o):
        return False
    conv_groups.pad_each(editor, *sizes)
    editor.notes.append(f"channels {c} -> {o} are padded to {sizes[0]} -> {sizes[1]}")
    return True
