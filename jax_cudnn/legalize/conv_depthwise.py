# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions: in which ways does cuDNN run them fast?

Each channel has filters of its own. cuDNN has engines for such convolutions alone, one
for each direction, and for some windows only. What has one of these engines is passed
to cuDNN as it is. Some gradients are written as others first, for which there is a
faster engine, or any:

* The gradient with respect to images in steps of 1 is a convolution of the output's
  gradient with flipped filters. Along two axes, the engine for convolutions is faster.
* The gradient of filters is that of wider ones, without holes, as an engine takes them:
  squares of odd size, or what reaches as far to both sides along one axis. What is
  added to it is cut off, so it does not matter what is in it.

For other windows, groups are merged. docs/benchmarks/depthwise.md has the times.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from jax_cudnn.graph import ConvAttributes, Graph, Node, Target, is_anchor
from jax_cudnn.graph.conv import TRIPLES, conv_attributes
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.graph.windows import dilated
from jax_cudnn.legalize.conv_directions import exchange_directions
from jax_cudnn.legalize.editor import GraphEditor
from jax_cudnn.legalize.legalization import Legal

# What cuDNN 9.19 lists its engines for depthwise convolutions for, on an H100.
_WINDOWS = (1, 3, 5, 7)
_STEPS = (1, 2)
_FEWEST_CHANNELS = 9
_FILTER_DTYPES = ("bf16", "f16")
# These engines, by what is computed, and those that are fast with merged groups. They
# were measured with this GPU and cuDNN.
_ENGINES = {"conv_fprop": (5, 57), "conv_dgrad": (6,), "conv_wgrad": (16, 19)}
_ENGINES_OF_MERGED = {"conv_fprop": (22,), "conv_dgrad": (22, 40, 46)}
_SM_VERSION, _CUDNN = 90, 919

