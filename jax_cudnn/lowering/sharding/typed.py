# SPDX-License-Identifier: Apache-2.0
"""Divides a kernel whose operands' types say how they are sharded.

The rule is the one that XLA's partitioner is given (partitioned.py). How the results
are sharded follows from it, and is part of their types.

For example, a matmul of (14, 24) and (24, 10) has three factors: rows, contraction and
columns. On a mesh of data=2 and model=5, rows may be cut along "data" and columns along
"model". Then each device multiplies (7, 24) by (24, 2). If the contraction is cut, each
device has a partial sum of the result, and the result, their sum, is whole:

>>> import jax_cudnn
>>> from jax.sharding import AbstractMesh, AxisType, NamedSharding
>>> explicit = (AxisType.Explicit, AxisType.Explicit)
>>> mesh = AbstractMesh((2, 5), ("data", "model"), axis_types=explicit)
>>> def product(*specs):
...     a, b = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
...     a = jax.ShapeDtypeStruct((14, 24), "float32", sharding=a)
...     b = jax.ShapeDtypeStruct((24, 10), "float32", sharding=b)
...     with jax.sharding.use_abstract_mesh(mesh):
...         return jax.eval_shape(jax_cudnn.matmul, a, b).sharding.spec
>>> print(*product(("data", None), (None, "model")))
data model
>>> print(*product((None, "data"), ("data", None)))
None None

Rows and columns cannot both be cut along "data":

>>> product(("data", None), (None, "data"))  # doctest: +ELLIPSIS
Traceback (most recent call last):
jax_cudnn.errors.UnsupportedError: matmul: the axis of b with size ... is sharded ...
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import (
    Factors,
    Graph,
    axis_classes,
    derivative_of,
    is_anchor,
)
from jax_cudnn.graph.factors import Product
from jax_cudnn.lowering.sharding.array_types import (
    axes_in,
    explicit_mesh,
    explicit_spec,
    is_explicitly_sharded,
    typed_as,
)
from jax_cudnn.lowering.sharding.cuts import Division, NamedCut, divide
from jax_cudnn.lowering.sharding.parts import is_divided_by_xla
from jax_cudnn.lowering.sharding.sharding_rule import factors_at
from jax_cudnn.lowering.sharding.subaxes import all_subaxes, result_shapes


@dataclass(frozen=True, kw_only=True)
class Types:
    """The sharding of a kernel's arrays that their types say.

    ``division``: along which axes of the mesh, also those of one device.
    ``singletons``: how axes of size 1 are sharded, for each tensor by the number of its
    array's axis. They have no factor that is divided, and can only be sharded along
    axes of one device.
    ``is_settled``: whether the operands contradict each other, and the result that is
    wanted has decided.
    """

    division: Division[NamedCut]
    singletons: Mapping[str, Mapping[int, tuple[str, ...]]]
    is_settled: bool = False

    @property
    def effective(self) -> Division[NamedCut]:
        """The division among devices, without cuts along axes of one device.

        A sum along these is complete, so its kernel is that of arrays on one device.
        """
        cuts = {factor: cut.effective for factor, cut in self.division.cuts.items()}
        found = {factor: cut for factor, cut in cuts.items() if cut is not None}
        return Division(self.division.factors, found)

    def spec(self, name: str) -> PartitionSpec:
        """Return how a tensor's array is sharded."""
        singletons = self.singletons.get(name, {})
        entries = spec_of(self.division, name)
        return PartitionSpec(
            *(singletons.get(i, each) for i, each in enumerate(entries))
        )


