# SPDX-License-Identifier: Apache-2.0
"""Rewrites pooling for cuDNN; axis letters and roles as in graph/pooling.py.

One spatial axis becomes two, the first of size 1. Arrays are transposed to
channels-last. Padding that cuts is done on the array. Where cuDNN would be wrong, bf16
is pooled as f32, and f32 with -inf in it by XLA.
"""

from dataclasses import replace
from typing import cast

import jax.numpy as jnp

from jax_cudnn.graph import Graph, Target
from jax_cudnn.graph.pooling import PoolAttributes
from jax_cudnn.legalize.common.editor import Env, GraphEditor, SlowPath
from jax_cudnn.legalize.common.images import (
    add_ends,
    add_spatial_axis,
    store_channels_last,
)
from jax_cudnn.legalize.common.legalization import XLA_ADVICE, Legalization
from jax_cudnn.reference.interpreter import evaluate
from jax_cudnn.reference.pooling import elements_in_windows


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one pooling node."""
    del target  # What a GPU lacks, cuDNN says itself.
    editor = GraphEditor.by_role(graph)
    if reasons := _refusals(editor):
        return Legalization(reasons=reasons, advice=XLA_ADVICE)
    add_spatial_axis(editor)
    _cut(editor)
    store_channels_last(editor)
    if editor.main.kind != "avg_pool_backward":
        _widen(editor)
    if editor.main.kind == "max_pool" and graph.output_tensors[0].dtype == "f32":
        _take_infinities(editor, graph)
    return Legalization(candidates=(editor.finish(),))


def _refusals(editor: GraphEditor) -> tuple[str, ...]:
    reasons: list[str] = []
    if any(t.dtype == "f64" for t in editor.tensors.values()):
        reasons.append("f64: cuDNN pools bf16, f16 and f32")
    if _has_empty_window(editor):
        reasons.append(
            "a window has only padding: cuDNN's result for it is not documented"
        )
    return tuple(reasons)


def _attributes(editor: GraphEditor) -> PoolAttributes:
    return cast("PoolAttributes", editor.main.attributes)


def _images(editor: GraphEditor) -> str:
    """Return the tensor that windows move over: x, or its gradient."""
    return "x" if "x" in editor.tensors else "grad_x"


def _has_empty_window(editor: GraphEditor) -> bool:
    attributes = _attributes(editor)
    axes = zip(
        editor.tensors[_images(editor)].dims[2:],
        attributes.window_shape,
        attributes.window_strides,
        zip(attributes.padding_low, attributes.padding_high, strict=True),
        strict=True,
    )
    return any(
        (elements_in_windows(size, window, stride=stride, padding=pad) == 0).any()
        for size, window, stride, pad in axes
    )


def _cut(editor: GraphEditor) -> None:
    """Cut x where padding is negative; its gradient is filled up with zeros."""
    attributes = _attributes(editor)
    pads = zip(attributes.padding_low, attributes.padding_high, strict=True)
    ends = [(min(low, 0), min(high, 0)) for low, high in pads]
    if all(pair == (0, 0) for pair in ends):
        return
    name = _images(editor)
    add_ends(editor, name, ends)
    editor.notes.append(f"{name} is cut outside the kernel: padding is negative")
    editor.set_attributes(
        replace(
            attributes,
            padding_low=tuple(max(low, 0) for low in attributes.padding_low),
            padding_high=tuple(max(high, 0) for high in attributes.padding_high),
        )
    )


def _widen(editor: GraphEditor) -> None:
    """Pool bf16 as f32, which is as exact.

    An engine that takes bf16, the first one on an H200 with 9.19, gives numbers that
    are no average or maximum of any window (eng3; eng2 is right, and so are f16, f32
    and the gradient).
    """
    for name, tensor in list(editor.tensors.items()):
        if tensor.dtype == "bf16":
            editor.convert(name, "f32")
            editor.notes.append(
                f"{name} is converted outside the kernel: cuDNN pools bf16 wrongly"
            )


def _take_infinities(editor: GraphEditor, graph: Graph) -> None:
    """Have XLA pool an array that holds -inf.

    cuDNN's maximum begins at -3.4e38, which a window of nothing but -inf then gives
    (9.19). In f16 and bf16, that number is rounded to -inf.
    """

    def after(env: Env, results: Env) -> None:
        (results["output"],) = evaluate(graph, [env["x"]])

    editor.slow_path = SlowPath(
        is_needed=lambda env: jnp.any(jnp.isneginf(env["x"])), after=after
    )
    editor.notes.append("an array that holds -inf is pooled by XLA")
