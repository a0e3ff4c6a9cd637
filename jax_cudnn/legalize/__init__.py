# SPDX-License-Identifier: Apache-2.0
"""Turns a graph into graphs that cuDNN takes, with the array work around them.

Graphs say what users mean; cuDNN takes less (one contraction in a kernel, head sizes
in multiples of 8, no boolean masks, no cotangent of the log-sum-exp, ...). The
difference is made up here, in jax.numpy, and nowhere else. Knows cuDNN's documented
limits, of which those in jax_cudnn/limits hold for all that is written here, and asks
no library. What is of some versions or GPUs only is there, and not here.
"""

from dataclasses import replace

from jax_cudnn import limits
from jax_cudnn.graph import NORMALISED, Graph, Target
from jax_cudnn.legalize import pooling
from jax_cudnn.legalize.attention import cached, f8, sdpa
from jax_cudnn.legalize.common.legalization import ADVICE, Legalization, Rewrite, Rule
from jax_cudnn.legalize.norms import rows as norm_rows
from jax_cudnn.legalize.partition import partition, subgraph
from jax_cudnn.legalize.products import (
    block_scaled,
    causal_conv1d,
    fusion,
    grouped_matmul,
)

__all__ = ["Legalization", "Rewrite", "legalize", "partition", "subgraph"]

# Kinds with a rule of their own, which are alone in their graph.
RULES: dict[str, Rule] = {
    "avg_pool": pooling.legalize,
    "avg_pool_backward": pooling.legalize,
    "block_scaled_matmul": block_scaled.legalize,
    "causal_conv1d": causal_conv1d.legalize,
    "causal_conv1d_backward": causal_conv1d.legalize,
    "grouped_matmul": grouped_matmul.legalize,
    "grouped_matmul_backward": grouped_matmul.legalize,
    "max_pool": pooling.legalize,
    **{
        name: norm_rows.legalize
        for kind in NORMALISED
        for name in (kind, f"{kind}_backward")
    },
    "sdpa": sdpa.legalize_forward,
    "sdpa_backward": sdpa.legalize_backward,
    "sdpa_cached": cached.legalize,
    "sdpa_f8": f8.legalize,
}


def legalize(part: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can compute a part of a graph on the target."""
    node = part.sole_node()
    rule = RULES.get(node.kind) if node is not None else None
    found = (rule or fusion.legalize)(part, target)
    return _within_limits(part, found, target)


def _within_limits(
    part: Graph, found: Legalization, target: Target | None
) -> Legalization:
    """Return a legalisation without the rewrites that a limit of cuDNN forbids."""
    is_lacking = any(limit.lacking for limit in limits.met(part, target))
    rewrites = () if is_lacking else found.candidates
    kept = tuple(
        rewrite for rewrite in rewrites if not limits.met(rewrite.graph, target)
    )
    if kept:
        return replace(found, candidates=kept)
    message = {
        limit: limit.message_for(graph, target)
        for graph in (*(rewrite.graph for rewrite in rewrites), part)
        for limit in limits.met(graph, target)
    }
    if not message:
        return found
    return Legalization(
        reasons=(*found.reasons, *message.values()),
        advice=found.advice or ADVICE,
    )
