# SPDX-License-Identifier: Apache-2.0
"""What is a sum over devices in a kernel's graph, what waits for it, what is scattered?

A sum of 32-bit shares whose results are in 16 bits is sent twice as far as it needs to
be if every device gets all of it. So a large sum is scattered: each device has the sum
of its own part, computes on it what follows, and XLA gathers the 16-bit results, where
the program wants them whole at all.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jax_cudnn.graph import DTypeName, Graph, Node, is_anchor
from jax_cudnn.graph.rules import accumulator
from jax_cudnn.graph.walks import following, leading_to, made_by, read_by
from jax_cudnn.lowering.cuts import DeviceCut, Division
from jax_cudnn.reference.dtypes import jax_dtype

# Elements of a device's share. Below, another collective costs more than it saves.
LEAST_SCATTERED = 1 << 22

# The cuts of the axes of an array.
Cuts = Sequence[DeviceCut | None]


def summed(division: Division, name: str) -> frozenset[int]:
    """Return the factors along which devices have shares of a tensor."""
    partial = division.factors.partial.get(name, frozenset[int]())
    return partial.intersection(division.cuts)


def sum_dtype(dtype: DTypeName) -> DTypeName:
    """Return the dtype in which shares of a tensor of a dtype are added up."""
    return dtype if dtype == "i32" else accumulator(dtype)


def stages(graph: Graph, division: Division) -> list[list[Node]]:
    """Return all nodes, or the kernel and what follows it, which waits for its sums."""
    (kernel,) = (node for node in graph.nodes if is_anchor(node))
    made = made_by([kernel])
    waits = any(made & read_by([node]) for node in graph.nodes)
    if not waits or not any(summed(division, name) for name in made):
        return [[*graph.nodes]]
    first = leading_to(graph.nodes, made)
    rest = [node for node in graph.nodes if node not in first]
    # Constants and the like that both need are computed twice.
    return [first, [*leading_to(first, read_by(rest) - made), *rest]]


def scattering(
    graph: Graph, division: Division[DeviceCut], wanted: Mapping[str, Cuts]
) -> Division[DeviceCut]:
    """Return the division with sums scattered, and what follows from them.

    That is for large sums, and for those whose results the program wants scattered.
    """
    first, *rest = stages(graph, division)
    for name in sorted(made_by(first)):
        if not summed(division, name):
            continue
        after = rest[0] if rest and name in read_by(rest[0]) else []
        results = following(after, {name}).intersection(graph.outputs)
        is_large = math.prod(division.local_shape(name)) >= LEAST_SCATTERED
        bytes_of_results = sum(_bytes(graph.tensor(each).dtype) for each in results)
        bytes_of_sum = _bytes(sum_dtype(graph.tensor(name).dtype))
        # Scattered, what follows is computed once.
        sends_less = bytes_of_results < bytes_of_sum + bool(after)
        ways = [*_ways(division, name, first, after)]
        hits = [_hits(way, results, wanted) for way in ways]
        if ways and (max(hits) == len(results) or (is_large and sends_less)):
            division = ways[hits.index(max(hits))]
    return division


def _bytes(dtype: DTypeName) -> int:
    return np.dtype(jax_dtype(dtype)).itemsize


def _ways(
    division: Division[DeviceCut],
    name: str,
    first: Sequence[Node],
    after: Sequence[Node],
) -> Iterator[Division[DeviceCut]]:
    """Yield divisions in which a sum and what follows it are scattered.

    What the kernel reads as well has to stay as it is.
    """
    factors = division.factors
    cut = functools.reduce(
        DeviceCut.then, (division.cuts[f] for f in sorted(summed(division, name)))
    )
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


def _hits(
    division: Division[DeviceCut], results: Iterable[str], wanted: Mapping[str, Cuts]
) -> int:
    """Return how many of the results are as the program wants them."""
    found = 0
    for name in results:
        own = [
            functools.reduce(DeviceCut.then, cuts) if cuts else None
            for cuts in division.cuts_of(name)
        ]
        found += own == [*wanted[name]]
    return found
