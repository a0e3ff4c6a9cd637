# SPDX-License-Identifier: Apache-2.0
"""How fast is cuDNN's first plan for a kernel, by those most like it?

A kernel is like a product of (rows, depth) and (depth, columns). It has a class, which
says what else matters (measured.py). The distance of two kernels is that of the
logarithms of their sizes, and more where their classes differ.
"""

import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# So many of the measured kernels speak for one.
_NEAREST = 8
# Fewer than this say too little, and so do those that are further away than this: a
# factor of 20 in one size.
_FEWEST = 3
_FAR = 3.0
# The weight of a kernel is 1 / (this + its distance).
_NEAR = 0.5
# What differs in classes of one family counts as a factor of e in one size, or of its
# root where one class has it and the other has not.
_WORD = 0.5
# With this after a contraction or nothing, XLA runs it as one kernel. What else follows
# is a kernel of its own: between these two, the distance is larger by this.
_XLAS_OWN = frozenset({"alone", "sums", "relu"})
_OTHER_CODE = 1.0
# Words without which kernels are of another family.
_FAMILIES = frozenset({"batched", "groups", "few rows"})
# What takes more than this of XLA's time counts three times. What takes more than twice
# XLA's time counts as that, so that no single kernel decides for its neighbours.
_GOAL = math.log(1.05)
_MORE = 2.0
_MOST = math.log(2.0)
# By how much cuDNN has to be faster, after that.
_MARGIN = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A kernel that was measured: its class, its sizes, and cuDNN's time over XLA's."""

    name: str
    rows: float
    columns: float
    depth: float
    ratio: float = 1.0

    @property
    def work(self) -> float:
        """The multiplications."""
        return self.rows * self.columns * self.depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the measured kernels most like one say of it.

    ``ratio`` is the geometric mean of the time of cuDNN's first plan over that of XLA's
    code, in which near kernels weigh more. ``low`` and ``high`` are the least and the
    most. ``is_faster`` says whether cuDNN is to run it.
    """

    ratio: float
    low: float
    high: float
    count: int
    is_faster: bool


class Measured:
    """Kernels that were measured."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        families: defaultdict[str, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            families[_family(kernel.name)].append(kernel)
        self._families: Mapping[str, Sequence[Kernel]] = families

    def verdict(self, kernel: Kernel) -> Verdict | None:
        """Return what is known of a kernel, None where it is too little.

        Too few were measured, or all are far away.
        """
        known = self._families.get(_family(kernel.name), ())
        if len(known) < _FEWEST:
            return None
        distances = ((distance(kernel, each), each.ratio) for each in known)
        near = heapq.nsmallest(_NEAREST, distances)
        if near[0][0] > _FAR:
            return None
        weights = [1 / (_NEAR + far) for far, _ in near]
        times = [math.log(ratio) for _, ratio in near]
        costs = list(map(cost_of, times))
        return Verdict(
            ratio=math.exp(_mean(times, weights)),
            low=math.exp(min(times)),
            high=math.exp(max(times)),
            count=len(near),
            is_faster=_mean(costs, weights) < -_MARGIN,
        )


def cost_of(time: float) -> float:
    """Return what it costs to take a plan, given the logarithm of its time's ratio."""
    capped = min(time, _MOST)
    return capped + _MORE * max(0.0, capped - _GOAL)


def distance(one: Kernel, other: Kernel) -> float:
    """Return how little two kernels of a family are alike."""
    sizes = math.hypot(
        math.log(one.rows / other.rows),
        math.log(one.columns / other.columns),
        math.log(one.depth / other.depth),
    )
    return sizes + _between(one.name, other.name)


@functools.cache
def _between(one: str, other: str) -> float:
    words, others = {*one.split(", ")}, {*other.split(", ")}
    is_as_one = _XLAS_OWN.isdisjoint(words) == _XLAS_OWN.isdisjoint(others)
    return _WORD * len(words ^ others) + (0 if is_as_one else _OTHER_CODE)


@functools.cache
def _family(name: str) -> str:
    """Return what kernels have to have in common: kind, bits, and how they are run."""
    words = name.split(", ")
    return ", ".join([*words[:2], *sorted(_FAMILIES.intersection(words))])


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return sum(products) / sum(weights)
