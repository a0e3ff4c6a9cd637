# SPDX-License-Identifier: Apache-2.0
"""Turns a graph into one that cuDNN takes, with the array work before and after it.

Graphs say what users mean; cuDNN takes less (head sizes in multiples of 8, no boolean
masks, no cotangent of the log-sum-exp, ...). The difference is made up here, in
jax.numpy, and nowhere else. Knows cuDNN's documented limits and asks no library.
"""

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import sdpa
from jax_cudnn.legalize.rules import Legal, Legalization, Rule

__all__ = ["Legal", "Legalization", "legalize"]

# One rule per node kind.
_RULES: dict[str, Rule] = {
    "sdpa": sdpa.legalize_forward,
    "sdpa_backward": sdpa.legalize_backward,
}


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can compute the graph on the target."""
    node = graph.sole_node()
    if node is None:
        kinds = ", ".join(node.kind for node in graph.nodes)
        return Legalization(reasons=(f"no rule for a graph of several nodes: {kinds}",))
    return _RULES[node.kind](graph, target)
