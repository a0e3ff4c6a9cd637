# SPDX-License-Identifier: Apache-2.0
"""Rewrites depthwise convolutions into forms that cuDNN runs fast.

Each channel has filters of its own. cuDNN has engines for such convolutions alone, one
for each direction, and for some windows only. What has one of these engines is passed
to cuDNN as it is. Some gradients are written as others first, for which there is a
faster engine, or any:

* The gradient with respect to images in steps of 1 is a convolution of the output's
  gradient with flipped filters. Along two axes, the engine for convolutions is faster.
* The gradient of filters is that of wider ones, without holes, as an engine takes them:
  squares of odd size, or what reaches as far to both sides along one axis. What is
  added to it is cut off, so it does not matter what is in it.

For other windows, groups are merged. In 16 bits, so are those of all gradients of
filters along one axis. docs/internals/measured/depthwise.md has the times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from jax_cudnn.graph import ConvAttributes, Graph, Node, Tensor, is_anchor
from jax_cudnn.graph.products.conv import TRIPLES, arrays_in, conv_attributes
from jax_cudnn.graph.windows import dilated
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.legalize.products.conv_directions import make_convolution

# What cuDNN 9.19 lists its engines for depthwise convolutions for, on GPUs from sm_80
# to sm_100. Images of one axis have another one before it, of size 1.
_WINDOWS = (1, 3, 5, 7)
_STEPS = (1, 2)
_FEWEST_CHANNELS = 9
_NARROW = ("bf16", "f16")
# A gradient of wider filters takes longer the wider they are. This was measured.
_WIDEST = 31
# The name of the rewrite that keeps groups as they are.
OWN = "own"


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether each channel of the input has filters of its own."""
    x, w, _ = arrays_in(graph, node)
    return w.dims[1] == 1 < x.dims[1]


def has_engine(rewrite: Rewrite) -> bool:
    """Whether cuDNN has a depthwise engine for the convolution of a rewrite."""
    (node,) = filter(is_anchor, rewrite.graph.nodes)
    x, w, _ = arrays_in(rewrite.graph, node)
    attributes = conv_attributes(node)
    is_like = _is_like_those_with_engines(x, w, attributes)
    if not is_like or {*attributes.rhs_dilation} != {1}:
        return False
    is_gradient = node.kind == "conv_wgrad"
    if is_gradient and not _is_narrow(x, w):
        return False
    if not is_along_one(x, w):
        return _is_small_square(w)
    padding, size = attributes.padding_low[-1], w.dims[-1]
    if is_gradient:
        return 2 * padding == size - 1 and {*attributes.window_strides} == {1}
    return 2 * padding <= size


def rewrite(editor: GraphEditor) -> None:
    """Write a gradient as another one, or as a convolution, if that is faster.

    Images have two spatial axes or more.
    """
    node = editor.main
    x, w, _ = (editor.tensors[editor.roles[role]] for role in TRIPLES[node.kind])
    attributes = conv_attributes(node)
    if not _is_like_those_with_engines(x, w, attributes):
        return
    if node.kind == "conv_dgrad":
        if _is_small_square(w) and not is_along_one(x, w):
            make_convolution(editor)
    elif node.kind == "conv_wgrad" and w.dtype in _NARROW:
        axes = _wider(x, w, attributes)
        if axes is not None and any(axis.size != axis.kept for axis in axes):
            _widen(editor, axes)


def _is_like_those_with_engines(
    x: Tensor, w: Tensor, attributes: ConvAttributes
) -> bool:
    """Whether the axes, the channels and the steps are those of cuDNN's engines."""
    outer, each, *window = w.dims
    steps = {*attributes.window_strides[is_along_one(x, w) :]}
    return (
        len(window) == 2
        and each == 1
        and outer == x.dims[1] >= _FEWEST_CHANNELS
        and len(steps) == 1
        and steps <= {*_STEPS}
    )


def _is_narrow(x: Tensor, w: Tensor) -> bool:
    return {x.dtype, w.dtype} <= {*_NARROW}


def _is_small_square(w: Tensor) -> bool:
    return len({*w.dims[2:]}) == 1 and w.dims[2] in _WINDOWS


def is_along_one(x: Tensor, w: Tensor) -> bool:
    """Whether the first of two spatial axes is of size 1."""
    return len(x.dims) == 4 and x.dims[2] == w.dims[2] == 1


# --- wider filters --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """An axis of a wider window: ``kept`` elements from ``first`` on, in steps."""

    size: int
    low: int
    high: int
    first: int
    kept: int
    step: int


def _wider(x: Tensor, w: Tensor, attributes: ConvAttributes) -> list[_Axis] | None:
    """Return the window of which cuDNN's engine computes the gradient, if there is one.

    Along one axis, that has to be padded so that the result is as long as x.
    """
    # A 3 x 3 window with rhs_dilation=2 reaches 5 x 5: the gradient of a 5 x 5 window
    # is computed, and elements 0, 2 and 4 of each axis are kept. A causal window of 4
    # along one axis has padding (3, 0): it is the first 4 elements of a window of 7
    # with padding (3, 3).
    window, holes = w.dims[2:], attributes.rhs_dilation
    ends = [*zip(attributes.padding_low, attributes.padding_high, strict=True)]
    reach = [dilated(size, hole) for size, hole in zip(window, holes, strict=True)]
    firsts = [0, 0]
    if is_along_one(x, w):
        low, high = ends[-1]
        side = max(low, high)
        is_kept = min(low, high) >= 0 and low + high == reach[-1] - 1
        steps = {*attributes.window_strides}
        if not is_kept or steps != {1} or 2 * side + 1 > _WIDEST:
            return None
        sizes, firsts = [1, 2 * side + 1], [0, side - low]
        sides = [ends[0], (side, side)]
    else:
        size = next((size for size in _WINDOWS if size >= max(reach)), None)
        if size is None:
            return None
        sizes = [size, size]
        sides = [
            (low, high + size - each)
            for (low, high), each in zip(ends, reach, strict=True)
        ]
    return [
        _Axis(size=size, low=low, high=high, first=first, kept=kept, step=hole)
        for size, (low, high), first, kept, hole in zip(
            sizes, sides, firsts, window, holes, strict=True
        )
    ]


def _widen(editor: GraphEditor, axes: Sequence[_Axis]) -> None:
    """Compute the gradient of wider filters without holes, and cut it."""
    attributes = conv_attributes(editor.main)
    name = editor.roles[TRIPLES[editor.main.kind][1]]
    filters = editor.tensors[name]
    dims = (*filters.dims[:2], *(axis.size for axis in axes))
    starts = (0, 0, *(axis.first for axis in axes))
    stops = (
        *filters.dims[:2],
        *(axis.first + dilated(axis.kept, axis.step) for axis in axes),
    )
    steps = (1, 1, *(axis.step for axis in axes))

    def back(w: jax.Array) -> jax.Array:
        start, stop, step = (
            [each[axis] for axis in filters.order] for each in (starts, stops, steps)
        )
        return jax.lax.slice(w, start, stop, step)

    editor.rearrange(name, replace(filters, dims=dims), back=back)
    editor.set_attributes(
        replace(
            attributes,
            padding_low=tuple(axis.low for axis in axes),
            padding_high=tuple(axis.high for axis in axes),
            rhs_dilation=(1, 1),
        )
    )
    sizes_text = " x ".join(str(axis.size) for axis in axes)
    editor.notes.append(
        f"the gradient is of windows of {sizes_text}, and {name} is cut"
    )
