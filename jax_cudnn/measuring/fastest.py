# SPDX-License-Identifier: Apache-2.0
"""Which of cuDNN's plans, or XLA's code, runs a part of a graph fastest?"""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import jax

from jax_cudnn import contenders, native
from jax_cudnn.choices import Choice, digest_of
from jax_cudnn.config import Options
from jax_cudnn.errors import GraphError, UnsupportedError
from jax_cudnn.graph import Graph, Target, label, operand_text, to_json
from jax_cudnn.legalize import Legal, legalize
from jax_cudnn.lowering import run_contender, run_cudnn, run_xla
from jax_cudnn.lowering.decision import Step
from jax_cudnn.lowering.devices import local_device
from jax_cudnn.measuring.correctness import (
    bound,
    comparable,
    largest_error,
    reference_results,
    with_own_results,
)
from jax_cudnn.measuring.stopwatch import (
    PlanStopwatch,
    compile_over_sets,
    draw_sets,
    time_calls,
)

_log = logging.getLogger("jax_cudnn")

# A first look takes one sample of each plan; those this much slower than the best one
# are not looked at again.
_HOPELESS = 1.25
_SAMPLES = 7
_BUILDERS = 8

_T = TypeVar("_T")


class OutOfTimeError(Exception):
    """The time was over before everything was measured."""


def measure(
    part: Graph, options: Options, target: Target, deadline: float = float("inf")
) -> Choice:
    """Time everything that may run a part of a graph, and return the fastest.

    Plans of one graph race by the device's events. The fastest whose results agree with
    the reference, of each way of rewriting the part, then meets XLA's code, each with
    all its array work, in compiled programs. So do the contenders that were added, if
    they agree, where the options leave it open who runs the part.

    Raises:
      OutOfTimeError: ``time.monotonic()`` went past the deadline before the end.
    """
    device = local_device()
    sets = draw_sets(part, device)

    def time_it(function: Callable[..., Any]) -> float:
        if time.monotonic() > deadline:
            raise OutOfTimeError
        call = compile_over_sets(function, sets)
        return time_calls(call, len(sets), samples=_SAMPLES).median_us

    xla_us = _unless_it_fails(lambda: time_it(lambda *xs: run_xla(part, xs, options)))
    example = _unless_it_fails(lambda: _example(part, sets[0]))
    first_ratio: float | None = None
    best: tuple[float, Legal, str] | None = None
    ordinal = device.local_hardware_id
    for legal, plans in _contenders(part, options, target, ordinal):
        changed = [list(jax.jit(legal.before)(operands)) for operands in sets]
        stopwatch = PlanStopwatch(legal.graph, changed, device)
        race = list(_race(stopwatch, plans, deadline))
        for winner, winner_us in sorted(race, key=lambda entry: entry[1]):
            step = Step(
                part=part,
                legal=legal,
                plan=winner,
                target=target,
                request=winner.request,
            )
            if time.monotonic() > deadline:
                raise OutOfTimeError
            if not _agrees(step, functools.partial(_run_cudnn, step), example):
                continue
            if first_ratio is None:
                first_ratio = race[0][1] / winner_us
            us = _unless_it_fails(
                lambda step=step: time_it(functools.partial(_run_cudnn, step))
            )
            if us is not None and (best is None or us < best[0]):
                best = (us, legal, winner.request)
            break
    choice = Choice(
        op=label(part),
        operands=operand_text(part),
        implementation="",
        plan=best[2] if best else "",
        rewritten=digest_of(best[1].graph) if best else "",
        cudnn_us=round(best[0], 2) if best else None,
        first_ratio=None if first_ratio is None else round(first_ratio, 3),
        xla_us=None if xla_us is None else round(xla_us, 2),
        contenders_us=tuple(_contenders_us(part, options, time_it, example)),
    )
    return replace(choice, implementation=choice.fastest)


def _run_cudnn(step: Step, *operands: jax.Array) -> Sequence[jax.Array]:
    return run_cudnn(step, operands)


