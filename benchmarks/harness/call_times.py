# SPDX-License-Identifier: Apache-2.0
"""Times calls by one implementation beside another, on operands in memory."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax

from benchmarks.harness.operands import count_of, drawn_sets
from benchmarks.harness.timing import Contender, Timing, alternate, summary
from jax_cudnn.config import Implementation
from jax_cudnn.policy.nearest import LOSS
from jax_cudnn.tuning.stopwatch import compile_over_sets
from jax_cudnn.tuning.together import together

_AT_ONCE = 16

_T = TypeVar("_T")


class Call(Protocol):
    """A call on operands of some types, by one implementation or another."""

    @property
    def title(self) -> str: ...
    def types(self) -> list[jax.ShapeDtypeStruct]: ...
    def run(self, implementation: Implementation, *operands: jax.Array) -> Any: ...


def batched(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield values in groups of which all is compiled at once."""
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]


def compare(
    calls: Sequence[Call], names: tuple[Implementation, Implementation]
) -> Iterator[dict[str, Any]]:
    """Yield the times of each call by two implementations, and their ratio.

    What takes more than 1.05 of the other's time is timed again, longer, and that time
    counts.
    """
    one, other = names
    for some in batched(calls):
        programs = together(
            [
                functools.partial(_compiled, call, name)
                for call in some
                for name in names
            ]
        )
        pairs = zip(programs[::2], programs[1::2], strict=True)
        for call, pair in zip(some, pairs, strict=True):
            row: dict[str, Any] = {}
            timing: Timing | None = None
            contenders = {name: x for name, x in zip(names, pair, strict=True) if x}
            if len(contenders) == len(names):
                sets = drawn_sets(call.types())
                try:
                    for rounds in (5, 21):
                        times = timed(contenders, sets, rounds=rounds)
                        timing = summary(times[one], times[other])
                        if timing.ratio <= LOSS:
                            break
                    row[f"{other}_us"] = round(statistics.median(times[other]), 2)
                except jax.errors.JaxRuntimeError as error:
                    row["failed"], timing = str(error)[:100], None
                del sets
            if timing is not None:
                row |= {
                    f"{one}_us": round(timing.median_us, 2),
                    "ratio": round(timing.ratio, 3),
                    "ratio_low": round(timing.ratio_low, 3),
                    "ratio_high": round(timing.ratio_high, 3),
                }
            yield row


def timed(
    programs: dict[Any, Callable[..., Any]], sets: Sequence[Any], *, rounds: int
) -> dict[Any, list[float]]:
    """Return microseconds a set, round by round."""
    contenders = {
        name: Contender(
            call=functools.partial(program, sets), wait=jax.block_until_ready
        )
        for name, program in programs.items()
    }
    times = alternate(contenders, rounds=rounds, round_ms=8.0, least_calls=2)
    return {name: [us / len(sets) for us in each] for name, each in times.items()}


def _compiled(call: Call, implementation: Implementation) -> Callable[..., Any] | None:
    types = call.types()
    sets = [types] * count_of(types)
    run = functools.partial(call.run, implementation)
    try:
        return compile_over_sets(run, sets)
    except jax.errors.JaxRuntimeError as error:  # no memory for XLA's attention, say
        print(f"  {call.title}: {implementation}: {str(error)[:200]}", flush=True)
        return None
