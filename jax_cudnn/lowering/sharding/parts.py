# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of a graph on arrays with all their axes, which may be sharded."""

from collections.abc import Callable, Sequence

import jax

from jax_cudnn.graph import Graph, is_anchor, kind_named
from jax_cudnn.legalize import partition
from jax_cudnn.lowering.sharding.subaxes import all_subaxes, flat, reshaped, spread

# Computes a part's results, in the shapes in which a primitive would give them.
RunPart = Callable[[Graph, Sequence[jax.Array]], Sequence[jax.Array]]


def is_divided_by_xla(graph: Graph) -> bool:
    """Whether a graph has a kernel that XLA runs where it is on several devices."""
    rows = (kind_named(node.kind).row for node in graph.nodes)
    return any(row.is_divided_by_xla for row in rows)


def run_parts(
    graph: Graph, operands: Sequence[jax.Array], kernel: RunPart, around: RunPart
) -> list[jax.Array]:
    """Return the graph's results, given what runs its kernels and the rest.

    The nodes around the kernels get a graph with an axis for each subaxis: merging
    these, where they are sharded, would gather them.
    """
    subaxes = all_subaxes(graph, tuple(x.shape for x in operands))
    values = dict(zip(graph.inputs, operands, strict=True))
    for part in partition(graph):
        arguments = [values[name] for name in part.inputs]
        if any(map(is_anchor, part.nodes)):
            results = kernel(part, arguments)
        else:
            wide = spread(part, [x.shape for x in arguments]) or part
            results = around(wide, arguments)
        for name, x in zip(part.outputs, results, strict=True):
            values[name] = reshaped(x, flat(subaxes[name]))
    return [values[name] for name in graph.outputs]
