# SPDX-License-Identifier: Apache-2.0
"""Computes one device's part of a kernel's graph that is divided among devices.

Each device runs the graph with its own sizes. If a sum runs over a divided axis, each
device has a partial sum. Partial sums are added up before anything that follows reads
them, in the dtype in which sums are kept or, if the call asks for it, in that of its
operands.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, Tensor
from jax_cudnn.legalize import subgraph
from jax_cudnn.lowering.sharding.cuts import Division
from jax_cudnn.lowering.sharding.subaxes import Subaxes, reshaped
from jax_cudnn.lowering.sharding.sums import (
    partial_sum_count,
    partial_sum_dtype,
    stages,
    sum_dtype,
    summed,
)
from jax_cudnn.reference.dtypes import jax_dtype

# Runs a graph on one device.
Run = Callable[[Graph, Sequence[jax.Array]], Sequence[jax.Array]]


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives of devices that have partial sums along some factors.

    ``total``: returns the sum of the partial sums. ``most``: their maximum.
    ``scatter``: the device's part of the sum along an axis, by the cut that scatters
    it. ``exchange``: an array of the same shape whose parts along an axis are the
    device's own part of each partial sum. The last two are for divisions that scatter.
    """

    total: Callable[[jax.Array, frozenset[int]], jax.Array]
    most: Callable[[jax.Array, frozenset[int]], jax.Array]
    scatter: Callable[[jax.Array, frozenset[int], int, Any], jax.Array] | None = None
    exchange: Callable[[jax.Array, frozenset[int], int, Any], jax.Array] | None = None


def run_on_device(
    graph: Graph,
    subaxes: Mapping[str, Subaxes],
    division: Division[Any],
    operands: Sequence[jax.Array],
    run: Run,
    collectives: Collectives,
    options: Options,
) -> list[jax.Array]:
    """Return a device's part of the results, given its part of the operands."""
    # For example, (7, 24) @ (24, 5) + bias on two devices that divide the contraction.
    # In the first stage each device multiplies (7, 12) by (12, 5). These partial sums
    # are added up over the devices, and in the second stage each device adds the bias.
    values = dict(zip(graph.inputs, operands, strict=True))
    parts = [frozenset(nodes) for nodes in stages(graph, division)]
    for i, part in enumerate(parts):
        stage = subgraph(graph, part, [other for other in parts if other != part])
        if stage is None:
            continue
        own = division if i else replace(division, scattered={})
        stage = _local_graph(stage, subaxes, own)
        stage = _with_partial_sum_dtypes(stage, graph, division, options)
        arguments = [values[name] for name in stage.inputs]
        for name, x in zip(stage.outputs, run(stage, arguments), strict=True):
            partial_sum = reshaped(x, own.local_shape(name))
            wide = jax_dtype(sum_dtype(graph, name, options))
            values[name] = _sum(
                graph.tensor(name), partial_sum, wide, division, collectives
            )
    return [values[name] for name in graph.outputs]


def _sum(
    tensor: Tensor,
    partial_sum: jax.Array,
    wide: Any,
    division: Division[Any],
    collectives: Collectives,
) -> jax.Array:
    """Return a device's part of a tensor, given its partial sum or maximum.

    Partial sums are added up in the dtype `wide`.
    """
    dtype = jax_dtype(tensor.dtype)
    over = summed(division, tensor.name)
    if not over:
        return partial_sum.astype(dtype)
    if tensor.name in division.factors.maxima:
        return collectives.most(partial_sum, over).astype(dtype)
    scattered = division.scattered.get(tensor.name)
    if scattered is None:
        # Sums of more than two are not rounded on the way.
        if partial_sum_count(division, tensor.name) > 2:
            partial_sum = partial_sum.astype(wide)
        return collectives.total(partial_sum, over).astype(dtype)
    assert collectives.scatter is not None
    assert collectives.exchange is not None
    ((factor, cut),) = scattered.items()
    axes = division.factors.axes[tensor.name]
    (axis,) = (i for i, product in enumerate(axes) if factor in product)
    if partial_sum.dtype == wide:
        return collectives.scatter(partial_sum, over, axis, cut).astype(dtype)
    # Partial sums that a kernel has rounded are sent as they are.
    # Two devices have bf16 partial sums (6, 10), which are scattered along rows: each
    # device sends 3 rows to the other one. It then has its own 3 rows of both partial
    # sums, (6, 10) again, which it adds up in f32 as (2, 3, 10).
    count, shape = cut.count, partial_sum.shape
    parts = collectives.exchange(partial_sum, over, axis, cut)
    parts = jnp.reshape(parts, (*shape[:axis], count, -1, *shape[axis + 1 :]))
    return jnp.sum(parts, axis, dtype=wide).astype(dtype)


def _local_graph(
    graph: Graph, subaxes: Mapping[str, Subaxes], division: Division[Any]
) -> Graph:
    """Return the graph with the sizes that a device has."""

    def own(tensor: Tensor) -> Tensor:
        sizes = iter(division.local_shape(tensor.name))
        stored = [math.prod(next(sizes) for _ in each) for each in subaxes[tensor.name]]
        dims = [0] * len(stored)
        for axis, size in zip(tensor.order, stored, strict=True):
            dims[axis] = size
        return replace(tensor, dims=tuple(dims))

    return replace(graph, tensors=tuple(map(own, graph.tensors)))


def _with_partial_sum_dtypes(
    stage: Graph, graph: Graph, division: Division[Any], options: Options
) -> Graph:
    """Return a graph's stage with its partial sums in the dtype that they have."""

    def own(tensor: Tensor) -> Tensor:
        if tensor.name not in stage.outputs or not summed(division, tensor.name):
            return tensor
        return replace(tensor, dtype=partial_sum_dtype(graph, tensor.name, options))

    return replace(stage, tensors=tuple(map(own, stage.tensors)))
