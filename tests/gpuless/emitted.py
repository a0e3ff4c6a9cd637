# SPDX-License-Identifier: Apache-2.0
"""The graphs that sdpa hands to cuDNN for a case, forward and backward, on any CPU."""

import jax
import jax.numpy as jnp

import jax_cudnn
from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import subprograms
from tests.sdpa_cases import Case, make_operands


def semantic_graphs(case: Case) -> list[Graph]:
    """Return the forward and the backward graph of a case, as users mean them."""
    operands = make_operands(case)

    def loss(*moving: jax.Array) -> jax.Array:
        arrays = list(operands.arrays)
        for index, value in zip(operands.wanted, moving, strict=True):
            arrays[index] = value
        results = jax_cudnn.sdpa(
            *arrays[:5],
            scale=case.scale,
            is_causal=case.causal,
            query_seq_lengths=arrays[5],
            key_value_seq_lengths=arrays[6],
            return_residual=case.with_residual,
        )
        leaves = jax.tree.leaves(results)
        return sum(
            jnp.sum(x.astype(jnp.float32) * c.astype(jnp.float32))
            for x, c in zip(leaves, operands.cotangents, strict=True)
        )

    moving = [operands.arrays[i] for i in operands.wanted]
    gradient = jax.grad(loss, argnums=tuple(range(len(moving))))
    jaxpr = jax.make_jaxpr(gradient)(*moving)
    return [graph for graph, _, _ in subprograms(jaxpr.jaxpr)]


def emitted_graphs(case: Case, target: Target) -> list[list[Graph]]:
    """Return, for each semantic graph, cuDNN's candidates in order of preference."""
    return [
        [legal.graph for legal in legalize(graph, target).candidates]
        for graph in semantic_graphs(case)
    ]
