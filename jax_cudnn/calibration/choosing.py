# SPDX-License-Identifier: Apache-2.0
"""Chooses which kernels to measure next: those of which least is known.

A measured kernel tells of those near it (policy/nearest.py), and less where cuDNN and
XLA took about as long: there, the next size may decide otherwise.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_cudnn.calibration.calls import (
    Call,
    drawn_alone,
    drawn_biased,
    drawn_call,
    drawn_conv_in_groups,
    drawn_grouped,
    drawn_mlp,
    drawn_step,
)
from jax_cudnn.calibration.rules import kernel_of_row
from jax_cudnn.graph import Graph, Target, is_anchor, label, operand_text
from jax_cudnn.lowering import traced_program
from jax_cudnn.policy import measured_as, ranked
from jax_cudnn.policy.nearest import Kernel, between, family_of

# The calls whose kernels are measured, in turns. Most programs consist of the first.
_DRAWN: Sequence[Callable[[int], Call]] = (
    *(drawn_call, drawn_call, drawn_call),
    *(drawn_mlp, drawn_step, drawn_conv_in_groups, drawn_grouped, drawn_alone),
    drawn_biased,
)
# So many kernels are compared, of which the best are taken.
_AT_HAND = 160
# After so many calls without a new kernel, no more are drawn.
_IN_VAIN = 2000
# How much a measurement tells where both took the same time, and where one took e times
# as long as the other, or more.
_CLOSE, _APART = 0.5, 1.5

# What stands for a kernel in a file: its operations and its operands.
Name = tuple[str, str]


@dataclass(frozen=True)
class Candidate:
    """A part that can be measured, and what it is measured as."""

    part: Graph
    kernel: Kernel

    @property
    def name(self) -> Name:
        """What stands for it in a file."""
        return label(self.part), operand_text(self.part)


def name_of(row: Mapping[str, Any]) -> Name:
    """Return what stands for a row's kernel."""
    return row["op"], row["operands"]


def drawn(target: Target, only: Callable[[Call], bool]) -> Iterator[Candidate]:
    """Yield kernels of random calls, each once, until calls have no more new ones."""
    seen: set[Graph] = set()
    in_vain = 0
    for number in itertools.count():
        draw = _DRAWN[number % len(_DRAWN)]
        call = draw(number)
        found = [*_kernels_of(call, target, seen)] if only(call) else []
        yield from found
        in_vain = 0 if found else in_vain + 1
        if in_vain >= _IN_VAIN:
            return


def _kernels_of(call: Call, target: Target, seen: set[Graph]) -> Iterator[Candidate]:
    for part in parts_of(call):
        if part in seen:
            continue
        seen.add(part)
        rewrites = ranked(part, target)
        kernel = measured_as(part, rewrites[0].rewrite, target) if rewrites else None
        if kernel is not None:
            yield Candidate(part, kernel)


def parts_of(call: Call) -> list[Graph]:
    """Return the parts of a call that kernels run, each once."""
    traced = traced_program(functools.partial(call.run, "auto"), *call.types())
    parts = itertools.chain.from_iterable(graph.parts for graph in traced.graphs)
    return [*dict.fromkeys(x for x in parts if any(map(is_anchor, x.nodes)))]


class Chooser:
    """Takes from candidates those of which least is known."""

    def __init__(
        self, candidates: Iterator[Candidate], rows: Iterable[Mapping[str, Any]]
    ) -> None:
        """Take what was measured before."""
        self._candidates = candidates
        self._at_hand: list[Candidate] = []
        self._weights: dict[str, list[tuple[Kernel, float]]] = {}
        self._names: set[Name] = set()
        for row in rows:
            self.learn(row)

    def learn(self, row: Mapping[str, Any]) -> None:
        """Know a row from now on."""
        kernel = kernel_of_row(row)
        weight = _CLOSE + min(_APART - _CLOSE, abs(math.log(row["ratio"])))
        self._names.add(name_of(row))
        self._add(kernel, weight)

    def _add(self, kernel: Kernel, weight: float) -> None:
        self._weights.setdefault(family_of(kernel.name), []).append((kernel, weight))

    def take(self, count: int) -> list[Candidate]:
        """Return so many kernels; none is returned twice."""
        found: list[Candidate] = []
        while len(found) < count:
            missing = _AT_HAND - len(self._at_hand)
            new = (x for x in self._candidates if x.name not in self._names)
            self._at_hand += itertools.islice(new, missing)
            if not self._at_hand:
                break
            best = min(self._at_hand, key=self._known)
            self._at_hand.remove(best)
            if best.name not in self._names:
                found.append(best)
                self._names.add(best.name)
                self._add(best.kernel, _CLOSE)
        return found

    def _known(self, candidate: Candidate) -> float:
        """Return how much is known of a kernel."""
        weights = self._weights.get(family_of(candidate.kernel.name), ())
        return sum(
            weight / (0.5 + between(candidate.kernel, each)) for each, weight in weights
        )
