# SPDX-License-Identifier: Apache-2.0
"""Attention as cuDNN takes it; axis letters and roles as in graph/sdpa.py.

What cuDNN's attention lacks is added around it:

* head sizes are padded with zeros to multiples of 8;
* a boolean mask becomes an additive bias, and a bias gets full rows and columns;
* a scale that is not positive moves into the query;
* rows that see no key are given keys to see, so that the kernel meets no 0/0, and
  their result is set to 0 (log-sum-exp -inf, gradients 0) afterwards;
* the cotangent of the log-sum-exp rides in spare value columns (see
  ``carry_grad_stats``);
* rows that a bias moves far from 0 get their gradient beside the kernel (see
  ``far_rows``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Node, Target
from jax_cudnn.legalize.far_rows import take_far_rows
from jax_cudnn.legalize.rewrite import (
    Rewrite,
    finish,
    name_of,
    start,
)
from jax_cudnn.legalize.rules import After, Legal, Legalization
from jax_cudnn.legalize.sdpa_steps import (
    STATS_COLUMNS,
    absorb_row_bias,
    carry_grad_stats,
    complete_bias,
    complete_lengths,
    hide_dead_rows,
    keep_layout,
    make_scale_positive,
    pad_head,
    pad_key_count,
    pad_single_query,
)
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored

_VALUE_LIKE = ("value", "output", "grad_output", "grad_value")


def legalize_forward(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a forward attention graph."""
    rewrite = start(graph)
    if refusal := _refuse(rewrite, target):
        return refusal
    keep_layout(rewrite)
    hide_dead_rows(rewrite)
    complete_lengths(rewrite, target)
    absorb_row_bias(rewrite)
    complete_bias(rewrite)
    make_scale_positive(rewrite)
    pad_head(rewrite, ("query", "key"), 0)
    pad_head(rewrite, ("value", "output"), 0)
    legal = finish(graph, rewrite)
    if rewrite.roles["query"].dtype == "f32":
        legal = replace(legal, slower=_F32_IS_SLOW)
    return Legalization(candidates=(legal,))


