# SPDX-License-Identifier: Apache-2.0
"""Finds what runs each of several parts fastest: a plan of cuDNN's, or XLA's code.

`contest.py` says how one part is measured. Here is what parts share: programs that are
compiled at once, other processes that build plans, and the time that there is.

For example, 20 parts are to be measured within a minute, on a host with 8 cores.

1. A part is expected to take 25 s of a core, which is 3.1 s of the host. A minute is
   enough for 19 parts, but at most two parts for each core begin: 16.
2. The programs of the 16 parts are compiled together. With 12 parts or more, other
   processes build plans of some parts while plans of another part are timed.
3. The 16 parts took 40 s, 2.5 s each. The other 20 s are enough for 8 parts, so the
   last 4 begin. If the 16 parts had taken 56 s, one more would be measured, and then
   `OutOfTimeError` raised for the other three.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from jax_cudnn.choices import Choice
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, Target
from jax_cudnn.lowering.devices import local_device
from jax_cudnn.offline.builders import PlanBuilders, plan_builders
from jax_cudnn.tuning.contest import Contest
from jax_cudnn.tuning.pace import Pace
from jax_cudnn.tuning.together import Task, WithFollowUp, Work, in_stages, workers

# Processes that build plans take some seconds to start: for so many parts, on so many
# cores, they save more.
_ENOUGH_PARTS = 12
_ENOUGH_CORES = 4


def measure(
    part: Graph,
    options: Options,
    target: Target,
    deadline: float = math.inf,
    max_plans: int | None = None,
) -> Choice:
    """Time everything that may run a part of a graph, and return the fastest.

    Plans of one graph race by the device's events. The fastest whose results agree with
    the reference, of each rewrite of the part, is then compared with XLA's code, each
    with all its array work, in compiled programs. So are the contenders that were
    added, if they agree, where the options leave it open who runs the part.

    Raises:
      OutOfTimeError: ``time.monotonic()`` went past the deadline before the end.
    """
    return next(measure_each([(part, options)], target, deadline, max_plans))


def measure_each(
    parts: Sequence[tuple[Graph, Options]],
    target: Target,
    deadline: float = math.inf,
    max_plans: int | None = None,
    until: Callable[[], float] = lambda: math.inf,
    beside: Sequence[Task] = (),
) -> Iterator[Choice]:
    """Yield what `measure` returns for each of the parts.

    What has to be compiled for a few parts is compiled at once. While one is timed,
    plans of others are built, by other processes. The tasks ``beside`` run while the
    first programs are compiled.

    ``until`` says when all should be done, by ``time.monotonic()``. Parts begin as long
    as they should be done by then (`Pace`), and after it only the first plan of each
    engine is timed. What has begun goes on until ``deadline``.

    Raises:
      OutOfTimeError: as `measure`, or parts are left. The choices that were yielded
        before hold.
    """
    cores, ordinal = workers(), local_device().local_hardware_id
    pace, done = Pace(until), 0
    others: PlanBuilders | None = None
    with ExitStack() as stack:
        while done < len(parts):
            some = parts[done : done + pace.count(done)]
            is_worth_it = len(some) >= _ENOUGH_PARTS and cores >= _ENOUGH_CORES
            if others is None and is_worth_it:
                builders = plan_builders(target, ordinal, cores)
                others = stack.enter_context(builders)
            contests = [
                Contest(part, options, target, deadline, max_plans, pace, others)
                for part, options in some
            ]
            works: list[Work[Any]] = [contest.choice() for contest in contests]
            if done == 0:
                works.insert(0, _beside(beside))
            results = in_stages(works)
            if done == 0:
                next(results)
            yield from results
            done += len(some)


def _beside(tasks: Sequence[Task]) -> Work[None]:
    """Run tasks with the first programs: the first tasks only find the entrants."""
    yield []
    # Tasks with a follow-up begin before all others.
    yield [WithFollowUp(task, lambda result: result) for task in tasks]
