# SPDX-License-Identifier: Apache-2.0
"""Times each of cuDNN's candidates for a part of a graph by itself.

fastest.py looks for the fastest and drops the rest early; here all are timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jax_cudnn import native, policy
from jax_cudnn.errors import GraphError, UnsupportedError
from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import Rewrite
from jax_cudnn.native import Candidate
from jax_cudnn.progress import followed
from jax_cudnn.tuning.stopwatch import Measurement, PlanStopwatch, draw_sets

_SAMPLES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedCandidate:
    """A candidate with its kernels' time, or with the failure of its build.

    ``candidate`` is the built plan where it builds: its workspace is then known.
    """

    candidate: Candidate
    time: Measurement | None
    failure: str


def time_candidates(part: Graph, target: Target) -> list[TimedCandidate]:
    """Return all of cuDNN's candidates for a part, in cuDNN's order, with their times.

    They are those of the first way of rewriting the part that cuDNN takes; array work
    around the kernel is not in their times. Empty where cuDNN takes none.
    """
    for ranked in policy.ranked(part, target):
        try:
            return time_candidates_of(part, ranked.rewrite)
        except UnsupportedError:
            continue
    return []


def time_candidates_of(part: Graph, rewrite: Rewrite) -> list[TimedCandidate]:
    """Return the candidates for one way of rewriting a part, with their times.

    Raises:
      UnsupportedError: cuDNN has none.
    """
    device = jax.local_devices(backend="cuda")[0]
    text, ordinal = to_json(rewrite.graph), device.local_hardware_id
    return list(_times(part, rewrite, native.candidates(text, device=ordinal), device))


def _times(
    part: Graph, rewrite: Rewrite, listed: tuple[Candidate, ...], device: Any
) -> Iterator[TimedCandidate]:
    sets = draw_sets(part, device)
    changed = [list(jax.jit(rewrite.before)(operands)) for operands in sets]
    stopwatch = PlanStopwatch(rewrite.graph, changed, device)
    text, ordinal = to_json(rewrite.graph), device.local_hardware_id
    for candidate in followed(
        listed, "Timing", count=len(listed), name=lambda each: each.name
    ):
        if not candidate.request:
            failure = "this version of cudnn-frontend cannot name it"
            yield TimedCandidate(candidate=candidate, time=None, failure=failure)
            continue
        if candidate.refusal:
            yield TimedCandidate(
                candidate=candidate, time=None, failure=candidate.refusal
            )
            continue
        try:
            plan = native.plan(text, request=candidate.request, device=ordinal)
        except (GraphError, UnsupportedError) as error:
            yield TimedCandidate(candidate=candidate, time=None, failure=str(error))
            continue
        measured = stopwatch.time(plan, samples=_SAMPLES)
        yield TimedCandidate(candidate=plan, time=measured, failure="")
