# SPDX-License-Identifier: Apache-2.0
"""Computes the gradient of attention over some keys, given the results for all keys.

With S the scores of these keys, L the log-sum-exp and O the output of all keys, dO and
dL their cotangents, and P = exp(S - L),

    dS = P (dO V^T - rowsum(O dO) + dL),
    dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO,  dbias = dS.

A dropped probability is 0 in dV and in P dO V^T, and what a score_mod reads gets its
gradient from dS. Summed over parts, dQ is that of the whole; each key is in one part.
This is what a kernel of attention's gradient computes, whichever keys it gets.
"""

from collections.abc import Collection
from dataclasses import replace

import jax

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes, sdpa_backward_graph
from jax_cudnn.lowering import run_graph
from jax_cudnn.ops.attention.attend import Operands, sdpa_tensors


def part_gradients(
    operands: Operands,
    attributes: SdpaAttributes,
    call: Options,
    *,
    output: jax.Array,
    stats: jax.Array,
    grad_output: jax.Array,
    grad_stats: jax.Array | None,
    scores: Collection[str] = (),
) -> dict[str, jax.Array]:
    """Return the gradients by role: query, key and value, and what is asked for.

    Args:
      operands: queries, and the part of the keys with what belongs to it.
      attributes: those of the forward pass over this part.
      call: how to run it.
      output: in the operands' layout, of all keys.
      stats: (b, h, s, 1), the log-sum-exp of all keys; -inf where there are none.
      grad_output: the cotangent of the output, in the same layout.
      grad_stats: (b, h, s, 1), that of the log-sum-exp; None for zero.
      scores: the roles of bias and of what a score_mod reads whose gradients to return.
    """
    given = {
        **operands.given,
        "output": output,
        "stats": stats,
        "grad_output": grad_output,
    }
    if grad_stats is not None:
        given["grad_stats"] = grad_stats
    graph = sdpa_backward_graph(
        sdpa_tensors(given, operands.layout),
        attributes=replace(attributes, is_partial=True),
        gradients_of=tuple(scores),
    )
    results = run_graph(graph, list(given.values()), call, may_gather=True)
    names = (name.removeprefix("grad_") for name in graph.outputs)
    return dict(zip(names, results, strict=True))
