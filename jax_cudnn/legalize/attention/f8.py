# SPDX-License-Identifier: Apache-2.0
"""Attention over f8 operands as cuDNN takes it; roles as in graph/attention/f8.py.

Lengths, rows that see no key and the sign of the scale are handled as in sdpa.py. Head
sizes are padded to multiples of 16.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize.attention.masks import (
    attributes_of,
    complete_lengths,
    hide_dead_rows,
)
from jax_cudnn.legalize.attention.padding import pad_head
from jax_cudnn.legalize.attention.sdpa import keep_layout, make_scale_positive
from jax_cudnn.legalize.attention.windows import is_band, without_idle_window
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import ADVICE, Legalization
from jax_cudnn.limits.attention import F8_NEEDS_TWO_QUERIES

# cudnn-frontend 1.28, sdpa_support_surface.h, "should be multiple of 16".
_HEAD_MULTIPLE = 16


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run attention over f8 operands."""
    graph = without_idle_window(graph)
    reasons = _reasons(graph, target)
    if reasons:
        return Legalization(reasons=tuple(reasons), advice=ADVICE)
    editor = GraphEditor.by_role(graph)
    keep_layout(editor)
    hide_dead_rows(editor, target)
    # An entry without keys gives 0 (9.19 on an H200). With a key, it would count for
    # the amax.
    complete_lengths(editor, target, least_keys=0)
    make_scale_positive(editor)
    if F8_NEEDS_TWO_QUERIES.is_here(target):
        _repeat_single_query(editor)
    pad_head(editor, ("query", "key"), multiple=_HEAD_MULTIPLE)
    pad_head(editor, ("value", "output"), multiple=_HEAD_MULTIPLE)
    return Legalization(candidates=(editor.finish(),))


def _repeat_single_query(editor: GraphEditor) -> None:
    """Give cuDNN two equal queries in place of a single one, for which it has no plan.

    Of zeros in its place, the output would count for the amax.
    """
    if editor.tensors["query"].dims[2] != 1:
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


def _reasons(graph: Graph, target: Target | None) -> list[str]:
    """Return the limits that the graph breaks, all of them."""
    editor = GraphEditor.by_role(graph)
    roles = editor.tensors
    reasons: list[str] = []
    if attributes_of(editor).window and not is_band(graph):
        reasons.append(
            f"the window {list(attributes_of(editor).window)} leaves queries without a "
            "key, or stands beside lengths; cuDNN's f8 attention takes no mask to hold "
            "it"
        )
    s = roles["query"].dims[2]
    attributes = attributes_of(editor)
    has_band = attributes.is_causal or bool(attributes.window)
    if s == 1 and has_band and F8_NEEDS_TWO_QUERIES.is_here(target):
        reasons.append(
            "a single query with is_causal or a window; cuDNN's f8 attention takes two "
            "or more on sm_90. Leave these out, and the keys that they hide"
        )
    return reasons
