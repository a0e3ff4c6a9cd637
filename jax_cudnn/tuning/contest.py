# SPDX-License-Identifier: Apache-2.0
"""Measures everything that may run one part: cuDNN's plans, XLA's code, contenders.

For example, a convolution with a bias that legalisation can write in two ways: with the
bias in the kernel (cuDNN lists 12 plans of 5 engines), or with the bias added by XLA (8
plans of 4 engines). These rewrites are the entrants of two races.

1. The first plan of each engine is built and timed: 9 plans, by the device's events.
2. Engines whose first plan takes more than 1.5 times as long as the fastest one of
   their race are dropped. The other plans of the remaining engines are built and timed.
3. The fastest plan of each race is compared with the reference. If it is wrong, the
   next fastest is compared instead.
4. The winner of each race and XLA's code are timed as compiled programs, with all their
   array work. The fastest is the `Choice`.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from jax_cudnn import contenders, native, policy
from jax_cudnn.choices import Choice, digest_of
from jax_cudnn.config import Options
from jax_cudnn.errors import GraphError, UnsupportedError
from jax_cudnn.graph import Graph, Target, label, operand_text, to_json
from jax_cudnn.lowering import run_contender, run_cudnn, run_xla
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.lowering.devices import local_device
from jax_cudnn.offline.builders import PlanBuilders
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.tuning.agreement import (
    Example,
    agrees,
    make_example,
    measured_error,
    unless_it_fails,
)
from jax_cudnn.tuning.memory import free_bytes, needed_bytes
from jax_cudnn.tuning.pace import OutOfTimeError, Pace
from jax_cudnn.tuning.races import Entrant, Race, promising
from jax_cudnn.tuning.stopwatch import (
    OperandSets,
    compile_over_sets,
    time_calls,
)
from jax_cudnn.tuning.together import Background, Task, WithFollowUp, Work

_log = logging.getLogger("jax_cudnn")

# Of a program.
_SAMPLES = 7
# A program runs once while others are compiled if so many times its memory is free.
_AMPLE = 4

_UNTUNED: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}

_Sets = Sequence[Sequence[jax.Array]]


class Contest:
    """The contenders for a part, all timed on the same operands."""

    def __init__(
        self,
        part: Graph,
        options: Options,
        target: Target,
        deadline: float,
        max_plans: int | None,
        pace: Pace,
        builders: PlanBuilders | None,
    ) -> None:
        self._part, self._options, self._target = part, options, target
        self._deadline, self._max_plans = deadline, max_plans
        self._pace, self._builders = pace, builders
        self._device = local_device()
        self._operands = OperandSets(part, self._device)

    def choice(self) -> Work[Choice]:
        """Measure; what is yielded is compiled before the next line."""
        self._check_time()
        (entrants,) = yield [self._entrants]
        races, by_xla, example_of = yield from self._time_first_plans(entrants)
        yield from self._time_other_plans(races)
        return (yield from self._chosen(races, by_xla, example_of))

    def _time_first_plans(
        self, entrants: Sequence[Entrant]
    ) -> Work[tuple[list[Race], Any, Any]]:
        """Build and time the first plan of each engine of each entrant.

        Returns the races, XLA's program, and the one that makes an example; None for a
        program that does not compile.
        """
        firsts = [(entrant, each) for entrant in entrants for each in entrant.firsts]
        compile_xla = functools.partial(self._compiled_over_sets, self._run_xla)
        by_xla, example_of, _, *rest = yield [
            WithFollowUp(compile_xla, self._started),
            functools.partial(
                self._compiled, functools.partial(make_example, self._part)
            ),
            self._operands.compile,
            *(
                functools.partial(self._compiled, entrant.prepared)
                for entrant in entrants
            ),
            *(functools.partial(self._build, *each) for each in firsts),
        ]
        prepare, plans = rest[: len(entrants)], rest[len(entrants) :]
        self._check_time()
        races = [
            Race(entrant=entrant, prepare=program)
            for entrant, program in zip(entrants, prepare, strict=True)
            if program is not None
        ]
        self._time_plans(races, firsts, plans, is_last=False)
        return races, by_xla, example_of

    def _time_other_plans(self, races: Sequence[Race]) -> Work[None]:
        """Time the plans of engines that are near the fastest, those near it longer."""
        is_all = self._max_plans is None
        others = [
            (race.entrant, each) for race in races for each in race.others(is_all)
        ]
        if self._pace.is_late:
            others = []
        plans = yield [self._build_in_background(*each) for each in others]
        self._check_time()
        self._time_plans(races, others, plans, is_last=True)

    def _chosen(
        self,
        races: Sequence[Race],
        by_xla: Callable[..., Any] | None,
        example_of: Callable[..., Any] | None,
    ) -> Work[Choice]:
        """Let each race's winner meet XLA's code, if it agrees, and so contenders.

        All of these are timed one after the other, while nothing else runs.
        """
        races = [race for race in races if race.timed]
        ordered = [self._in_order(race) for race in races]
        winners = [functools.partial(run_cudnn, steps[0][0]) for steps in ordered]
        of_one = [functools.partial(self._compiled_error, run) for run in winners]
        of_sets = [functools.partial(self._compiled_over_sets, run) for run in winners]
        programs = yield [*of_one, *of_sets]

        self._check_time()
        sets = self._operands.draw()
        xla_us = self._time(by_xla, sets)
        example: Example | None = None
        if example_of is not None:
            example = unless_it_fails(lambda: example_of(*sets[0]))
        compiled = zip(programs[: len(races)], programs[len(races) :], strict=True)
        best: tuple[float, PartDecision] | None = None
        first_ratio: float | None = None
        for race, steps, (error_of, over_sets) in zip(
            races, ordered, compiled, strict=True
        ):
            step, us = self._agreed(steps, error_of, example)
            if step is None:
                continue
            if first_ratio is None:
                first_ratio = race.first_us / us
            if step is not steps[0][0]:
                over_sets = self._compiled_over_sets(functools.partial(run_cudnn, step))
            program_us = self._time(over_sets, sets)
            if program_us is not None and (best is None or program_us < best[0]):
                best = program_us, step
        choice = Choice(
            op=label(self._part),
            operands=operand_text(self._part),
            implementation="",
            plan=best[1].request if best else "",
            rewritten=_digest_of(best[1]) if best else "",
            cudnn_us=round(best[0], 2) if best else None,
            first_ratio=None if first_ratio is None else round(first_ratio, 3),
            xla_us=None if xla_us is None else round(xla_us, 2),
            contenders_us=tuple(self._contenders_us(sets, example)),
        )
        return replace(choice, implementation=choice.fastest)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise OutOfTimeError

    def _run_xla(self, *operands: jax.Array) -> Sequence[jax.Array]:
        return run_xla(self._part, operands, self._options)

    # --- what is compiled -----------------------------------------------------------

    def _entrants(self) -> list[Entrant]:
        ordinal = self._device.local_hardware_id
        request = self._options.plan.to_request()
        entrants: list[Entrant] = []
        for ranked in policy.ranked(self._part, self._target):
            rewrite = ranked.rewrite
            if self._options.exact_dtypes and rewrite.rounds_sums:
                continue
            text, asked = to_json(rewrite.graph), request or ranked.asked
            try:
                listed = native.candidates(text, request=asked, device=ordinal)
            except UnsupportedError:
                continue
            few = promising(listed, self._max_plans)
            entrants.append(Entrant(rewrite=rewrite, text=text, listed=few))
        return entrants

    def _build(self, entrant: Entrant, request: str) -> native.PlanInfo | None:
        if self._builders is not None:
            return self._allowed(self._builders.plan, entrant.text, request)
        ordinal = self._device.local_hardware_id
        plan = functools.partial(native.plan, device=ordinal)
        return self._allowed(plan, entrant.text, request=request)

    def _build_in_background(self, entrant: Entrant, request: str) -> Task | Background:
        """Return what builds a plan, by other processes while others are timed."""
        if self._builders is None:
            return functools.partial(self._build, entrant, request)
        asked = (entrant.text, request)
        return Background(
            functools.partial(self._builders.built_elsewhere, *asked),
            functools.partial(self._allowed, self._builders.taken, *asked),
        )

    def _allowed(
        self, plan: Callable[..., native.PlanInfo], *args: Any, **options: Any
    ) -> native.PlanInfo | None:
        """Return a plan, None if it does not build or needs too much memory."""
        try:
            found = plan(*args, **options)
        except (UnsupportedError, GraphError):
            return None
        limit = self._options.plan.workspace_limit_bytes
        return found if limit is None or found.workspace_bytes <= limit else None

    def _compiled_error(self, run: Callable[..., Any]) -> Callable[..., Any] | None:
        """Compile what runs a part, and compares it with what is expected."""
        expected = [
            jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype))
            for t in self._part.output_tensors
        ]
        error = functools.partial(measured_error, self._part, run)
        return self._compiled(error, expected)

    def _compiled(
        self, function: Callable[..., Any], more: Sequence[Any] = ()
    ) -> Callable[..., Any] | None:
        """Compile what is not timed, and so needs no tuning of XLA's own.

        ``more`` are the types of what it takes after a part's operands.
        """
        types = *self._operands.types[0], *more
        is_gpu = self._device.platform == "gpu"

        def compile_it() -> Callable[..., Any]:
            with jax.default_device(self._device):
                lowered = jax.jit(function).lower(*types)
                try:
                    return lowered.compile(_UNTUNED if is_gpu else None)
                except jax.errors.JaxRuntimeError:  # XLA's options come and go.
                    return lowered.compile()

        return unless_it_fails(compile_it)

    def _compiled_over_sets(
        self, function: Callable[..., Any]
    ) -> Callable[..., Any] | None:
        def compile_it() -> Callable[..., Any]:
            with jax.default_device(self._device):
                return compile_over_sets(function, self._operands.types)

        return unless_it_fails(compile_it)

    def _started(self, program: jax.stages.Compiled | None) -> Any:
        """Run a program once, and return it.

        XLA builds convolutions when they run first, which may take seconds. There has
        to be ample memory, since other programs are compiled meanwhile, and tuned by
        XLA.
        """
        if program is not None and time.monotonic() <= self._deadline:
            needed = needed_bytes(program) + self._operands.size
            if needed * _AMPLE <= free_bytes(self._device):
                unless_it_fails(lambda: program(self._operands.draw()))
        return program

    # --- what is timed --------------------------------------------------------------

    def _time(self, program: Callable[..., Any] | None, sets: _Sets) -> float | None:
        """Return a program's microseconds for a set, None if it does not run."""
        self._check_time()
        if program is None:
            return None
        call = functools.partial(program, sets)
        return unless_it_fails(
            lambda: time_calls(call, len(sets), samples=_SAMPLES).median_us
        )

    def _time_plans(
        self,
        races: Sequence[Race],
        asked: Sequence[tuple[Entrant, str]],
        plans: Sequence[native.PlanInfo | None],
        *,
        is_last: bool,
    ) -> None:
        """Time plans in their races; they are None where what was asked has none."""
        built = [
            (entrant, request, plan)
            for (entrant, request), plan in zip(asked, plans, strict=True)
            if plan is not None
        ]
        sets = self._operands.draw() if races else []
        for race in races:
            new = {
                request: plan
                for entrant, request, plan in built
                if entrant is race.entrant
            }
            race.time_plans(
                new,
                sets,
                self._device,
                is_last=is_last,
                before_each=self._check_time,
            )

    def _in_order(self, race: Race) -> list[tuple[PartDecision, float]]:
        """Return a race's plans as steps with their times, the fastest first."""
        return [
            (
                PartDecision(
                    part=self._part,
                    rewrite=race.entrant.rewrite,
                    plan=plan,
                    target=self._target,
                    request=plan.request,
                ),
                us,
            )
            for plan, us in race.in_order
        ]

    def _agreed(
        self,
        steps: Sequence[tuple[PartDecision, float]],
        error_of: Callable[..., Any] | None,
        example: Example | None,
    ) -> tuple[PartDecision | None, float]:
        """Return the fastest step that agrees with the reference, and its time.

        ``error_of`` is the program that says how far off the fastest of all is.
        """
        for step, us in steps:
            self._check_time()
            if step is not steps[0][0]:
                error_of = self._compiled_error(functools.partial(run_cudnn, step))
            if agrees(step, error_of, example):
                return step, us
        return None, math.inf

    def _contenders_us(
        self, sets: _Sets, example: Example | None
    ) -> Iterator[tuple[str, float]]:
        """Yield the contenders that agree with the reference, and their times."""
        if self._options.plan.to_request():
            return  # which is about cuDNN's plans
        for contender, program in contenders.all_of(self._part):
            step = PartDecision(
                part=self._part, contender=contender.title, program=program
            )
            run = functools.partial(run_contender, step)
            with _failures_told(step):
                us = self._time(self._compiled_over_sets(run), sets)
                if us is not None and agrees(step, self._compiled_error(run), example):
                    yield contender.title, round(us, 2)


def _digest_of(step: PartDecision) -> str:
    return "" if step.rewrite is None else digest_of(step.rewrite.graph)


@contextmanager
def _failures_told(step: PartDecision) -> Iterator[None]:
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
