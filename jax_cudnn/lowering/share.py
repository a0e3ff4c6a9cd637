# SPDX-License-Identifier: Apache-2.0
"""What does each device compute of a kernel's graph that is divided among devices?

The graph of its own sizes. Where what was divided is summed, each device has its share
of the sum. The shares are added up before anything that follows reads them, in the
dtype in which sums are kept.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph import DTypeName, Graph, Tensor, is_anchor, kind_named
from jax_cudnn.graph.rules import accumulator
from jax_cudnn.graph.walks import leading_to, made_by, read_by
from jax_cudnn.legalize import subgraph
from jax_cudnn.lowering.cuts import Division
from jax_cudnn.lowering.members import Members
from jax_cudnn.reference.dtypes import jax_dtype

# Runs a graph on one device.
Run = Callable[[Graph, Sequence[jax.Array]], Sequence[jax.Array]]
# Adds up the shares of an array that devices have along some factors.
Total = Callable[[jax.Array, frozenset[int]], jax.Array]


def run_share(
    graph: Graph,
    members: Mapping[str, Members],
    division: Division[Any],
    operands: Sequence[jax.Array],
    run: Run,
    total: Total,
) -> list[jax.Array]:
    """Return a device's part of the results, given its part of the operands."""
    local = _local_graph(graph, members, division)
    values = dict(zip(graph.inputs, operands, strict=True))
    for stage in _stages(local, division):
        wide = _with_wide_sums(stage, division)
        arguments = [values[name] for name in stage.inputs]
        results = run(wide, arguments)
        for tensor, x in zip(stage.output_tensors, results, strict=True):
            over = _summed(division, tensor.name)
            if over:
                # Shares that a kernel has rounded are at least not added up rounded.
                x = total(x.astype(jax_dtype(_sum_dtype(tensor.dtype))), over)
            values[tensor.name] = x.astype(jax_dtype(tensor.dtype))
    return [
        jnp.reshape(values[name], division.local_shape(name)) for name in graph.outputs
    ]


def _summed(division: Division[Any], name: str) -> frozenset[int]:
    """Return the factors along which devices have shares of a tensor."""
    partial = division.factors.partial.get(name, frozenset[int]())
    return partial.intersection(division.cuts)


def _local_graph(
    graph: Graph, members: Mapping[str, Members], division: Division[Any]
) -> Graph:
    """Return the graph with the sizes that a device has."""

    def own(tensor: Tensor) -> Tensor:
        sizes = iter(division.local_shape(tensor.name))
        stored = [math.prod(next(sizes) for _ in each) for each in members[tensor.name]]
        dims = [0] * len(stored)
        for axis, size in zip(tensor.order, stored, strict=True):
            dims[axis] = size
        return replace(tensor, dims=tuple(dims))

    return replace(graph, tensors=tuple(map(own, graph.tensors)))


def _stages(graph: Graph, division: Division[Any]) -> list[Graph]:
    """Return the graph, or the kernel and what follows it, which waits for its sums."""
    (kernel,) = (node for node in graph.nodes if is_anchor(node))
    made = made_by([kernel])
    following = [node for node in graph.nodes if made & read_by([node])]
    if not following or not any(_summed(division, name) for name in made):
        return [graph]
    first = leading_to(graph.nodes, made)
    rest = [node for node in graph.nodes if node not in first]
    # Constants and the like that both need are computed twice.
    second = [*leading_to(first, read_by(rest) - made), *rest]
    stages = (frozenset(first), frozenset(second))
    found = [subgraph(graph, stage, [*{*stages} - {stage}]) for stage in stages]
    return [stage for stage in found if stage is not None]


def _with_wide_sums(graph: Graph, division: Division[Any]) -> Graph:
    """Return the graph with shares of sums as results in the dtype of sums.

    A kernel keeps the dtype that it gives where it has to, or where another one would
    be slow: a convolution's gradient kernels take up to three times as long (9.19 on an
    H200, docs/design.md).
    """
    bound = {
        name
        for node in graph.nodes
        for _, name in node.outputs
        if not (row := kind_named(node.kind).row).has_wide_sums and not row.is_sum
    }

    def own(tensor: Tensor) -> Tensor:
        is_share = tensor.name in graph.outputs and _summed(division, tensor.name)
        if not is_share or tensor.name in bound:
            return tensor
        return replace(tensor, dtype=_sum_dtype(tensor.dtype))

    return replace(graph, tensors=tuple(map(own, graph.tensors)))


def _sum_dtype(dtype: DTypeName) -> DTypeName:
    return dtype if dtype == "i32" else accumulator(dtype)