def legalize_backward(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a gradient graph, with other ways to dbias."""
    if refusal := _refuse(start(graph), target):
        return refusal
    roles = start(graph).roles
    if "grad_bias" not in roles:
        return Legalization(candidates=(_backward_candidate(graph, target),))
    if roles["bias"].dims[3] == 1:
        return Legalization(candidates=(_row_bias_candidate(graph, target),))
    candidates = [_reference_bias_candidate(graph, target)]
    if roles["bias"].dtype == roles["query"].dtype:
        candidates.insert(0, _backward_candidate(graph, target))
    return Legalization(candidates=tuple(candidates))


def _backward_candidate(graph: Graph, target: Target | None) -> Legal:
    rewrite = start(graph)
    take_far_rows(rewrite)
    keep_layout(rewrite)
    hide_dead_rows(rewrite)
    complete_lengths(rewrite, target)
    absorb_row_bias(rewrite)
    complete_bias(rewrite)
    make_scale_positive(rewrite)
    pad_key_count(rewrite)
    pad_single_query(rewrite)
    pad_head(rewrite, ("query", "key"), 0)
    if "grad_stats" in rewrite.inputs:
        carry_grad_stats(rewrite)
    else:
        pad_head(rewrite, _VALUE_LIKE, 0)
    return finish(graph, rewrite)


def _reference_bias_candidate(graph: Graph, target: Target | None) -> Legal:
    """Run the gradient without dbias in cuDNN and compute dbias by the reference."""
    index = graph.outputs.index(name_of(graph, "grad_bias"))
    bias = graph.tensor(name_of(graph, "bias"))
    note = (
        f"the gradient of bias {bias.dtype}{list(bias.dims)} is computed by XLA: cuDNN "
        f"has no plan for it; its memory grows with s*t"
    )

    def compute(operands: Sequence[jax.Array]) -> jax.Array:
        # XLA removes the parts of the reference that only the other gradients need.
        return evaluate(graph, operands)[index]

    return _with_bias_gradient(graph, target, compute, (note,))


def _row_bias_candidate(graph: Graph, target: Target | None) -> Legal:
    """Give the gradient of a bias that is the same for all keys of a row.

    Such a bias moves the log-sum-exp and nothing else, so its gradient is the
    cotangent of that, where there is one. cuDNN's sum over keys would be the rounding
    errors of terms that cancel.
    """

    def compute(operands: Sequence[jax.Array]) -> jax.Array:
        names = dict(zip(graph.inputs, operands, strict=True))
        bias, stats = (graph.tensor(name_of(graph, r)) for r in ("bias", "stats"))
        is_dead = to_logical(stats, names[stats.name]) == -jnp.inf
        total = jnp.zeros(stats.dims, jax_dtype(stats.dtype))
        if "grad_stats" in start(graph).inputs:
            tensor = graph.tensor(name_of(graph, "grad_stats"))
            total = jnp.where(is_dead, total, to_logical(tensor, names[tensor.name]))
        axes = tuple(i for i, dim in enumerate(bias.dims) if dim == 1)
        total = jnp.sum(total, axis=axes, keepdims=True)
        return to_stored(bias, total.astype(jax_dtype(bias.dtype)))

    return _with_bias_gradient(graph, target, compute, ())


def _with_bias_gradient(
    graph: Graph,
    target: Target | None,
    compute: Callable[[Sequence[jax.Array]], jax.Array],
    notes: tuple[str, ...],
) -> Legal:
    """Run the gradient graph without dbias in cuDNN and put `compute`'s in place."""
    index = graph.outputs.index(name_of(graph, "grad_bias"))
    (node,) = graph.nodes
    outputs = tuple(n for i, n in enumerate(graph.outputs) if i != index)
    reduced = Graph(
        tensors=tuple(t for t in graph.tensors if t.name != graph.outputs[index]),
        nodes=(
            Node.make(
                node.kind,
                dict(node.inputs),
                {r: n for r, n in node.outputs if r != "grad_bias"},
                node.attributes,
            ),
        ),
        inputs=graph.inputs,
        outputs=outputs,
    )
    legal = _backward_candidate(reduced, target)

    def with_bias(after: After) -> After:
        def both(
            operands: Sequence[jax.Array], results: Sequence[jax.Array]
        ) -> tuple[jax.Array, ...]:
            gradients = list(after(operands, results))
            gradients.insert(index, compute(operands))
            return tuple(gradients)

        return both

    usual = legal.usual and replace(legal.usual, after=with_bias(legal.usual.after))
    notes = (*legal.notes, *notes)
    return replace(legal, after=with_bias(legal.after), usual=usual, notes=notes)


# --- refusals -------------------------------------------------------------------------


# Asked of cuDNN 9.19 and 9.27 for sm_80, sm_90 and sm_100: tests/gpuless.
_DTYPES = {"sdpa": ("bf16", "f16", "f32"), "sdpa_backward": ("bf16", "f16")}
_F32_IS_SLOW = (
    "cuDNN's f32 attention takes up to twice XLA's time (9.19 on an H200, 4 x 4096 "
    'tokens) and has no gradient; implementation="cudnn" uses it, in memory that does '
    "not grow with s*t"
)


def _refuse(rewrite: Rewrite, target: Target | None) -> Legalization | None:
    """Return the documented limits that the graph breaks, all of them."""
    reasons: list[str] = []
    roles = rewrite.roles
    query, value = roles["query"], roles["value"]
    taken = _DTYPES[rewrite.node.kind]
    if query.dtype not in taken:
        reasons.append(
            f"query is {query.dtype}; cuDNN's {rewrite.node.kind} takes "
            f"{', '.join(taken)}"
        )
    if "bias" in roles and roles["bias"].dtype not in (query.dtype, "f32"):
        reasons.append(
            f"bias is {roles['bias'].dtype}; cuDNN takes {query.dtype} or f32 here"
        )
    b, h, _, _ = query.dims
    # They are dimensions y and z of a launch grid (CUDA C++ Programming Guide, table
    # of technical specifications).
    if max(b, h) > 65535:
        reasons.append(f"batch {b} or heads {h} exceed 65535")
    if target is not None:
        reasons += _refuse_for(rewrite, target, query.dims[3], value.dims[3])
    if not reasons:
        return None
    return Legalization(reasons=tuple(reasons), advice=_ADVICE)


_ADVICE = (
    'Pass implementation="xla" (or "auto") to compute it with XLA, or change the '
    "operands as the reasons say."
)


def _refuse_for(rewrite: Rewrite, target: Target, d: int, e: int) -> list[str]:
    reasons: list[str] = []
    if target.sm_version < 80:
        reasons.append(
            f"{target.name} is sm_{target.sm_version}; cuDNN's attention needs sm_80 "
            "(Ampere) or newer"
        )
    # cudnn-frontend refuses both (scaled_dot_product_flash_attention.h, "known bugs").
    if target.cudnn_version in (91000, 91001):
        reasons.append("cuDNN 9.10.0 and 9.10.1 have known attention bugs; use 9.10.2")
    # See carry_grad_stats: the cotangent of the log-sum-exp takes columns of the value.
    extra = STATS_COLUMNS if "grad_stats" in rewrite.inputs else 0
    if rewrite.node.kind == "sdpa_backward" and max(d, e + extra) > 256:
        plus = f" and {extra} for the gradient of the log-sum-exp" if extra else ""
        reasons.append(
            f"head sizes d={d}, e={e}{plus}; cuDNN's gradient takes at most 256"
        )
    return reasons
