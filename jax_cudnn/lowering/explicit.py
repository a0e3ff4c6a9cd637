# SPDX-License-Identifier: Apache-2.0
"""A graph on operands that say in their types how they are sharded.

Such a graph runs in `jax.shard_map`: each device computes its part (share.py). How the
results are sharded follows from the operands by the rule that XLA's partitioner is
given as well (partitioned.py).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_cudnn.config import Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Factors, Graph, is_anchor
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.cuts import Division, NamedCut, divide
from jax_cudnn.lowering.members import all_members, unmerged
from jax_cudnn.lowering.parts import run_parts
from jax_cudnn.lowering.primitives import run_graph, run_reference
from jax_cudnn.lowering.sharding_rule import factors_at
from jax_cudnn.lowering.share import Collectives, run_share


def run_explicit(
    graph: Graph, operands: Sequence[jax.Array], options: Options
) -> list[jax.Array]:
    """Return the graph's results, sharded as its operands imply.

    An axis that the kernel needs whole is gathered. An axis that is summed is added up
    over the devices, so that the result is not sharded along these.

    Raises:
      UnsupportedError: two axes of the result would be sharded along the same axis of
        the mesh, or operands are sharded differently along an axis that they share.
    """
    operands = unmerged(graph, operands)
    if sum(map(is_anchor, graph.nodes)) == 1:
        return _run_kernel(graph, operands, options)

    def kernel(part: Graph, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return run_graph(part, arguments, options)

    def around(part: Graph, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return run_reference(part, arguments, options)

    # The gradient of examples that are sharded, for example.
    return run_parts(graph, operands, kernel, around)


def _run_kernel(
    graph: Graph, operands: Sequence[jax.Array], options: Options
) -> list[jax.Array]:
    """Run a graph of one kernel in `jax.shard_map`."""
    shapes = tuple(x.shape for x in operands)
    members = all_members(graph, shapes)
    factors = factors_at(graph, shapes)
    mesh = _jax.explicit_mesh(operands)
    given = [
        (name, [_cut(mesh, entry) for entry in _jax.explicit_spec(x)])
        for name, x in zip(graph.inputs, operands, strict=True)
    ]
    # Other axes of the mesh may be those of a vmap around.
    names = {axis for _, cuts in given for cut in cuts if cut for axis, _ in cut.axes}
    division = divide(_without_strays(graph, factors), given)
    _check(graph, division, given)

    def total(x: jax.Array, over: frozenset[int]) -> jax.Array:
        axes = [name for f in sorted(over) for name, _ in division.cuts[f].axes]
        return jax.lax.psum(x, tuple(axes))

    def run(part: Graph, arguments: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return run_graph(part, arguments, options)

    def share(*parts: jax.Array) -> list[jax.Array]:
        return run_share(graph, members, division, parts, run, Collectives(total=total))

    in_specs = [_spec(division, name) for name in graph.inputs]
    out_specs = [_spec(division, name) for name in graph.outputs]
    placed = [
        jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))
        for x, spec in zip(operands, in_specs, strict=True)
    ]
    mapped = jax.shard_map(
        share,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names=names,
    )
    return jax.jit(mapped)(*placed)


def _cut(mesh: Any, entry: Any) -> NamedCut | None:
    if entry is None:
        return None
    names = entry if isinstance(entry, tuple) else (entry,)
    return NamedCut(tuple((name, mesh.shape[name]) for name in names))


def _spec(division: Division[NamedCut], name: str) -> PartitionSpec:
    entries = [
        tuple(axis for cut in cuts for axis, _ in cut.axes)
        for cuts in division.cuts_of(name)
    ]
    return PartitionSpec(*(entry or None for entry in entries))


def _without_strays(graph: Graph, factors: Factors) -> Factors:
    """Return the factors, whole where a result neither has them nor sums them.

    Devices would all compute that result, but its type would not say that they agree:
    what comes from one graph varies as all of the graph's operands do.
    """
    given = factors.of(*graph.inputs)
    strays = set[int]()
    summed = {name: set[int]() for name in graph.inputs}
    for node in graph.nodes:
        read = factors.of(*(name for _, name in node.inputs))
        before = set[int]().union(*(summed[name] for _, name in node.inputs))
        for _, name in node.outputs:
            strays |= read - factors.of(name) - factors.partial[name]
            summed[name] = before | factors.partial[name]
    for name in graph.outputs:
        strays |= given - factors.of(name) - summed[name]
    return factors.with_whole(strays)


def _check(
    graph: Graph,
    division: Division[NamedCut],
    given: Sequence[tuple[str, Sequence[NamedCut | None]]],
) -> None:
    """Refuse operands whose shardings contradict each other."""
    results = division.factors.of(*graph.outputs)
    for name, cuts in given:
        for i, (product, cut) in enumerate(
            zip(division.factors.axes[name], cuts, strict=True)
        ):
            kept = [division.cuts[f] for f in product if f in division.cuts]
            is_kept = cut is None or NamedCut(sum((c.axes for c in kept), ())) == cut
            if is_kept or not results.issuperset(product) or not product:
                continue
            if division.factors.whole.isdisjoint(product):
                shown = ", ".join(axis for axis, _ in cut.axes) if cut else ""
                raise UnsupportedError(
                    f"{graph.nodes[0].kind}: axis {i} of {name} is sharded along "
                    f"{shown} of the mesh, and another operand's sharding along the "
                    "same axes of the mesh, or of the same axis, contradicts it. "
                    "Reshard one of the operands with jax.sharding.reshard, or use a "
                    "mesh with AxisType.Auto."
                )
