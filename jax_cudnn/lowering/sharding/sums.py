# SPDX-License-Identifier: Apache-2.0
"""Finds the sums over devices in a kernel's graph, and chooses which to scatter.

A sum that every device gets is sent whole. One that is scattered is sent in parts: each
device has the sum of its own part, computes on it what follows, and XLA gathers the
results where the program wants them whole. What is faster was measured
(docs/internals/sharding.md): where the program wants the parts it is scattering, and
where the results are fewer bytes than the sum. Partial sums that a kernel gives in 16
bits are sent as they are, and added up in 32 bits where they arrive, unless the call
asks for sums in the dtype of its operands.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jax_cudnn.config import Options
from jax_cudnn.graph import DTypeName, Graph, Node, is_anchor, kind_named
from jax_cudnn.graph.rules import EIGHT_BIT, accumulator, narrow_dtype
from jax_cudnn.graph.walks import following, leading_to, made_by, read_by
from jax_cudnn.lowering.sharding.cuts import DeviceCut, Division
from jax_cudnn.policy.tables import tables_for
from jax_cudnn.reference.dtypes import jax_dtype

# The cuts of the axes of an array.
Cuts = Sequence[DeviceCut | None]


def summed(division: Division, name: str) -> frozenset[int]:
    """Return the factors along which devices have partial sums of a tensor."""
    partial = division.factors.partial.get(name, frozenset[int]())
    return partial.intersection(division.cuts)


def partial_sum_count(division: Division, name: str) -> int:
    """Return how many partial sums a tensor is the sum of."""
    return math.prod(division.cuts[factor].count for factor in summed(division, name))


def sum_dtype(graph: Graph, name: str, options: Options) -> DTypeName:
    """Return the dtype in which partial sums of a tensor are added up.

    With `reduce_dtype="operands"`, that is the 16-bit dtype that the sum has in plain
    JAX. A sum stays f32 where the program says f32: it is an f32 result, or any f32
    tensor with `exact_dtypes`.
    """
    dtype = graph.tensor(name).dtype
    if dtype == "i32":
        return dtype
    if options.reduce_dtype == "operands":
        dtypes: list[DTypeName] = [dtype]
        if name not in graph.outputs and not options.exact_dtypes:
            makers = (node for node in graph.nodes if name in made_by([node]))
            dtypes = [graph.tensor(each).dtype for each in read_by(makers)]
            if set(dtypes) <= {*EIGHT_BIT}:
                return _of_f8_products(graph, name)
        if dtype != "f64" and (narrow := narrow_dtype(*dtypes)):
            return narrow
    return accumulator(dtype)


def _of_f8_products(graph: Graph, name: str) -> DTypeName:
    """Return bf16 if all results of a product of f8 copies are bf16, otherwise f32.

    The scales of the copies are applied to the sum. Until then it may be beyond what
    f16 holds.
    """
    results = following(graph.nodes, {name}).intersection(graph.outputs)
    dtypes = {graph.tensor(each).dtype for each in results}
    return "bf16" if dtypes == {"bf16"} else "f32"


def partial_sum_dtype(graph: Graph, name: str, options: Options) -> DTypeName:
    """Return the dtype in which a kernel gives partial sums of a tensor."""
    own, wide = graph.tensor(name).dtype, sum_dtype(graph, name, options)
    is_rounded = name in rounded_sums(graph) and _bytes(wide) > _bytes(own)
    return own if is_rounded else wide


def note_on_partial_sums(stage: Graph, division: Division) -> str:
    """Return what `plans.inspect` says of the partial sums that a stage results in."""
    return " ".join(
        f"Each of {partial_sum_count(division, name)} devices has a partial sum of "
        f"{name}, in {stage.tensor(name).dtype}."
        for name in stage.outputs
        if summed(division, name) and name not in division.factors.maxima
    )


def stages(graph: Graph, division: Division) -> list[list[Node]]:
    """Return all nodes, or the kernel and what follows it, which waits for its sums."""
    (kernel,) = (node for node in graph.nodes if is_anchor(node))
    # For gelu(x @ w + bias), where devices divide the contraction, the stages are
    # [matmul] and [add, gelu]: the bias and gelu wait for the sum over devices. Where
    # they do not divide it, there is one stage, and the kernel computes all three.
    made = made_by([kernel])
    waits = any(made & read_by([node]) for node in graph.nodes)
    if not waits or not any(summed(division, name) for name in made):
        return [[*graph.nodes]]
    first = leading_to(graph.nodes, made)
    rest = [node for node in graph.nodes if node not in first]
    # Constants and the like that both need are computed twice.
    return [first, [*leading_to(first, read_by(rest) - made), *rest]]


def rounded_sums(graph: Graph) -> set[str]:
    """Return the sums that a node gives in the dtype of its result.

    A kernel does so where it has to, or where another dtype would be slow: a
    convolution's gradient kernels take up to three times as long (9.19 on an H200,
    docs/internals/sharding.md).
    """
    return {
        name
        for node in graph.nodes
        for _, name in node.outputs
        if not (row := kind_named(node.kind).row).has_wide_sums and not row.is_sum
    }


def scattering(
    graph: Graph,
    division: Division[DeviceCut],
    wanted: Mapping[str, Cuts],
    options: Options,
) -> Division[DeviceCut]:
    """Return the division with sums scattered, and what follows from them.

    `wanted` has the cuts of the axes of results, as the program wants them.
    """
    # Four devices have partial sums of a gradient (24, 10), and the program wants its
    # rows divided among them, as an optimizer with sharded state does. Then the sum is
    # scattered: each device gets (6, 10) of it.
    first, *rest = stages(graph, division)
    for name in sorted(made_by(first)):
        if not summed(division, name):
            continue
        after = rest[0] if rest and name in read_by(rest[0]) else []
        results = following(after, {name}).intersection(graph.outputs)
        cuts = [cut for each in sorted(results) for cut in wanted.get(each, ())]
        scatterings = [*_scatterings(division, name, first, after, cuts)]
        if not scatterings:
            continue
        matches = [_matches(each, results, wanted) for each in scatterings]
        best = max(matches)
        is_wanted = best.near == len(results)
        size = math.prod(division.local_shape(name))
        bounds = tables_for(None).about("scattered").scattered
        is_medium = bounds.least <= size and (bool(after) or size < bounds.most_alone)
        sends_less = _sends_less(graph, division, name, results, options)
        if is_wanted or (is_medium and sends_less):
            division = scatterings[matches.index(best)]
    return division


def _sends_less(
    graph: Graph,
    division: Division[DeviceCut],
    name: str,
    results: Iterable[str],
    options: Options,
) -> bool:
    """Whether results that are gathered are fewer bytes than a sum that is not."""
    if name in rounded_sums(graph) and options.reduce_dtype == "f32":
        # The sum of two is rounded once, wherever it is computed.
        return partial_sum_count(division, name) > 2
    gathered = sum(_bytes(graph.tensor(each).dtype) for each in results)
    return gathered < _bytes(sum_dtype(graph, name, options))


def _bytes(dtype: DTypeName) -> int:
    return np.dtype(jax_dtype(dtype)).itemsize


def _scatterings(
    division: Division[DeviceCut],
    name: str,
    first: Sequence[Node],
    after: Sequence[Node],
    wanted: Iterable[DeviceCut | None],
) -> Iterator[Division[DeviceCut]]:
    """Yield divisions in which a sum and what follows it are scattered.

    What the kernel reads as well has to stay as it is. Devices have the parts of the
    sum in the order of their partial sums, or in an order in which parts next to each
    other make up a part that the program wants.
    """
    shared = (division.cuts[f] for f in sorted(summed(division, name)))
    cut = functools.reduce(DeviceCut.then, shared)
    found = [cut, *(cut.within(other) for other in wanted if other is not None)]
    for each in dict.fromkeys(x for x in found if x is not None):
        yield from _scatterings_along(division, each, name, first, after)


def _scatterings_along(
    division: Division[DeviceCut],
    cut: DeviceCut,
    name: str,
    first: Sequence[Node],
    after: Sequence[Node],
) -> Iterator[Division[DeviceCut]]:
    """Yield divisions in which a sum is scattered by a cut, of one axis each."""
    factors = division.factors
    depend = following(after, {name})
    if any(summed(division, each) for each in depend - {name}):
        return
    for factor in (f for product in factors.axes[name] for f in product):
        names = {
            each
            for each in {name} | made_by(after) | read_by(after)
            if factor in factors.of(each)
        }
        taken = read_by(first) | made_by(first) | division.scattered.keys()
        if (
            factor in division.cuts
            or factor in factors.whole
            or factors.sizes[factor] % cut.count
            or not depend <= names
            or not taken.isdisjoint(names - {name})
        ):
            continue
        further = {each: {factor: cut} for each in names}
        found = replace(division, scattered={**division.scattered, **further})
        if found.is_contiguous():
            yield found


class _Matches(NamedTuple):
    """How many results are as the program wants them, or are parts of such.

    Of such parts, devices beside each other make what is wanted: weights that are split
    along one axis of the mesh have sums along several.
    """

    exact: int
    near: int


def _matches(
    division: Division[DeviceCut], results: Iterable[str], wanted: Mapping[str, Cuts]
) -> _Matches:
    """Return how many of the results are as the program wants them."""
    exact = near = 0
    for name in results:
        own = [
            functools.reduce(DeviceCut.then, cuts) if cuts else None
            for cuts in division.cuts_of(name)
        ]
        others = [*wanted.get(name, ())]
        exact += own == others
        near += len(own) == len(others) and all(map(_refines, own, others))
    return _Matches(exact, near)


def _refines(cut: DeviceCut | None, other: DeviceCut | None) -> bool:
    """Whether each part of a cut is in one part of another, or both are none."""
    if cut is None or other is None:
        return cut == other
    halves = cut.split(other.count)
    return halves is not None and halves[0] == other
