# SPDX-License-Identifier: Apache-2.0
"""Legalises attention with sinks, and with the maximum of each row as a result.

A sink is one more key without a value. It needs no kernel of its own: the output of the
keys is scaled by their share of the softmax. The gradient's kernel computes exp(S - L)
for whatever log-sum-exp L it is given, so with that of keys and sink it computes the
gradient of the keys beside the sink. A sink's own gradient is a sum over rows.

A kernel gives a row's maximum and sum in place of the log-sum-exp, which follows from
both. The gradient of a maximum is the reference's.

Each step edits attention by role; letters as in graph/attention/sdpa.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Target, Tensor
from jax_cudnn.graph.attention.sdpa import SDPA
from jax_cudnn.graph.shapes import result_like
from jax_cudnn.legalize.attention.far_rows import is_far, may_be_far
from jax_cudnn.legalize.attention.operands import (
    attributes_in,
    by_other_operands,
    operands_in,
)
from jax_cudnn.legalize.attention.passes import attention_pass, has
from jax_cudnn.legalize.common.editor import Env, GraphEditor, by_role
from jax_cudnn.legalize.common.legalization import Arrays, Legalization, Rule, around
from jax_cudnn.reference.attention import sdpa, softmax
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import to_logical, to_stored

# --- sinks ----------------------------------------------------------------------------


@attention_pass(when=has("sinks"))
def take_sinks(editor: GraphEditor) -> None:
    """Take sinks from the graph, before the steps that change what the user gets."""
    if "grad_output" in editor.tensors:
        _take_gradient_of_sinks(editor)
    else:
        _scale_by_share(editor)


def _scale_by_share(editor: GraphEditor) -> None:
    if "stats" not in editor.tensors:
        roles = dict(editor.tensors)
        attributes = editor.main.attributes
        editor.put_result(result_like(SDPA.row, "stats", roles, attributes))
    tensors = dict(editor.tensors)
    editor.drop("sinks")

    def after(env: Env, results: Env) -> None:
        stats = to_logical(tensors["stats"], results["stats"])
        sinks = to_logical(tensors["sinks"], env["sinks"])
        share, both = softmax.share_and_sum(stats, sinks)
        scaled = results["output"].astype(stats.dtype) * to_stored(
            tensors["output"], share
        )
        results["output"] = scaled.astype(results["output"].dtype)
        results["stats"] = to_stored(tensors["stats"], both)

    editor.after.append(after)


def _take_gradient_of_sinks(editor: GraphEditor) -> None:
    tensors = dict(editor.tensors)
    # Their part is the reference's, which has digits that the log-sum-exp has lost.
    leaves_far_rows = may_be_far(editor)
    editor.drop("sinks")
    if "grad_sinks" not in tensors:
        return
    editor.drop("grad_sinks")

    def after(env: Env, results: Env) -> None:
        share, delta, grad_stats = terms_of_sinks(tensors, env)
        slope = share * (grad_stats - delta)
        if leaves_far_rows:
            stats = to_logical(tensors["stats"], env["stats"])
            slope = jnp.where(is_far(stats), 0, slope)
        gradient = tensors["grad_sinks"]
        total = sdpa.summed_like(to_logical(tensors["sinks"], env["sinks"]), slope)
        results["grad_sinks"] = to_stored(
            gradient, total.astype(jax_dtype(gradient.dtype))
        )

    editor.after.append(after)


def terms_of_sinks(
    tensors: Mapping[str, Tensor], env: Env
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the share of the sinks, rowsum(O dO) and dL, each (b, h, s, 1).

    Of the operands of a gradient as the user gave them. Of a row that sees no key, the
    cotangent of the output is not read.
    """

    def logical(role: str) -> jax.Array:
        return to_logical(tensors[role], env[role])

    stats, sinks = logical("stats"), logical("sinks").astype(env["stats"].dtype)
    delta = softmax.output_products(
        logical("output"), logical("grad_output"), stats, sinks
    )
    grad_stats = jnp.zeros_like(stats)
    if "grad_stats" in tensors:
        grad_stats = logical("grad_stats")
    return softmax.share_of_sinks(sinks, stats), delta, grad_stats


# --- the maximum ----------------------------------------------------------------------


@attention_pass(when=has("max_logit"))
def ask_for_sum(editor: GraphEditor) -> None:
    """Ask for maximum and sum in place of the log-sum-exp, the last of the steps.

    Up to cuDNN 9.20 a kernel has both or the log-sum-exp, and newer ones have all three
    (cudnn-frontend 1.28, softmax.h; planned with 9.19 and 9.27).
    """
    largest = editor.tensors["max_logit"]
    has_stats = "stats" in editor.tensors
    if has_stats:
        editor.drop("stats")
    editor.put_result(replace(largest, name="sum_exp"))

    def after(_: Env, results: Env) -> None:
        total, top = results.pop("sum_exp"), results["max_logit"]
        # A maximum of f32 instructions leaves NaN out; the sum has it.
        top = jnp.where(jnp.isnan(total), jnp.nan, top)
        results["max_logit"] = top
        if has_stats:
            results["stats"] = top + jnp.log(total)

    editor.after.append(after)


def by_maximum(graph: Graph, target: Target | None, rule: Rule) -> Legalization:
    """Legalise a gradient graph whose rows have a cotangent of their maximum."""
    tensors = operands_in(graph)
    if tensors.pop("grad_max_logit", None) is None:
        return rule(graph, target)
    (node,) = graph.nodes
    attributes = attributes_in(graph)
    role_of = {name: role for role, name in node.outputs}

    def with_part(operands: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
        given = {
            role: to_logical(graph.tensor(name), by_role(graph, operands)[role])
            for role, name in node.inputs
        }
        found = sdpa.max_gradients(attributes, given, list(role_of.values()))
        results: list[jax.Array] = []
        for name, x in zip(graph.outputs, made, strict=True):
            if (part := found.get(role_of[name])) is not None:
                part = to_stored(graph.tensor(name), part)
                wide = x.astype(jnp.float32) + part.astype(jnp.float32)
                x = wide.astype(x.dtype)
            results.append(x)
        return tuple(results)

    found = by_other_operands(
        graph,
        target,
        rule,
        tensors=tensors,
        attributes=attributes,
        made=lambda env: env,
        note="the gradient of max_logit is computed by XLA: cuDNN has none; its memory "
        "grows with s*t",
    )
    rewrites = (around(rewrite, results=with_part) for rewrite in found.candidates)
    return replace(found, candidates=tuple(rewrites))
