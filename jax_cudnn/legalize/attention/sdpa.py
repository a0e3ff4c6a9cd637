# SPDX-License-Identifier: Apache-2.0
"""Rewrites attention for cuDNN; axis letters and roles as in graph/attention/sdpa.py.

What cuDNN's attention lacks is added around it by passes: legalize/attention/passes.py
has their order. Before these, one array of queries, keys and values is taken apart,
packed sequences and windows that cuDNN has no form for become masks, and the cotangent
of a row's maximum is taken from the graph.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Target
from jax_cudnn.graph.attention.score_mod import OPERANDS
from jax_cudnn.legalize.attention.dropout import dropout_steps
from jax_cudnn.legalize.attention.packed import by_packing
from jax_cudnn.legalize.attention.padding import STATS_COLUMNS
from jax_cudnn.legalize.attention.passes import (
    Edit,
    attention_pass,
    attributes_of,
    common_attributes_of,
    run_passes,
)
from jax_cudnn.legalize.attention.qkv import by_parts
from jax_cudnn.legalize.attention.rows import by_maximum, terms_of_sinks
from jax_cudnn.legalize.attention.score_mod import why_not_score_mod
from jax_cudnn.legalize.attention.windows import by_window
from jax_cudnn.legalize.common.editor import Env, GraphEditor
from jax_cudnn.legalize.common.legalization import (
    ADVICE,
    Legalization,
    Rewrite,
    Rule,
)
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored


def _forward(graph: Graph, target: Target | None) -> Legalization:
    first = GraphEditor.by_role(graph, target)
    if refusal := _refuse(first):
        return refusal

    def edited(drop: Edit) -> Rewrite:
        editor = GraphEditor.by_role(graph, target)
        run_passes(editor, "forward", drop)
        return replace(editor.finish(), problem=graph)

    return Legalization(candidates=tuple(map(edited, dropout_steps(first))))


_Start = Callable[[Graph, Target | None], GraphEditor]


def _backward(graph: Graph, target: Target | None) -> Legalization:
    first = GraphEditor.by_role(graph, target)
    if refusal := _refuse(first):
        return refusal
    tensors = first.tensors
    if "grad_bias" not in tensors:
        starts: list[_Start] = [GraphEditor.by_role]
    elif tensors["bias"].dims[3] == 1:
        is_partial = attributes_of(first).is_partial
        starts = [
            _with_reference_bias_gradient if is_partial else _with_row_bias_gradient
        ]
    else:
        starts = [_with_reference_bias_gradient]
        # cuDNN has no gradient of a bias beside a score_mod (9.19 and 9.27).
        has_score_mod = bool(attributes_of(first).score_mod)
        if tensors["bias"].dtype == tensors["query"].dtype and not has_score_mod:
            starts.insert(0, GraphEditor.by_role)

    def edited(start: _Start, drop: Edit) -> Rewrite:
        editor = start(graph, target)
        _take_operand_gradients(editor, graph)
        run_passes(editor, "backward", drop)
        return replace(editor.finish(), problem=graph)

    steps = dropout_steps(first)
    candidates = [edited(start, drop) for drop in steps for start in starts]
    return Legalization(candidates=tuple(candidates))


def _ragged(graph: Graph, kernel: str) -> Rewrite:
    editor = GraphEditor.by_role(graph)
    run_passes(editor, kernel)
    return editor.finish()


# A change of a whole graph, which a rule legalises then.
_Rewrite = Callable[[Graph, Target | None, Rule], Legalization]


def _packing(kernel: str) -> _Rewrite:
    """Return what has several sequences of a row run by a kernel for them, or masks."""

    def rewrite(graph: Graph, target: Target | None, rule: Rule) -> Legalization:
        ragged = functools.partial(_ragged, kernel=kernel)
        return by_packing(graph, target, rule=rule, ragged=ragged)

    return rewrite


# The first one first. Those after `by_parts` see three operands. XLA computes the
# gradient of a maximum of the graph as it is, and windows count positions within a
# sequence while there are several.
_FORWARD = (by_parts, _packing("ragged forward"), by_window)
_BACKWARD = (by_parts, by_maximum, _packing("ragged backward"), by_window)


def _legalize(
    graph: Graph, target: Target | None, rewrites: tuple[_Rewrite, ...], last: Rule
) -> Legalization:
    """Return a legalisation by a rule, after changes of the graph."""
    if not rewrites:
        return last(graph, target)
    first, *others = rewrites
    return first(
        graph,
        target,
        lambda graph, target: _legalize(graph, target, tuple(others), last),
    )


def legalize_forward(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a forward attention graph."""
    return _legalize(graph, target, _FORWARD, _forward)


