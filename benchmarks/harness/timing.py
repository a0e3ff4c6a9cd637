# SPDX-License-Identifier: Apache-2.0
"""Times several functions side by side on one GPU, in alternating rounds.

In each round, each contender is called often enough to last a few tens of milliseconds,
the device is waited for once, and the time is divided by the number of calls.
Contenders take turns within a round, in an order that rotates, so that drift of the
machine affects all of them. Reported are the median over rounds and the median of the
per-round ratio to one contender, with its range.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_cudnn import native


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A function to time: `call` enqueues one call, `wait` waits for its result.

    A call computes the workload ``count`` times.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], None]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times in microseconds a call; ratios are contender / baseline, round by round."""

    median_us: float
    ratio: float
    ratio_low: float
    ratio_high: float


_Look = Callable[[Mapping[str, Contender], Mapping[str, list[float]]], None]
_looks: list[_Look] = []


@contextlib.contextmanager
def watched(look: _Look) -> Iterator[None]:
    """Have contenders looked at after they are timed, with their times."""
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)


def _time(contender: Contender, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        result = contender.call()
    contender.wait(result)
    return (time.perf_counter() - start) / count * 1e6


def alternate(
    contenders: Mapping[str, Contender],
    *,
    rounds: int = 9,
    round_ms: float = 40.0,
    least_calls: int = 5,
) -> dict[str, list[float]]:
    """Return microseconds a call, round by round.

    Each contender is warmed up first, and its call count chosen then.

    Raises:
      RuntimeError: a plan of cuDNN's was built meanwhile, which takes long.
    """
    counts: dict[str, int] = {}
    for name, contender in contenders.items():
        _time(contender, min(3, least_calls))
        once = _time(contender, least_calls)
        counts[name] = max(least_calls, min(2000, int(round_ms * 1e3 / once)))
    builds = native.cache_stats().builds
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(_time(contenders[name], counts[name]))
    if native.cache_stats().builds != builds:
        raise RuntimeError("a plan was built while timing")
    for look in _looks:
        look(contenders, times)
    return times


def summary(times: Sequence[float], baseline: Sequence[float]) -> Timing:
    """Return a contender's median and its ratios to another one, from their rounds."""
    ratios = [x / y for x, y in zip(times, baseline, strict=True)]
    return Timing(
        median_us=statistics.median(times),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )


def compare(
    contenders: Mapping[str, Contender],
    *,
    baseline: str,
    rounds: int = 9,
    round_ms: float = 40.0,
    least_calls: int = 5,
) -> dict[str, Timing]:
    """Time the contenders, in alternating rounds."""
    times = alternate(
        contenders, rounds=rounds, round_ms=round_ms, least_calls=least_calls
    )
    return {name: summary(each, times[baseline]) for name, each in times.items()}
