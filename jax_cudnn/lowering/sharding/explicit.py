# SPDX-License-Identifier: Apache-2.0
"""Runs a graph on operands that say in their types how they are sharded.

Each kernel runs in `jax.shard_map`: each device computes its part (one_device.py). The
primitives do so where they are lowered, so that derivatives and batches are those of
whole graphs. What is not a kernel is differentiated by JAX.
"""

from collections.abc import Sequence

import jax

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, is_anchor
from jax_cudnn.lowering.sharding.array_types import (
    axes_in,
    explicit_mesh,
    explicit_spec,
    is_explicitly_sharded,
)
from jax_cudnn.lowering.sharding.one_device import Collectives, run_on_device
from jax_cudnn.lowering.sharding.parts import RunPart, run_parts
from jax_cudnn.lowering.sharding.subaxes import all_subaxes
from jax_cudnn.lowering.sharding.typed import all_typed_as, spec_of, types_of


def is_one_kernel(graph: Graph) -> bool:
    """Whether a graph has one kernel, from which the types of all results follow."""
    return sum(map(is_anchor, graph.nodes)) == 1


def run_explicit(
    graph: Graph,
    operands: Sequence[jax.Array],
    kernel: RunPart,
    around: RunPart,
    options: Options,
) -> list[jax.Array]:
    """Return a graph's results, given what runs kernels on one device, and the rest.

    An axis that a kernel needs whole is gathered. An axis that is summed is added up
    over the devices, so that the result is not sharded along these.
    """

    def divided(part: Graph, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if any(map(is_explicitly_sharded, arguments)):
            return _run_divided(part, arguments, kernel, options)
        return kernel(part, arguments)

    if is_one_kernel(graph):
        return [*divided(graph, operands)]
    return run_parts(graph, operands, divided, around)


def _run_divided(
    graph: Graph, operands: Sequence[jax.Array], run: RunPart, options: Options
) -> list[jax.Array]:
    """Run a graph of one kernel in `jax.shard_map`."""
    subaxes = all_subaxes(graph, tuple(x.shape for x in operands))
    mesh = explicit_mesh(operands)
    types = types_of(graph, operands)
    division = types.effective
    # Other axes of the mesh may be those of a vmap around.
    specs = map(explicit_spec, operands)
    names = {axis for spec in specs for entry in spec for axis in axes_in(entry)}

    def axes_of(over: frozenset[int]) -> tuple[str, ...]:
        return tuple(name for f in sorted(over) for name, _ in division.cuts[f].axes)

    collectives = Collectives(
        total=lambda x, over: jax.lax.psum(x, axes_of(over)),
        most=lambda x, over: jax.lax.pmax(x, axes_of(over)),
    )

    def on_device(*parts: jax.Array) -> list[jax.Array]:
        return run_on_device(graph, subaxes, division, parts, run, collectives, options)

    in_specs = tuple(spec_of(division, name) for name in graph.inputs)
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=[spec_of(division, name) for name in graph.outputs],
        axis_names=names,
    )
    results = jax.jit(mapped)(*all_typed_as(operands, in_specs, like=operands))
    return all_typed_as(results, map(types.spec, graph.outputs), like=operands)
