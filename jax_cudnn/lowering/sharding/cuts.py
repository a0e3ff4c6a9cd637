# SPDX-License-Identifier: Apache-2.0
"""Divides the factors of a kernel's arrays among devices.

A cut divides an axis into equal parts and says which device has which. XLA's
partitioner gives cuts by the parts of devices, a mesh gives them by the names of its
axes; what follows from them is the same.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jax_cudnn.graph.factors import Factors, Product


@dataclass(frozen=True, slots=True)
class DeviceCut:
    """A division of an axis into ``count`` parts, by the part that each device has.

    Devices are counted as XLA counts the partitions of a program.
    """

    count: int
    parts: tuple[int, ...]

    # The parts (0, 1, 2, 3), split in 2, are halves (0, 0, 1, 1) with a first and a
    # second quarter each, (0, 1, 0, 1). `then` puts these together again.
    def split(self, major: int) -> "tuple[DeviceCut, DeviceCut] | None":
        """Return it as `major` parts, each divided further."""
        minor, rest = divmod(self.count, major)
        if rest:
            return None
        return (
            DeviceCut(major, tuple(part // minor for part in self.parts)),
            DeviceCut(minor, tuple(part % minor for part in self.parts)),
        )

    def then(self, minor: "DeviceCut") -> "DeviceCut":
        """Return it with each part divided further, as another cut says."""
        pairs = zip(self.parts, minor.parts, strict=True)
        parts = tuple(part * minor.count + further for part, further in pairs)
        return DeviceCut(self.count * minor.count, parts)

    def within(self, major: "DeviceCut") -> "DeviceCut | None":
        """Return it with its parts in the order in which they divide another's further.

        None where they do not divide them equally.
        """
        # Four devices have quarters (0, 2, 1, 3), and the other cut gives them halves
        # (0, 0, 1, 1). Renumbered as quarters (0, 1, 2, 3), devices 0 and 1 have the
        # two quarters of the first half.
        own = dict(zip(self.parts, major.parts, strict=True))
        is_finer = all(
            own[x] == y for x, y in zip(self.parts, major.parts, strict=True)
        )
        shares = Counter(own.values())
        if not is_finer or {*shares.values()} != {self.count / major.count}:
            return None
        order = sorted(own, key=lambda part: (own[part], part))
        places = {part: place for place, part in enumerate(order)}
        return DeviceCut(self.count, tuple(places[part] for part in self.parts))

    def is_independent_of(self, others: Sequence[Any]) -> bool:
        """Whether all combinations of parts are on equally many devices."""
        cuts = [self, *others]
        found = Counter(zip(*(cut.parts for cut in cuts), strict=True))
        full = math.prod(cut.count for cut in cuts)
        return len(found) == full and len(set(found.values())) == 1


@dataclass(frozen=True, slots=True)
class NamedCut:
    """A division of an axis along axes of a mesh, given with sizes, slowest first.

    One along axes of a single device divides nothing, and is part of types all the
    same.
    """

    axes: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        """The number of parts."""
        return math.prod(size for _, size in self.axes)

    @property
    def effective(self) -> "NamedCut | None":
        """The cut without axes of one device; None where nothing is left."""
        axes = tuple((name, size) for name, size in self.axes if size > 1)
        return NamedCut(axes) if axes else None

    def split(self, major: int) -> "tuple[NamedCut, NamedCut] | None":
        """Return it as `major` parts, each divided further, between two axes."""
        for i in range(len(self.axes)):
            first = NamedCut(self.axes[:i])
            if first.count == major:
                return first, NamedCut(self.axes[i:])
        return None

    def is_independent_of(self, others: Sequence[Any]) -> bool:
        """Whether they have no axis in common."""
        taken = {name for cut in others for name, _ in cut.axes}
        return taken.isdisjoint(name for name, _ in self.axes)


Cut = TypeVar("Cut", DeviceCut, NamedCut)


@dataclass(frozen=True)
class Division(Generic[Cut]):
    """The cuts of factors; all other factors are whole on every device.

    ``cuts``: of all tensors that have the factors. ``scattered``: further cuts, of some
    tensors only.
    """

    factors: Factors
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    scattered: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a device's part of a tensor's array."""
        return tuple(map(math.prod, self._local_sizes(name)))

    def cuts_of(self, name: str) -> tuple[tuple[Cut, ...], ...]:
        """Return the cuts of each axis of a tensor's array, the slowest first."""
        cuts = self._cuts_at(name)
        return tuple(
            tuple(cuts[factor] for factor in product if factor in cuts)
            for product in self.factors.axes[name]
        )

    def is_contiguous(self) -> bool:
        """Whether a device's part of each axis is one piece of it.

        A factor may be cut only if a device has no more than one of each slower one.
        """
        for name, products in self.factors.axes.items():
            # Twelve rows are factors (2, 6). If the 2 is cut in 2, a device has rows
            # 0:6. If only the 6 is cut in 3, it has rows 0:2 and 6:8, which are not
            # contiguous.
            cuts = {f: cut for f, cut in self._cuts_at(name).items() if cut.count > 1}
            for product, sizes in zip(products, self._local_sizes(name), strict=True):
                several = [i for i, size in enumerate(sizes) if size > 1]
                if several and not cuts.keys().isdisjoint(product[several[0] + 1 :]):
                    return False
        return True

    def _cuts_at(self, name: str) -> Mapping[int, Cut]:
        further = self.scattered.get(name)
        return {**self.cuts, **further} if further else self.cuts

    def _local_sizes(self, name: str) -> list[list[int]]:
        """Return what a device has of each factor of each axis."""
        cuts, sizes = self._cuts_at(name), self.factors.sizes
        return [
            [sizes[f] // (cuts[f].count if f in cuts else 1) for f in product]
            for product in self.factors.axes[name]
        ]


def divide(
    factors: Factors,
    given: Sequence[tuple[str, Sequence[Cut | None]]],
    *,
    may_sum: bool = True,
    first: frozenset[int] = frozenset(),
    start: Division[Cut] | None = None,
) -> Division[Cut]:
    """Return a division that keeps as much of the arrays where it is as it can.

    `given` has the cuts of the axes of operands and results. Where two claim the same
    devices for different factors, the larger array keeps its cut. But axes that have a
    factor of `first` come before all others. A cut that does not divide its factors is
    dropped. Without `may_sum`, nothing is cut that a result sums. What `start` has cut
    stays.
    """
    whole = set(factors.whole)
    if not may_sum:
        whole.update(*factors.partial.values())

    def elements(entry: tuple[str, Sequence[Cut | None]]) -> int:
        return math.prod(factors.sizes[factor] for factor in factors.of(entry[0]))

    claims = [
        (product, cut)
        for name, cuts in sorted(given, key=elements, reverse=True)
        for product, cut in zip(factors.axes[name], cuts, strict=True)
        if cut is not None
    ]
    division = start or Division[Cut](factors)
    for product, cut in sorted(claims, key=lambda claim: first.isdisjoint(claim[0])):
        division = _with_cut(division, product, cut, whole)
    return division


def _with_cut(
    division: Division[Cut], product: Product, cut: Cut, whole: set[int]
) -> Division[Cut]:
    """Return a division with as much of a cut of one axis as it takes."""
    # An axis of factors (2, 6) that is to be cut in 4: the 2 is cut in 2, and then the
    # 6 is cut in 2. To be cut in 3 is not possible: neither of 2 and 3 divides the
    # other.
    rest: Cut | None = cut
    for factor in product:
        if rest is None:
            break
        size = division.factors.sizes[factor]
        if size % rest.count == 0:
            own, rest = rest, None
        elif rest.count % size == 0 and (halves := rest.split(size)) is not None:
            own, rest = halves
        else:
            break
        known = division.cuts.get(factor)
        if known is not None and known != own:
            break
        if known is None:
            if factor in whole or not own.is_independent_of([*division.cuts.values()]):
                break
            division = Division(division.factors, {**division.cuts, factor: own})
            if not division.is_contiguous():
                cuts = {f: c for f, c in division.cuts.items() if f != factor}
                return Division(division.factors, cuts)
    return division