def types_of(
    graph: Graph,
    operands: Sequence[Any],
    *,
    may_gather: bool = False,
    wanted: Sequence[Any] | None = None,
) -> Types:
    """Return how a kernel's arrays are sharded, given its operands or their types.

    `wanted` has the entries of the result's sharding for its axes that are not of size
    1. It decides where operands contradict each other.

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
    given = _given(graph, operands)
    # What is contracted is gathered, before results are: weights that are sharded to
    # save memory are so along axes of the mesh that divide the batch, too.
    results = factors.of(*graph.outputs)
    # On a device alone, a factor may be cut along its axis that else has to be whole.
    on_several = _on_several(factors, given)
    unmatched = _unmatched(graph, factors) & on_several
    if is_divided_by_xla(graph):
        # As XLA leaves it, which runs this on several devices.
        factors = replace(factors, whole=factors.whole & on_several)
    factors = factors.with_whole(unmatched)
    division = divide(factors, given, first=results)
    conflict = "" if may_gather else _conflict(graph, operands, division, given)
    is_settled = bool(conflict)
    if is_settled:
        if wanted is None:
            raise UnsupportedError(conflict)
        start = divide(factors, [_result(graph, operands, wanted)])
        division = divide(factors, given, first=results, start=start)
    singletons = _singletons(graph, operands, division)
    return Types(division=division, singletons=singletons, is_settled=is_settled)


def would_gather(graph: Graph, operands: Sequence[Any]) -> bool:
    """Whether a kernel needs whole what types say is on several devices in parts."""
    if not any(map(is_explicitly_sharded, operands)):
        return False
    factors = factors_at(graph, tuple(x.shape for x in operands))
    on_several = _on_several(factors, _given(graph, operands))
    return not factors.whole.isdisjoint(on_several)


def _on_several(
    factors: Factors, given: Sequence[tuple[str, Sequence[NamedCut | None]]]
) -> set[int]:
    """Return the factors of axes that are cut along several devices."""
    return {
        factor
        for name, cuts in given
        for product, cut in zip(factors.axes[name], cuts, strict=True)
        for factor in product
        if cut is not None and cut.effective is not None
    }


def gathered_to_merge(graph: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return a graph's operands, gathered along subaxes that are not the slowest.

    Only along that one may an axis be sharded that is merged of several.
    """
    subaxes = all_subaxes(graph, tuple(x.shape for x in operands))

    def spec(name: str, x: jax.Array) -> PartitionSpec:
        places = (i for own in subaxes[name] for i in range(len(own)))
        both = zip(explicit_spec(x), places, strict=True)
        return PartitionSpec(*(entry if i == 0 else None for entry, i in both))

    specs = map(spec, graph.inputs, operands)
    return all_typed_as(operands, specs, like=operands)


def _singletons(
    graph: Graph, operands: Sequence[Any], division: Division[NamedCut]
) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return how axes of size 1 are sharded: as one that is the same in an operand."""
    classes = axis_classes(graph, with_ones=True)
    subaxes = all_subaxes(graph, tuple(x.shape for x in operands))
    # For each tensor, the class of each axis of size 1, by the axis of its array.
    at: dict[str, dict[int, int]] = {}
    for tensor in graph.tensors:
        axes = [(i, each) for i, own in enumerate(subaxes[tensor.name]) for each in own]
        at[tensor.name] = {
            axis: classes[tensor.name, tensor.order[i]]
            for axis, (i, size) in enumerate(axes)
            if size == 1
        }
    given: dict[int, tuple[str, ...]] = {}
    for name, x in zip(graph.inputs, operands, strict=True):
        spec = explicit_spec(x)
        for axis, number in at[name].items():
            if (entry := spec[axis]) is not None:
                given.setdefault(number, axes_in(entry))
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for name, axes_of_one in at.items():
        taken = {axis for each in spec_of(division, name) for axis in axes_in(each)}
        found[name] = {}
        for axis, number in axes_of_one.items():
            names = given.get(number, ())
            if names and taken.isdisjoint(names):
                found[name][axis] = names
                taken.update(names)
    return found


def all_typed_as(
    arrays: Iterable[jax.Array],
    specs: Iterable[PartitionSpec],
    like: Sequence[jax.Array],
) -> list[jax.Array]:
    """Return arrays sharded so, on the mesh of other arrays."""
    pairs = zip(arrays, specs, strict=True)
    return [typed_as(x, spec, like=like) for x, spec in pairs]


def spec_of(division: Division[NamedCut], name: str) -> PartitionSpec:
    """Return how a tensor's array is sharded."""
    entries = [
        tuple(axis for cut in cuts for axis, _ in cut.axes)
        for cuts in division.cuts_of(name)
    ]
    return PartitionSpec(*(entry or None for entry in entries))


