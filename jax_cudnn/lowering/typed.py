# SPDX-License-Identifier: Apache-2.0
"""How is a kernel divided whose operands say in their types how they are sharded?

By the rule that XLA's partitioner is given as well (partitioned.py). How the results
are sharded follows from it, and is part of their types.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Factors, Graph, derivative_of
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.cuts import Division, NamedCut, divide
from jax_cudnn.lowering.sharding_rule import factors_at


def typed_division(
    graph: Graph, operands: Sequence[Any], *, may_gather: bool = False
) -> Division[NamedCut]:
    """Return how a kernel's graph is divided, given its operands or their types.

    Raises (unless `may_gather`, for kernels that the user did not write):
      UnsupportedError: two axes of the result would be sharded along the same axis of
        the mesh, or operands are sharded differently along an axis that they share.
    """
    # With the results that its gradient would need: results have one type, whether or
    # not they are differentiated.
    derivative = derivative_of(graph)
    if derivative is not None:
        graph = derivative.with_residuals(graph, (True,) * len(graph.inputs))
    factors = factors_at(graph, tuple(x.shape for x in operands))
    mesh = _jax.explicit_mesh(operands)
    given = [
        (name, [_cut(mesh, entry) for entry in _jax.explicit_spec(x)])
        for name, x in zip(graph.inputs, operands, strict=True)
    ]
    division = divide(_without_strays(graph, factors), given)
    if not may_gather:
        _check(graph, division, given)
    return division


def effective(division: Division[NamedCut]) -> Division[NamedCut]:
    """Return what is divided of a division: not what is cut along axes of one device.

    A sum along these is complete, so that its kernel is that of arrays on one device.
    """
    cuts = {factor: cut.effective for factor, cut in division.cuts.items()}
    return Division(division.factors, {f: cut for f, cut in cuts.items() if cut})


def placed(
    graph: Graph, operands: Sequence[jax.Array], division: Division[NamedCut]
) -> list[jax.Array]:
    """Return a kernel's operands, sharded as a division says."""
    return [
        _jax.typed_as(x, spec_of(division, name), like=operands)
        for x, name in zip(operands, graph.inputs, strict=True)
    ]


def spec_of(division: Division[NamedCut], name: str) -> PartitionSpec:
    """Return how a tensor's array is sharded."""
    entries = [
        tuple(axis for cut in cuts for axis, _ in cut.axes)
        for cuts in division.cuts_of(name)
    ]
    return PartitionSpec(*(entry or None for entry in entries))


def _cut(mesh: Any, entry: Any) -> NamedCut | None:
    if entry is None:
        return None
    names = entry if isinstance(entry, tuple) else (entry,)
    return NamedCut(tuple((name, mesh.shape[name]) for name in names))


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
            kept = [division.cuts[f].axes for f in product if f in division.cuts]
            wanted = None if cut is None else cut.effective
            is_kept = wanted in (None, NamedCut(sum(kept, ())).effective)
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
