# SPDX-License-Identifier: Apache-2.0
"""Rewrites attention over f8 operands for cuDNN; roles as in graph/attention/f8.py.

Lengths, rows that see no key and the sign of the scale are handled as in sdpa.py. Head
sizes are padded to multiples of 16.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize.attention.passes import (
    attention_pass,
    attributes_of,
    run_passes,
)
from jax_cudnn.legalize.attention.windows import is_band, without_idle_window
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import ADVICE, Legalization
from jax_cudnn.limits.attention import F8_NEEDS_TWO_QUERIES


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run attention over f8 operands."""
    graph = without_idle_window(graph)
    editor = GraphEditor.by_role(graph, target)
    if reasons := _reasons(graph, editor):
        return Legalization(reasons=tuple(reasons), advice=ADVICE)
    run_passes(editor, "f8")
    return Legalization(candidates=(editor.finish(),))


@attention_pass(when=lambda editor: editor.tensors["query"].dims[2] == 1)
def repeat_single_query(editor: GraphEditor) -> None:
    """Give cuDNN two equal queries in place of a single one, for which it has no plan.

    Of zeros in its place, the output would count for the amax.
    """
    if not F8_NEEDS_TWO_QUERIES.is_here(editor.target):
        return
    for role in ("query", "output", "stats"):
        if role not in editor.tensors:
            continue
        tensor = editor.tensors[role]
        b, h, _, d = tensor.dims
        axis = tensor.order.index(2)
        editor.rearrange(
            role,
            replace(tensor, dims=(b, h, 2, d)),
            functools.partial(jnp.repeat, repeats=2, axis=axis),
            functools.partial(
                jax.lax.slice_in_dim, start_index=0, limit_index=1, axis=axis
            ),
        )


def _reasons(graph: Graph, editor: GraphEditor) -> list[str]:
    """Return the limits that the graph breaks, all of them."""
    attributes = attributes_of(editor)
    reasons: list[str] = []
    if attributes.window and not is_band(graph):
        reasons.append(
            f"the window {list(attributes.window)} leaves queries without a "
            "key, or is combined with lengths; cuDNN's f8 attention has no mask for "
            "it"
        )
    s = editor.tensors["query"].dims[2]
    has_band = attributes.is_causal or bool(attributes.window)
    if s == 1 and has_band and F8_NEEDS_TWO_QUERIES.is_here(editor.target):
        reasons.append(
            "a single query with is_causal or a window; cuDNN's f8 attention takes two "
            "or more on sm_90. Omit them, and the keys that they mask"
        )
    return reasons
