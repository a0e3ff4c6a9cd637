# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions: in which ways does cuDNN run them fast?

Each channel has filters of its own. cuDNN has engines for such convolutions alone, one
for each direction, and for some windows only. What has one of these engines is passed
to cuDNN as it is. Some convolutions are written as others first, for which there is a
faster engine, or any:

* The gradient with respect to images in steps of 1 is a convolution of the output's
  gradient with flipped filters. Along two axes, the engine for convolutions is faster.
* Along one axis, the engine for gradients of filters is for windows that reach as far
  to both sides. Other windows are made so. What is added to the gradient is cut off,
  so it does not matter what is in it.

For other windows, groups are merged. docs/benchmarks/depthwise.md has the times.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jax_cudnn.graph import ConvAttributes, Graph, Node, Target, is_anchor
from jax_cudnn.graph.conv import TRIPLES, conv_attributes
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.legalize.conv_directions import exchange_directions
from jax_cudnn.legalize.editor import GraphEditor
from jax_cudnn.legalize.legalization import Legal

# What cuDNN 9.19 lists its engines for depthwise convolutions for, on an H100.
_WINDOWS = (1, 3, 5, 7)
_STEPS = (1, 2)
_FEWEST_CHANNELS = 9
_FILTER_DTYPES = ("bf16", "f16")
# These engines, by what is computed. They were measured with this GPU and cuDNN.
_ENGINES = {"conv_fprop": (5,), "conv_dgrad": (6,), "conv_wgrad": (16, 19)}
_SM_VERSION, _CUDNN = 90, 919

_BEST = "plans.autotune finds the best of both"
_NO_ENGINE = f"cuDNN has no engine of its own for this depthwise convolution: {_BEST}"
_NOT_MEASURED = (
    "cuDNN's engine for this depthwise convolution was not measured with this GPU and "
    f"this version of cuDNN, beside XLA's code: {_BEST}"
)
_SLOW_GRADIENT = (
    "cuDNN's engine for gradients of depthwise convolutions with respect to images "
    f"took up to 2.2 times as long as XLA's code (an H100, cuDNN 9.19): {_BEST}"
)
_SLOW_MERGED = (
    "cuDNN's first plans of depthwise convolutions with merged groups took up to 190 "
    f"times as long as XLA's code (an H100, cuDNN 9.19): {_BEST}"
)


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether each channel of the input has filters of its own."""
    roles = roles_in(graph, node)
    x, w, _ = (roles[role] for role in TRIPLES[node.kind])
    return w.dims[1] == 1 < x.dims[1]


def has_engine(graph: Graph, node: Node) -> bool:
    """Whether cuDNN has an engine of its own for a depthwise convolution."""
    roles, attributes = roles_in(graph, node), conv_attributes(node)
    x, w, _ = (roles[role] for role in TRIPLES[node.kind])
    outer, _, *window = w.dims
    steps = {*attributes.window_strides}
    if (
        outer != x.dims[1]
        or outer < _FEWEST_CHANNELS
        or {*attributes.lhs_dilation, *attributes.rhs_dilation} != {1}
        or len(steps) > 1
        or not steps <= {*_STEPS}
    ):
        return False
    is_gradient = node.kind == "conv_wgrad"
    if is_gradient and {t.dtype for t in (x, w)} - {*_FILTER_DTYPES}:
        return False
    if len(window) == 1:
        if is_gradient:
            return _keeps_sizes(window, attributes)
        (low,), (high,) = attributes.padding_low, attributes.padding_high
        return 2 * min(low, high) <= window[0]
    return len(window) == 2 and len({*window}) == 1 and window[0] in _WINDOWS


def slower(graph: Graph, node: Node, target: Target | None) -> str:
    """Say why "auto" leaves a depthwise convolution to XLA whichever way, if it does.

    The gradient of filters is cuDNN's without a GPU like the measured one, too. XLA's
    code for it may take 30 times as long.
    """
    if not has_engine(graph, node):
        return _NO_ENGINE
    is_measured = node.kind == "conv_wgrad" or _is_measured_on(target)
    return "" if is_measured else _NOT_MEASURED


def judged(way: Legal, node: Node) -> Legal:
    """Say of a way to write the convolution of a node when it is slower than XLA."""
    (main,) = filter(is_anchor, way.graph.nodes)
    roles = roles_in(way.graph, main)
    _, w, _ = (roles[role] for role in TRIPLES[main.kind])
    if w.dims[1] > 1:
        return replace(way, slower=_SLOW_MERGED)
    if main.kind == "conv_dgrad" and not _is_along_one(node):
        return replace(way, slower=_SLOW_GRADIENT)
    return replace(way, fast_engines=_ENGINES[main.kind])


def rewriting(graph: Graph, node: Node) -> Callable[[GraphEditor], None] | None:
    """Return what writes a depthwise convolution as another one, if that is faster.

    It edits images of two spatial axes, the first of which may have been added.
    """
    if not has_engine(graph, node):
        return None
    if node.kind == "conv_dgrad" and _is_forward(node):
        return _as_forward
    attributes = conv_attributes(node)
    is_even = attributes.padding_low == attributes.padding_high
    if node.kind == "conv_wgrad" and _is_along_one(node) and not is_even:
        return _widen_window
    return None


def is_merged_as_well(graph: Graph, node: Node) -> bool:
    """Whether merged groups may be faster than cuDNN's engine, where it has one."""
    is_plain = {*conv_attributes(node).window_strides} == {1}
    return not (is_plain and has_engine(graph, node)) or _is_along_one(node)


def _is_measured_on(target: Target | None) -> bool:
    return (
        target is not None
        and target.sm_version == _SM_VERSION
        and target.cudnn_version // 100 == _CUDNN
    )


def _is_forward(node: Node) -> bool:
    """Whether x's gradient is a convolution, for which cuDNN has a faster engine."""
    is_plain = {*conv_attributes(node).window_strides} == {1}
    return is_plain and not _is_along_one(node)


def _is_along_one(node: Node) -> bool:
    return len(conv_attributes(node).window_strides) == 1


def _keeps_sizes(window: Sequence[int], attributes: ConvAttributes) -> bool:
    """Whether the result is as long as x, by padding, in steps of 1."""
    ends = [*zip(attributes.padding_low, attributes.padding_high, strict=True)]
    are_whole = all(
        min(pair) >= 0 and sum(pair) == size - 1
        for pair, size in zip(ends, window, strict=True)
    )
    return are_whole and {*attributes.window_strides} == {1}


def _as_forward(editor: GraphEditor) -> None:
    exchange_directions(editor)
    editor.notes.append(
        "the filters are flipped: the gradient is a convolution to cuDNN"
    )


def _widen_window(editor: GraphEditor) -> None:
    """Let the window reach as far to both sides along the last axis."""
    attributes = conv_attributes(editor.main)
    name = editor.roles[TRIPLES[editor.main.kind][1]]
    filters = editor.tensors[name]
    size, low = filters.dims[-1], attributes.padding_low[-1]
    reach = max(low, attributes.padding_high[-1])
    axis = filters.order.index(len(filters.dims) - 1)
    first = reach - low
    wider = replace(filters, dims=(*filters.dims[:-1], 2 * reach + 1))
    editor.rearrange(
        name,
        wider,
        back=lambda w: jax.lax.slice_in_dim(w, first, first + size, axis=axis),
    )
    ends = (*attributes.padding_low[:-1], reach)
    editor.set_attributes(replace(attributes, padding_low=ends, padding_high=ends))
    editor.notes.append(
        f"the window of {size} is one of {2 * reach + 1}, and {name} is cut"
    )
