# SPDX-License-Identifier: Apache-2.0
"""Times a part of a graph by cuDNN's plans and by XLA's code, on random operands."""

import functools
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jax_cudnn import native
from jax_cudnn.config import Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, label, operand_text, to_json
from jax_cudnn.legalize import Rewrite
from jax_cudnn.lowering import run_cudnn, run_xla
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.lowering.devices import LocalGpu, local_device
from jax_cudnn.policy import measured_as, ranked
from jax_cudnn.tuning.stopwatch import (
    OperandSets,
    PlanStopwatch,
    compile_over_sets,
)
from jax_cudnn.tuning.together import together

_log = logging.getLogger("jax_cudnn")

# So many rounds of both sides in turns, each of so many microseconds.
_ROUNDS, _ROUND_US = 5, 8000.0
# The plans of other engines, and the kernels of the first one's, that are timed where
# time is short. All are in a thorough run.
_FEW_ENGINES, _FEW_KERNELS = 3, 0


class Kernel:
    """A part of a graph, with what runs it."""

    def __init__(self, part: Graph, gpu: LocalGpu, *, is_thorough: bool) -> None:
        """Look at the part; nothing is planned."""
        self.part, self._gpu = part, gpu
        self._is_thorough = is_thorough
        self._operands = OperandSets(part, local_device())
        self.step: PartDecision | None = None
        self.plans: dict[int, native.PlanInfo] = {}
        self.kernels: dict[str, native.PlanInfo] = {}
        self.programs: dict[str, Callable[..., Any]] = {}

    def prepare(self) -> None:
        """Build plans and compile programs; may run in a thread."""
        with jax.default_device(local_device()):
            step = self._first_step()
            if step is None:
                return
            self._plan_others(step)
            run = functools.partial(run_cudnn, step)
            self.programs["cudnn"] = compile_over_sets(run, self._operands.types)
            run = functools.partial(by_xla, self.part)
            self.programs["xla"] = compile_over_sets(run, self._operands.types)
            self._operands.compile()
        self.step = step

    def _first_step(self) -> PartDecision | None:
        """Return the first way that cuDNN plans, with cuDNN's own first plan."""
        for ranked_rewrite in ranked(self.part, self._gpu.target):
            try:
                plan = self._gpu.plan(to_json(ranked_rewrite.rewrite.graph))
            except UnsupportedError:
                continue
            return PartDecision(
                part=self.part,
                rewrite=ranked_rewrite.rewrite,
                plan=plan,
                target=self._gpu.target,
            )
        return None

    def _plan_others(self, step: PartDecision) -> None:
        """Plan the first plan of each engine, and the kernels of the first one's."""
        assert step.rewrite is not None
        assert step.plan is not None
        text, first = to_json(step.rewrite.graph), step.plan
        most = (10**6, 10**6) if self._is_thorough else (_FEW_ENGINES, _FEW_KERNELS)
        for each in self._gpu.candidates(text):
            if each.refusal or not each.request:
                continue
            is_first = each.engine not in self.plans and len(self.plans) < most[0]
            kernel = _kernel_of(each) if each.engine == first.engine else ""
            kernel = kernel if len(self.kernels) < most[1] else ""
            if is_first or kernel:
                try:
                    plan = self._gpu.plan(text, each.request)
                except UnsupportedError:
                    continue
                if is_first:
                    self.plans[each.engine] = plan
                if kernel:
                    self.kernels[kernel] = plan

    def measured(self) -> dict[str, Any] | None:
        """Return what was measured, None where cuDNN has no plan."""
        step = self.step
        if step is None or step.rewrite is None or step.plan is None:
            return None
        sets = self._operands.draw()
        times = _in_turns(self.programs, sets)
        ratio = statistics.median(
            x / y for x, y in zip(times["cudnn"], times["xla"], strict=True)
        )
        changed = [list(jax.jit(step.rewrite.before)(each)) for each in sets]
        stopwatch = PlanStopwatch(step.rewrite.graph, changed, local_device())
        first_us = stopwatch.time(step.plan, samples=3).median_us

        def to_first(plan: native.PlanInfo) -> float:
            enough = 3 * first_us
            look = stopwatch.time(plan, samples=3, enough_us=enough).median_us
            return _rounded(look / first_us)

        row = named(self.part, step.rewrite, self._gpu)
        if row is None:
            return None
        return {
            **row,
            "xla_us": round(statistics.median(times["xla"]), 2),
            "cudnn_us": round(statistics.median(times["cudnn"]), 2),
            "ratio": _rounded(ratio),
            "first_engine": step.plan.engine,
            "engines": {str(each): to_first(x) for each, x in self.plans.items()},
            "kernels": {each: to_first(x) for each, x in self.kernels.items()},
        }


def _rounded(ratio: float) -> float:
    """Return a ratio for a file, which has none of 0."""
    return max(0.001, round(ratio, 3))


def _kernel_of(candidate: native.Candidate) -> str:
    """Return the knob of an engine that is asked for one of its kernels, else ""."""
    names = [name for name, _ in candidate.knobs]
    return json.dumps(dict(candidate.knobs)) if names == ["KERNEL_CFG"] else ""


def by_xla(part: Graph, *operands: jax.Array) -> Sequence[jax.Array]:
    """Return the results of a part by XLA's code."""
    return run_xla(part, operands, Options())


def named(part: Graph, rewrite: Rewrite, gpu: LocalGpu) -> dict[str, Any] | None:
    """Return what tells a kernel from others, and its class; None if it has none."""
    like = measured_as(part, rewrite, gpu.target)
    if like is None:
        return None
    sizes = (like.rows, like.columns, like.depth, like.work)
    return {
        "class": like.name,
        "sizes": [round(size) for size in sizes],
        "op": label(part),
        "operands": operand_text(part),
    }


def _in_turns(
    programs: Mapping[str, Callable[..., Any]], sets: Sequence[Any]
) -> dict[str, list[float]]:
    """Return microseconds a set, round by round, of programs that take turns."""

    def once(program: Callable[..., Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = program(sets)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / (calls * len(sets)) * 1e6

    calls: dict[str, int] = {}
    for name, program in programs.items():
        once(program, 2)
        us = once(program, 2) * len(sets)
        calls[name] = max(2, min(2000, round(_ROUND_US / us)))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(_ROUNDS):
        names = list(programs)[:: 1 if turn % 2 else -1]
        for name in names:
            times[name].append(once(programs[name], calls[name]))
    return times


def measure(
    parts: Sequence[Graph], gpu: LocalGpu, *, is_thorough: bool
) -> Iterator[dict[str, Any]]:
    """Time parts, which are compiled together; yield a row for each that has one."""
    found = [Kernel(part, gpu, is_thorough=is_thorough) for part in parts]
    together([functools.partial(_unless_it_fails, each.prepare) for each in found])
    for each in found:
        row = _unless_it_fails(each.measured)
        if row is not None:
            yield row


def _unless_it_fails(run: Callable[[], Any]) -> Any:
    """Return what it does; None, and a debug line, for what does not run here."""
    try:
        return run()
    except (jax.errors.JaxRuntimeError, RuntimeError, MemoryError) as error:
        _log.debug("a kernel is left out: %s", str(error)[:200])
        return None