def legalize_backward(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a gradient graph, with other ways to dbias."""
    return _legalize(graph, target, _BACKWARD, _backward)


@attention_pass(when=lambda editor: attributes_of(editor).is_partial)
def join_parts(editor: GraphEditor) -> None:
    """Have a kernel compute the gradient of a part of the keys as that of all.

    It reads output and log-sum-exp anyway. Rows far from 0 have no gradient beside it:
    the reference would need the log-sum-exp that has lost its digits.
    """
    editor.set_attributes(replace(attributes_of(editor), is_partial=False))


def _with_reference_bias_gradient(graph: Graph, target: Target | None) -> GraphEditor:
    """Have dbias computed by the reference, and the other gradients by cuDNN."""
    editor = GraphEditor.by_role(graph, target)
    index = editor.results.index("grad_bias")
    bias = editor.tensors["bias"]
    editor.notes.append(
        f"the gradient of bias {bias.dtype}{list(bias.dims)} is computed by XLA: cuDNN "
        f"has no plan for it; its memory grows with s*t"
    )

    def compute(env: Env) -> jax.Array:
        # XLA removes the parts of the reference that only the other gradients need.
        return evaluate(graph, [env[name] for name in editor.operands])[index]

    return _with_bias_gradient(editor, compute)


def _take_operand_gradients(editor: GraphEditor, graph: Graph) -> None:
    """Have the gradients of what a score_mod reads computed by the reference."""
    names = [f"grad_{role}" for role in OPERANDS if f"grad_{role}" in editor.tensors]
    if not names:
        return
    places = [editor.results.index(name) for name in names]
    for name in names:
        editor.drop(name)
    editor.notes.append(
        "the gradients of arrays that score_mod reads are computed by XLA: cuDNN has "
        "none of them; their memory grows with s*t"
    )

    def after(env: Env, results: Env) -> None:
        found = evaluate(graph, [env[name] for name in editor.operands])
        results.update(zip(names, (found[i] for i in places), strict=True))

    editor.after.append(after)


def _with_row_bias_gradient(graph: Graph, target: Target | None) -> GraphEditor:
    """Have the gradient computed of a bias that is the same for all keys of a row.

    Such a bias moves the log-sum-exp and nothing else, so its gradient is the
    cotangent of that, where there is one. cuDNN's sum over keys would be the rounding
    errors of terms that cancel. Beside a sink it moves the share p of the sink too:
    the gradient is p rowsum(O dO) + (1 - p) dL.
    """
    editor = GraphEditor.by_role(graph, target)
    tensors = dict(editor.tensors)

    def compute(env: Env) -> jax.Array:
        bias, stats = tensors["bias"], tensors["stats"]
        is_dead = to_logical(stats, env["stats"]) == -jnp.inf
        total = jnp.zeros(stats.dims, jax_dtype(stats.dtype))
        if "grad_stats" in tensors:
            cotangent = to_logical(tensors["grad_stats"], env["grad_stats"])
            total = jnp.where(is_dead, total, cotangent)
        if "sinks" in tensors:
            share, delta, cotangent = terms_of_sinks(tensors, env)
            total = jnp.where(is_dead, 0, share * delta + (1 - share) * cotangent)
        axes = tuple(i for i, dim in enumerate(bias.dims) if dim == 1)
        total = jnp.sum(total, axis=axes, keepdims=True)
        return to_stored(bias, total.astype(jax_dtype(bias.dtype)))

    return _with_bias_gradient(editor, compute)


def _with_bias_gradient(
    editor: GraphEditor, compute: Callable[[Env], jax.Array]
) -> GraphEditor:
    """Take dbias out of the graph and compute it of the original operands."""
    editor.drop("grad_bias")
    editor.after.append(lambda env, results: results.update(grad_bias=compute(env)))
    return editor


# --- layout and scale -----------------------------------------------------------------


@attention_pass()
def keep_layout(editor: GraphEditor) -> None:
    """Bring the last axis to the end of storage, where cuDNN wants stride 1."""
    for role in (*editor.inputs, *editor.outputs):
        order = editor.tensors[role].order
        if order[-1] != 3 and role not in _HANDLED_ELSEWHERE:
            editor.reorder(role, (*(axis for axis in order if axis != 3), 3))


# Operands that cuDNN does not see as they are: masks.py, cached.py.
_HANDLED_ELSEWHERE = ("mask", "query_lengths", "key_lengths", "page_table")


@attention_pass(when=lambda editor: common_attributes_of(editor).scale <= 0)
def make_scale_positive(editor: GraphEditor) -> None:
    """Move the sign of the scale, or 0, into the query.

    cuDNN gives NaN for a scale that is not positive: it scales hidden scores of -inf
    like all others (seen with 9.19 on an H200).
    """
    attributes = common_attributes_of(editor)
    scale = attributes.scale
    factor = -1.0 if scale < 0 else 0.0
    editor.set_attributes(replace(attributes, scale=-scale if factor else 1.0))

    def before(env: Env) -> None:
        env["query"] = env["query"] * jnp.asarray(factor, env["query"].dtype)

    def after(_: Env, results: Env) -> None:
        if "grad_query" in results:
            gradient = results["grad_query"]
            results["grad_query"] = gradient * jnp.asarray(factor, gradient.dtype)

    editor.before.append(before)
    editor.after.append(after)


# --- refusals -------------------------------------------------------------------------


# Asked of cuDNN 9.19 and 9.27 for sm_80, sm_90 and sm_100: tests/attention/gpuless.
_DTYPES = {"sdpa": ("bf16", "f16", "f32"), "sdpa_backward": ("bf16", "f16")}


def _refuse(editor: GraphEditor) -> Legalization | None:
    """Return the documented limits that the graph breaks, all of them."""
    reasons: list[str] = []
    roles = editor.tensors
    query, value = roles["query"], roles["value"]
    taken = _DTYPES[editor.main.kind]
    if query.dtype not in taken:
        reasons.append(
            f"query is {query.dtype}; cuDNN's {editor.main.kind} takes "
            f"{', '.join(taken)}"
        )
    if "bias" in roles and roles["bias"].dtype not in (query.dtype, "f32"):
        reasons.append(
            f"bias is {roles['bias'].dtype}; cuDNN takes {query.dtype} or f32 here"
        )
    reasons += why_not_score_mod(editor)
    if editor.target is not None and editor.main.kind == "sdpa_backward":
        reasons += _too_wide(editor, query.dims[3], value.dims[3])
    if not reasons:
        return None
    return Legalization(reasons=tuple(reasons), advice=ADVICE)


def _too_wide(editor: GraphEditor, d: int, e: int) -> list[str]:
    """Return why cuDNN's gradient does not take head sizes; an empty list if it does.

    See carry_grad_stats: the cotangent of the log-sum-exp takes columns of the value.
    """
    extra = STATS_COLUMNS if "grad_stats" in editor.tensors else 0
    if max(d, e + extra) <= 256:
        return []
    plus = f" and {extra} for the gradient of the log-sum-exp" if extra else ""
    return [f"head sizes d={d}, e={e}{plus}; cuDNN's gradient takes at most 256"]
