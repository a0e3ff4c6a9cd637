# SPDX-License-Identifier: Apache-2.0
"""The graphs that sdpa passes to cuDNN for a case, forward and backward, on any CPU."""

import jax

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import subprograms
from tests.attention.shared.cases import Case, attention, make_operands, with_gradients


def semantic_graphs(case: Case) -> list[Graph]:
    """Return the forward and the backward graph of a case, as users mean them."""
    operands = make_operands(case)
    run = with_gradients(attention(case), operands.cotangents, operands.wanted)
    jaxpr = jax.make_jaxpr(run)(*operands.arrays)
    return [graph for graph, _, _ in subprograms(jaxpr.jaxpr)]


def emitted_graphs(case: Case, target: Target) -> list[list[Graph]]:
    """Return, for each semantic graph, cuDNN's candidates in order of preference."""
    return [
        [rewrite.graph for rewrite in legalize(graph, target).candidates]
        for graph in semantic_graphs(case)
    ]
