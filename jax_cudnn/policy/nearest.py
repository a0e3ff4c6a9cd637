# SPDX-License-Identifier: Apache-2.0
"""Estimates how fast cuDNN's first plan is for a kernel, from similar kernels' times.

A kernel is like a product of (rows, depth) and (depth, columns). It has a class, which
says what else matters (kernels.py). The distance of two kernels is that of the
logarithms of their sizes, and more where their classes differ.
"""

import functools
import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# What takes more than this of XLA's time is a loss.
LOSS = 1.05
# So many of the measured kernels speak for one, if there are so many.
_NEAREST = 8
# Fewer than this say too little. Those whose sizes are further away than this, a factor
# of 20 in one of them, say nothing.
_FEWEST = 3
FAR = 3.0
# The weight of a kernel is 1 / (this + its distance).
_NEAR = 0.5
# What differs in classes of one family counts as a factor of e in one size, or of its
# root where one class has it and the other has not.
_WORD = 0.5
# With this after a contraction or nothing, XLA runs it as one kernel. What else follows
# is a kernel of its own: between these two, the distance is larger by this.
_XLAS_OWN = frozenset({"alone", "sums", "relu"})
_OTHER_CODE = 1.0
# XLA runs convolutions along three axes by other algorithms: between these and others,
# the distance is larger by this.
_THREE_AXES = "3 axes"
_OTHER_AXES = 1.5
# Words without which kernels are of another family, beside those that begin with the
# other one here. Convolutions in groups are of one only if the same becomes of their
# groups (conv_groups.py). Depthwise ones of few taps are a sum of shifted products to
# XLA, which takes a tenth of the time of its convolutions.
FAMILIES = frozenset(
    {"few rows", "groups", "depthwise", "few taps", "merged", "padded", "one group"}
)
_WITH = "with "
# The part of a time above a loss counts three times, and what takes more than twice
# XLA's time counts as that: no single kernel decides for its neighbours.
_MORE = 2.0
_MOST = 2.0
# Where an engine is asked about, kernels that were not timed with it are further away
# by this.
_OTHER_ENGINE = 0.5
# By how much cuDNN has to be faster, after that. If kernels are judged by others, 0.1
# gives cuDNN 15 % fewer losses than 0.06, and takes 1.5 % of what it gains.
_MARGIN = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel: its class, and the sizes of the product that it is like.

    One that was measured has the times of cuDNN's engines over that of XLA's code, by
    their numbers, as far as they are known.
    """

    name: str
    rows: float
    columns: float
    depth: float
    engines: Mapping[int, float] = field(default_factory=dict, compare=False)

    @property
    def work(self) -> float:
        """The multiplications."""
        return self.rows * self.columns * self.depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The evidence about a kernel from the measured kernels most like it.

    ``ratio`` is the geometric mean of the time of cuDNN's first plan over that of XLA's
    code, in which near kernels weigh more. Of ``count`` kernels, ``losses`` took cuDNN
    more than 1.05 of XLA's time. ``is_faster`` says whether cuDNN is to run it.
    ``tables`` has, for each of them, the place of the table that it is from.
    """

    ratio: float
    count: int
    losses: int
    is_faster: bool
    tables: tuple[int, ...] = ()


class Neighbour(NamedTuple):
    """A measured kernel near another: the distance, and ratios of times.

    ``ratio`` is cuDNN's time over XLA's, and ``engines`` the same for each engine.
    """

    distance: float
    ratio: float
    engines: Mapping[int, float]

    def by(self, engine: int | None) -> tuple[float, float]:
        """Return the distance and the ratio as if that engine had the first plan."""
        if engine is None:
            return self.distance, self.ratio
        if engine in self.engines:
            return self.distance, self.engines[engine]
        return self.distance + _OTHER_ENGINE, self.ratio


class Measured:
    """Kernels that were measured, each with cuDNN's time over XLA's."""

    def __init__(self, kernels: Iterable[tuple[Kernel, float]]) -> None:
        families: defaultdict[str, list[tuple[Kernel, float]]] = defaultdict(list)
        for kernel, ratio in kernels:
            families[family_of(kernel.name)].append((kernel, ratio))
        self._families: Mapping[str, Sequence[tuple[Kernel, float]]] = families

    def near(
        self, kernel: Kernel, engine: int | None = None
    ) -> Iterator[tuple[float, float]]:
        """Yield the distances and ratios of those that say something of a kernel.

        The ratios are of an engine, if one is given and it was timed, and otherwise of
        cuDNN's first plan.
        """
        return (each.by(engine) for each in self.neighbours(kernel))

    def neighbours(self, kernel: Kernel) -> Iterator[Neighbour]:
        """Yield those that say something of a kernel."""
        for each, ratio in self._families.get(family_of(kernel.name), ()):
            distance = between_sizes(kernel, each)
            if distance <= FAR:
                distance += between_names(kernel.name, each.name)
                yield Neighbour(distance, ratio, each.engines)

    def verdict(self, kernel: Kernel, engine: int | None = None) -> Verdict | None:
        """Return what is known of a kernel, None where too few are near it."""
        return verdict_of((*each, 0) for each in self.near(kernel, engine))


def verdict_of(
    found: Iterable[tuple[float, float, int]], most_apart: float = math.inf
) -> Verdict | None:
    """Judge a kernel by the distances, ratios and tables of others.

    None where too few are no further away than that, words and tables counted.
    """
    near = heapq.nsmallest(_NEAREST, found, key=operator.itemgetter(0))
    if sum(distance <= most_apart for distance, _, _ in near) < _FEWEST:
        return None
    weights = [1 / (_NEAR + distance) for distance, _, _ in near]
    ratios = [ratio for _, ratio, _ in near]
    return Verdict(
        ratio=math.exp(_mean(map(math.log, ratios), weights)),
        count=len(near),
        losses=sum(ratio > LOSS for ratio in ratios),
        is_faster=_mean(map(cost_of, ratios), weights) < -_MARGIN,
        tables=tuple(table for _, _, table in near),
    )


def cost_of(ratio: float) -> float:
    """Return what it costs to take a plan, given its time over another's."""
    capped = min(ratio, _MOST)
    return math.log(capped) + _MORE * max(0.0, math.log(capped / LOSS))


def between(one: Kernel, other: Kernel) -> float:
    """Return how far apart two kernels of a family are."""
    return between_sizes(one, other) + between_names(one.name, other.name)


def between_sizes(one: Kernel, other: Kernel) -> float:
    """Return how far apart the sizes of two kernels are."""
    return math.hypot(
        math.log(one.rows / other.rows),
        math.log(one.columns / other.columns),
        math.log(one.depth / other.depth),
    )


@functools.cache
def between_names(one: str, other: str) -> float:
    """Return how far apart two classes of a family are."""
    words, others = {*one.split(", ")}, {*other.split(", ")}
    distance = _WORD * len(words ^ others)
    if _XLAS_OWN.isdisjoint(words) != _XLAS_OWN.isdisjoint(others):
        distance += _OTHER_CODE
    if _THREE_AXES in words ^ others:
        distance += _OTHER_AXES
    return distance


@functools.cache
def family_of(name: str) -> str:
    """Return what kernels have to have in common: kind, bits, and how they are run."""
    kind, bits, *words = name.split(", ")
    own = {word for word in words if word in FAMILIES or word.startswith(_WITH)}
    return ", ".join([kind, bits, *sorted(own)])


def _mean(values: Iterable[float], weights: Sequence[float]) -> float:
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return sum(products) / sum(weights)