def _given(
    graph: Graph, operands: Sequence[Any]
) -> list[tuple[str, list[NamedCut | None]]]:
    """Return how each axis of the operands is cut, by their types."""
    mesh = explicit_mesh(operands)
    return [
        (name, [_cut(entry, mesh) for entry in explicit_spec(x)])
        for name, x in zip(graph.inputs, operands, strict=True)
    ]


def _result(
    graph: Graph, operands: Sequence[Any], wanted: Sequence[Any]
) -> tuple[str, list[NamedCut | None]]:
    """Return how the axes of the first result are wanted to be cut."""
    shape = result_shapes(graph, [x.shape for x in operands])[0]
    entries = iter(wanted)
    mesh = explicit_mesh(operands)
    cuts = [None if size == 1 else _cut(next(entries), mesh) for size in shape]
    return graph.outputs[0], cuts


def _cut(entry: Any, mesh: Any) -> NamedCut | None:
    if entry is None:
        return None
    return NamedCut(tuple((name, mesh.shape[name]) for name in axes_in(entry)))


def _unmatched(graph: Graph, factors: Factors) -> set[int]:
    """Return the factors that a result neither has nor sums.

    If they were divided, devices would all compute that result, but its type would not
    say that they agree: what comes from one graph varies as all of its operands do.
    """
    given = factors.of(*graph.inputs)
    unmatched = set[int]()
    summed = {name: set[int]() for name in graph.inputs}
    for node in graph.nodes:
        read = factors.of(*(name for _, name in node.inputs))
        before = set[int]().union(*(summed[name] for _, name in node.inputs))
        for _, name in node.outputs:
            unmatched |= read - factors.of(name) - factors.partial[name]
            summed[name] = before | factors.partial[name]
    for name in graph.outputs:
        unmatched |= given - factors.of(name) - summed[name]
    return unmatched


def operation_in(graph: Graph) -> str:
    """Return which operation a graph of one kernel is, as messages begin."""
    kernel = next(filter(is_anchor, graph.nodes), graph.nodes[0])
    return kernel.kind.removesuffix("_fprop")


def _conflict(
    graph: Graph,
    operands: Sequence[Any],
    division: Division[NamedCut],
    given: Sequence[tuple[str, Sequence[NamedCut | None]]],
) -> str:
    """Return how the operands' shardings contradict each other; "" if they do not.

    Axes are named by their sizes: arrays of a graph may have more axes than the user's.
    """
    results = division.factors.of(*graph.outputs)
    for (name, cuts), x in zip(given, operands, strict=True):
        for i, (product, cut) in enumerate(
            zip(division.factors.axes[name], cuts, strict=True)
        ):
            if cut is None or _keeps(division, product, cut):
                continue
            if not product or not results.issuperset(product):
                continue
            # A cut that its axis does not take at all is nobody else's fault.
            alone = divide(division.factors, [(name, _only(cuts, i))])
            if _keeps(alone, product, cut):
                shown = ", ".join(axis for axis, _ in cut.axes)
                return (
                    f"{operation_in(graph)}: the axis of {name} with size {x.shape[i]} "
                    f"is sharded along {shown} of the mesh. Another operand has "
                    f"another axis sharded along {shown}, or the same axis sharded "
                    "differently. Reshard one of the operands with "
                    "jax.sharding.reshard, or use a mesh with AxisType.Auto."
                )
    return ""


def _keeps(division: Division[NamedCut], product: Product, cut: NamedCut) -> bool:
    """Whether an axis that has these factors is cut among devices as it should be."""
    kept = [division.cuts[f].axes for f in product if f in division.cuts]
    return cut.effective in (None, NamedCut(sum(kept, ())).effective)


def _only(cuts: Sequence[NamedCut | None], axis: int) -> list[NamedCut | None]:
    return [cut if i == axis else None for i, cut in enumerate(cuts)]