_BEST = "plans.autotune finds the best of both"
_NO_ENGINE = f"cuDNN has no engine for gradients of such depthwise filters: {_BEST}"
_NOT_MEASURED = (
    "depthwise convolutions were not measured with this GPU and this version of cuDNN, "
    f"beside XLA's code: {_BEST}"
)
_SLOW_GRADIENT = (
    "cuDNN's engine for gradients of depthwise convolutions with respect to images "
    f"took up to 2.2 times as long as XLA's code (an H100, cuDNN 9.19): {_BEST}"
)
_SLOW_MERGED = (
    "where cuDNN has an engine of its own for a depthwise convolution, its first plans "
    "with merged groups took up to 178 times as long as XLA's code (an H100, cuDNN "
    f"9.19): {_BEST}"
)


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether each channel of the input has filters of its own."""
    roles = roles_in(graph, node)
    x, w, _ = (roles[role] for role in TRIPLES[node.kind])
    return w.dims[1] == 1 < x.dims[1]


def has_engine(graph: Graph, node: Node) -> bool:
    """Whether cuDNN has an engine of its own for a depthwise convolution.

    It may be for the gradient of wider filters.
    """
    roles, attributes = roles_in(graph, node), conv_attributes(node)
    x, w, _ = (roles[role] for role in TRIPLES[node.kind])
    outer, _, *window = w.dims
    steps = {*attributes.window_strides}
    if (
        outer != x.dims[1]
        or outer < _FEWEST_CHANNELS
        or {*attributes.lhs_dilation} != {1}
        or len(steps) > 1
        or not steps <= {*_STEPS}
    ):
        return False
    if node.kind == "conv_wgrad":
        is_narrow = {x.dtype, w.dtype} <= {*_FILTER_DTYPES}
        return is_narrow and _wider(window, attributes) is not None
    if {*attributes.rhs_dilation} != {1}:
        return False
    if len(window) == 1:
        (low,), (high,) = attributes.padding_low, attributes.padding_high
        return 2 * min(low, high) <= window[0]
    return len(window) == 2 and len({*window}) == 1 and window[0] in _WINDOWS


def slower(graph: Graph, node: Node, target: Target | None) -> str:
    """Say why "auto" leaves a depthwise convolution to XLA whichever way, if it does.

    The gradient of filters is cuDNN's without a GPU like the measured one, too. XLA's
    code for it may take 30 times as long.
    """
    if node.kind == "conv_wgrad":
        return "" if has_engine(graph, node) else _NO_ENGINE
    return "" if _is_measured_on(target) else _NOT_MEASURED


def judged(way: Legal, graph: Graph, node: Node) -> Legal:
    """Say of a way to write the convolution of a node when it is slower than XLA."""
    (main,) = filter(is_anchor, way.graph.nodes)
    roles = roles_in(way.graph, main)
    _, w, _ = (roles[role] for role in TRIPLES[main.kind])
    is_merged = w.dims[1] > 1
    if is_merged and has_engine(graph, node):
        return replace(way, slower=_SLOW_MERGED)
    if main.kind == "conv_dgrad" and not _is_along_one(node):
        steps = {*conv_attributes(node).window_strides}
        if not is_merged or steps != {1}:
            return replace(way, slower=_SLOW_GRADIENT)
    engines = _ENGINES_OF_MERGED if is_merged else _ENGINES
    return replace(way, fast_engines=engines[main.kind])


def rewriting(graph: Graph, node: Node) -> Callable[[GraphEditor], None] | None:
    """Return what writes a depthwise convolution as another one, if that is faster.

    It edits images of two spatial axes, the first of which may have been added.
    """
    if not has_engine(graph, node):
        return None
    attributes = conv_attributes(node)
    if node.kind == "conv_dgrad":
        is_plain = {*attributes.window_strides} == {1}
        return _as_forward if is_plain and not _is_along_one(node) else None
    if node.kind == "conv_wgrad":
        window = roles_in(graph, node)["grad_w"].dims[2:]
        axes = _wider(window, attributes)
        if axes is not None and any(axis.size != axis.kept for axis in axes):
            return functools.partial(_widen, axes)
    return None


def _is_measured_on(target: Target | None) -> bool:
    return (
        target is not None
        and target.sm_version == _SM_VERSION
        and target.cudnn_version // 100 == _CUDNN
    )


def _is_along_one(node: Node) -> bool:
    return len(conv_attributes(node).window_strides) == 1


def _as_forward(editor: GraphEditor) -> None:
    exchange_directions(editor)
    editor.notes.append(
        "the filters are flipped: the gradient is a convolution to cuDNN"
    )


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


def _wider(window: Sequence[int], attributes: ConvAttributes) -> list[_Axis] | None:
    """Return the window of which cuDNN's engine computes the gradient, if there is one.

    Along one axis, that has to be padded so that the result is as long as x.
    """
    steps, holes = attributes.window_strides, attributes.rhs_dilation
    ends = [*zip(attributes.padding_low, attributes.padding_high, strict=True)]
    reach = [dilated(size, hole) for size, hole in zip(window, holes, strict=True)]
    if len(window) == 1:
        ((low, high),) = ends
        if min(low, high) < 0 or low + high != reach[0] - 1 or steps != (1,):
            return None
        sides = [(max(low, high), max(low, high))]
        firsts = [max(low, high) - low]
        sizes = [2 * max(low, high) + 1]
    elif len(window) == 2:
        size = next((size for size in _WINDOWS if size >= max(reach)), None)
        if size is None:
            return None
        sizes, firsts = [size, size], [0, 0]
        sides = [
            (low, high + size - each)
            for (low, high), each in zip(ends, reach, strict=True)
        ]
    else:
        return None
    return [
        _Axis(size=size, low=low, high=high, first=first, kept=kept, step=hole)
        for size, (low, high), first, kept, hole in zip(
            sizes, sides, firsts, window, holes, strict=True
        )
    ]


def _widen(axes: Sequence[_Axis], editor: GraphEditor) -> None:
    """Compute the gradient of wider filters without holes, and cut it."""
    attributes = conv_attributes(editor.main)
    name = editor.roles[TRIPLES[editor.main.kind][1]]
    filters = editor.tensors[name]
    count = len(axes)
    dims = (*filters.dims[:-count], *(axis.size for axis in axes))
    starts, stops, steps = [0] * len(dims), list(dims), [1] * len(dims)
    for place, axis in enumerate(axes, len(dims) - count):
        starts[place], steps[place] = axis.first, axis.step
        stops[place] = axis.first + dilated(axis.kept, axis.step)

    def back(w: jax.Array) -> jax.Array:
        start, stop, step = (
            [each[axis] for axis in filters.order] for each in (starts, stops, steps)
        )
        return jax.lax.slice(w, start, stop, step)

    editor.rearrange(name, replace(filters, dims=dims), back=back)
    low = (*attributes.padding_low[:-count], *(axis.low for axis in axes))
    high = (*attributes.padding_high[:-count], *(axis.high for axis in axes))
    once = (1,) * len(attributes.rhs_dilation)
    editor.set_attributes(
        replace(attributes, padding_low=low, padding_high=high, rhs_dilation=once)
    )
    told = " x ".join(str(axis.size) for axis in axes)
    editor.notes.append(f"the gradient is of windows of {told}, and {name} is cut")
