# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest of cuDNN's plans for one rewrite of a part.

Building a plan takes far longer than timing it. So the first plan of each engine is
built and timed first, and then the other plans of engines that may have a faster one.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jax_cudnn import native
from jax_cudnn.graph import label
from jax_cudnn.legalize import Rewrite
from jax_cudnn.tuning.stopwatch import PlanStopwatch, results_of

_log = logging.getLogger("jax_cudnn")

# A plan whose first launch takes this many times as long as the best plan is launched
# no more.
_HOPELESS = 3
# The first plan of each engine is timed by one sample. If that is over _FAR times the
# best plan's time, a second sample is taken: plans that are built meanwhile disturb the
# first. If the plan is still that slow, the engine's other plans are not built. Of 127
# kernels of GPT-2, ConvNeXt and a U-Net on an H100 (cuDNN 9.19), none has its fastest
# plan among these, which are 9 % of all. In the end, plans up to _FAR times the best
# are timed by _FEW_SAMPLES, and those up to _NEAR times by _SAMPLES.
_FIRST_SAMPLE_US = 500
_FAR = 1.5
_FEW_SAMPLES = 2
_NEAR = 1.05
_SAMPLES = 7


@dataclass(frozen=True, kw_only=True, eq=False)
class Entrant:
    """A rewrite of a part, and the plans of cuDNN's that may be built for it."""

    rewrite: Rewrite
    text: str
    listed: Sequence[native.Candidate]

    @property
    def firsts(self) -> list[str]:
        """The requests for the first plan of each engine."""
        return _firsts(self.listed)

    def prepared(
        self, *operands: jax.Array
    ) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
        """Return the kernel's operands, and arrays for its results."""
        return self.rewrite.before(operands), results_of(self.rewrite.graph)


@dataclass(kw_only=True)
class Race:
    """The plans of one entrant, and the times of those that ran, by their requests.

    ``prepare`` is the entrant's `prepared` as a compiled program.
    """

    entrant: Entrant
    prepare: Callable[..., Any]
    timed: dict[str, tuple[native.PlanInfo, float]] = field(default_factory=lambda: {})

    @property
    def best_us(self) -> float:
        """The time of the fastest plan; inf where none has run."""
        return min((us for _, us in self.timed.values()), default=math.inf)

    @property
    def first_us(self) -> float:
        """The time of the plan that runs untuned."""
        requests = (each.request for each in self.entrant.listed)
        return next(self.timed[each][1] for each in requests if each in self.timed)

    @property
    def in_order(self) -> list[tuple[native.PlanInfo, float]]:
        """The plans that ran, with their times: the fastest come first."""
        return sorted(self.timed.values(), key=lambda entry: entry[1])

    def others(self, is_all: bool) -> list[str]:
        """Return the requests for plans that are not built yet and may be the best.

        Where an engine's first plan did not run, the others may.
        """
        firsts = self.entrant.firsts
        far = {
            (plan.engine, plan.variant)
            for plan, us in self.timed.values()
            if us > _FAR * self.best_us and not is_all
        }
        return [
            each.request
            for each in self.entrant.listed
            if each.request not in firsts and (each.engine, each.variant) not in far
        ]

    def time_plans(
        self,
        plans: Mapping[str, native.PlanInfo],
        sets: Sequence[Sequence[jax.Array]],
        device: Any,
        *,
        is_last: bool,
        before_each: Callable[[], None],
    ) -> None:
        """Time new plans, by their requests; in the end, those near the best longer.

        Those that do not run are left out.
        """
        if not plans and not (is_last and self.timed):
            return
        start = time.monotonic()
        changed, results = zip(*(self.prepare(*each) for each in sets), strict=True)
        graph = self.entrant.rewrite.graph
        stopwatch = PlanStopwatch(graph, changed, device, results)
        ready = time.monotonic()
        for request, plan in plans.items():
            before_each()
            self._time(
                request,
                plan,
                stopwatch,
                samples=1,
                sample_us=_FIRST_SAMPLE_US,
                enough_us=self.best_us * _HOPELESS,
            )
        if is_last:
            self._time_again(stopwatch, _FEW_SAMPLES, up_to=_FAR)
            self._time_again(stopwatch, _SAMPLES, up_to=_NEAR)
        else:
            self._time_again(stopwatch, 1, above=_FAR, up_to=_HOPELESS)
        _log.debug(
            "%d plans of %s timed in %.2f s, after %.2f s for their operands",
            len(plans), label(graph), time.monotonic() - ready, ready - start,
        )  # fmt: skip

    def _time_again(
        self,
        stopwatch: PlanStopwatch,
        samples: int,
        *,
        above: float = 0.0,
        up_to: float,
    ) -> None:
        """Time plans again that took so many times as long as the best one."""
        low, high = above * self.best_us, up_to * self.best_us
        for request, (plan, us) in [*self.timed.items()]:
            if low < us <= high:
                self._time(request, plan, stopwatch, samples=samples)

    def _time(
        self,
        request: str,
        plan: native.PlanInfo,
        stopwatch: PlanStopwatch,
        **options: Any,
    ) -> None:
        try:
            us = stopwatch.time(plan, **options).median_us
        except (RuntimeError, MemoryError) as error:
            _log.debug("%s does not run: %s", plan.name, error)
            self.timed.pop(request, None)
        else:
            self.timed[request] = plan, us


def promising(
    listed: Sequence[native.Candidate], max_plans: int | None
) -> list[native.Candidate]:
    """Return the first plans of a list and the first of each engine, each once."""
    allowed: dict[str, native.Candidate] = {}
    for each in listed:
        if each.request and not each.refusal:
            allowed.setdefault(each.request, each)
    kept = {*_firsts(allowed.values()), *list(allowed)[:max_plans]}
    return [each for request, each in allowed.items() if request in kept]


def _firsts(listed: Iterable[native.Candidate]) -> list[str]:
    found: dict[tuple[int, int], str] = {}
    for each in listed:
        found.setdefault((each.engine, each.variant), each.request)
    return list(found.values())