def _contenders_us(
    part: Graph,
    options: Options,
    time_it: Callable[[Callable[..., Any]], float],
    example: "_Example | None",
) -> Iterator[tuple[str, float]]:
    """Yield the contenders that agree with the reference, and their times."""
    if options.plan.to_request():
        return  # which is about cuDNN's plans
    for contender, program in contenders.all_of(part):
        step = Step(part=part, contender=contender.title, program=program)

        def run(*operands: jax.Array, step: Step = step) -> Sequence[jax.Array]:
            return run_contender(step, operands)

        with _failures_told(step):
            us = _unless_it_fails(functools.partial(time_it, run))
            if us is not None and _agrees(step, run, example):
                yield contender.title, round(us, 2)


@contextmanager
def _failures_told(step: Step) -> Iterator[None]:
    """Say what a contender raises, and go on: it is not ours, and does not run."""
    try:
        yield
    except OutOfTimeError:
        raise
    except NotImplementedError as error:
        _log.debug("%s does not run %s: %s", step.contender, label(step.part), error)
    except Exception as error:
        _log.warning(
            "%s is not chosen for %s(%s), where it fails: %s: %s",
            step.contender, label(step.part), operand_text(step.part),
            type(error).__name__, error,
        )  # fmt: skip


def _unless_it_fails(run: Callable[[], _T]) -> _T | None:
    """Return what a contender's run returns; None, with a line of log, if it cannot.

    XLA's attention may be out of memory where cuDNN's is not, for one.
    """
    try:
        # What fails on the device may do so after the call.
        return jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        _log.debug("a contender does not run: %s", error)
        return None


_Example = tuple[list[jax.Array], list[jax.Array]]


def _example(part: Graph, operands: Sequence[jax.Array]) -> _Example:
    """Return operands that go together, and what the reference gives for them."""
    operands = with_own_results(part, operands)
    return operands, reference_results(part, operands)


def _agrees(step: Step, run: Callable[..., Any], example: _Example | None) -> bool:
    """Whether a step computes what is expected; one that does not is warned of."""
    if example is None:
        return True
    operands, expected = example
    results = _unless_it_fails(lambda: jax.jit(run)(*operands))
    if results is None:
        return False
    part, most = step.part, bound(step.part)
    error = largest_error(comparable(part, results), comparable(part, expected))
    if error <= most:
        return True
    name = f"cuDNN's plan {step.plan.name}" if step.plan else step.contender
    _log.warning(
        "%s for %s(%s) is not chosen: its results differ from the "
        "reference's by %.2g of their norm, where rounding explains %.2g",
        name, label(part), operand_text(part), error, most,
    )  # fmt: skip
    return False


def _contenders(
    part: Graph, options: Options, target: Target, ordinal: int
) -> Iterator[tuple[Legal, list[native.PlanInfo]]]:
    """Yield each way of rewriting the part, with the plans that build for it."""
    with ThreadPoolExecutor(_BUILDERS) as pool:
        for legal in legalize(part, target).candidates:
            json = to_json(legal.graph)
            try:
                listed = native.candidates(
                    json, request=options.plan.to_request(), device=ordinal
                )
            except UnsupportedError:
                continue
            pins = [each.request for each in listed if not each.refusal]
            build = functools.partial(_build, json, options, ordinal)
            built = pool.map(build, filter(None, pins))
            yield legal, [plan for plan in built if plan is not None]


def _build(
    json: str, options: Options, ordinal: int, request: str
) -> native.PlanInfo | None:
    try:
        plan = native.plan(json, request=request, device=ordinal)
    except (UnsupportedError, GraphError):
        return None
    limit = options.plan.workspace_limit_bytes
    return plan if limit is None or plan.workspace_bytes <= limit else None


def _race(
    stopwatch: PlanStopwatch, plans: list[native.PlanInfo], deadline: float
) -> Iterator[tuple[native.PlanInfo, float]]:
    """Time the plans that run, with more samples for those that may be the best.

    The others are told with the time of the first look.
    """
    looks: list[tuple[native.PlanInfo, float]] = []
    for plan in plans:
        if time.monotonic() > deadline:
            raise OutOfTimeError
        try:
            look = stopwatch.time(plan, samples=1, sample_us=500).median_us
        except (RuntimeError, MemoryError) as error:
            _log.debug("%s does not run: %s", plan.name, error)
        else:
            looks.append((plan, look))
    longest = min((look for _, look in looks), default=0.0) * _HOPELESS
    for plan, look in looks:
        is_hopeless = look > longest
        us = look if is_hopeless else stopwatch.time(plan, samples=_SAMPLES).median_us
        yield plan, us
