# SPDX-License-Identifier: Apache-2.0
"""Tests that the fastest plan with right results is found, without a GPU."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, choices, matmul, native
from jax_cudnn.graph import Graph, from_json, to_json
from jax_cudnn.legalize import Legalization
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.native import Candidate, PlanInfo
from jax_cudnn.policy import ranking
from jax_cudnn.reference.interpreter import evaluate
from jax_cudnn.tuning import OutOfTimeError, agreement, contest, fastest, measure, races
from jax_cudnn.tuning.stopwatch import Measurement
from tests.common.planner import H200, made_plan
from tests.tuning.stand_in import Gpu, Stopwatch, measured, pin, stand_in

pytestmark = pytest.mark.once


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Measure on a stand-in; a program takes as long as its plan, or XLA."""
    return stand_in(monkeypatch)


def test_the_fastest_plan_wins(gpu: Gpu) -> None:
    choice = measured()
    assert (choice.implementation, choice.plan) == ("cudnn", pin(10))
    assert (choice.cudnn_us, choice.xla_us, choice.first_ratio) == (10, gpu.xla_us, 3)


@pytest.mark.parametrize(
    ("max_plans", "built"),
    [
        (1, ["4 1", "7 1"]),
        (2, ["4 1", "4 2", "7 1"]),
        (4, ["4 1", "4 2", "4 3", "7 1"]),
        (None, ["4 1", "4 2", "4 3", "7 1", "7 2"]),
    ],
)
def test_the_first_plans_are_built_and_one_of_each_engine(
    max_plans: int | None, built: list[str]
) -> None:
    names = ("4 1", "4 2", "4 1", "4 3", "4 refused", "7 1", "7 2", "9 unnamed")
    listed = [
        replace(
            made_plan(pin(int(name[0]))),
            engine=int(name[0]),
            request="" if "unnamed" in name else name,
            refusal="no" if "refused" in name else "",
        )
        for name in names
    ]
    assert [x.request for x in races.promising(listed, max_plans)] == built


@pytest.mark.parametrize(
    ("times", "broken", "built"),
    [
        # Two plans of an engine each: the second is built if the first is not far off.
        ({40: 100, 41: 90, 70: 150, 71: 80}, [], [40, 70, 41, 71]),
        ({40: 100, 41: 90, 70: 151, 71: 80}, [], [40, 70, 41]),
        ({40: 151, 41: 90, 70: 100, 71: 80}, [], [40, 70, 71]),
        # What did not run says nothing of the other one.
        ({40: 100, 41: 90, 70: 120, 71: 80}, [70], [40, 70, 41, 71]),
        ({40: 100, 41: 90, 70: 120, 71: 130}, [40, 70], [40, 70, 41, 71]),
        # So far as is known, all are wanted.
        ({40: 100}, [], [40]),
    ],
)
def test_other_plans_of_an_engine_are_built_if_its_first_is_near(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    times: dict[int, int],
    broken: list[int],
    built: list[int],
) -> None:
    told: list[int] = []

    def candidates(*_: Any, **__: Any) -> tuple[Candidate, ...]:
        return tuple(replace(made_plan(pin(n)), engine=n // 10) for n in times)

    def plan(text: str, *, request: str, device: int) -> PlanInfo:
        found = gpu.plan(text, request=request, device=device)
        told.append(found.engine)
        return replace(found, engine=found.engine // 10, workspace_bytes=found.engine)

    class Counted(Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            if plan.workspace_bytes in broken:
                raise RuntimeError("it does not run")
            return Measurement.of([float(times[plan.workspace_bytes])])

    monkeypatch.setattr(native, "candidates", candidates)
    monkeypatch.setattr(native, "plan", plan)
    monkeypatch.setattr(races, "PlanStopwatch", Counted)
    choice = measured(max_plans=10)
    assert told == built
    told.clear()
    measured(max_plans=None)
    assert sorted(told) == sorted(times), "without a limit, all of them"
    ran = {n: us for n, us in times.items() if n in built and n not in broken}
    best = min(ran, key=lambda n: ran[n])
    assert choice.plan == pin(best)
    # The plan that runs untuned is the first in cuDNN's order that runs.
    first = next(us for n, us in ran.items())
    assert choice.first_ratio == round(first / ran[best], 3)


def test_plans_get_more_samples_the_nearer_they_are_to_the_best(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: dict[int, list[int]] = {}

    class Counted(Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            samples.setdefault(plan.engine, []).append(options["samples"])
            return super().time(plan, **options)

    monkeypatch.setattr(races, "PlanStopwatch", Counted)
    gpu.engines = (301, 151, 150, 104, 100)
    measured()
    assert samples == {
        301: [1],
        151: [1, 1],
        150: [1, 2],
        104: [1, 2, 7],
        100: [1, 2, 7],
    }


def test_only_plans_that_may_be_built_are_timed(gpu: Gpu) -> None:
    gpu.engines = (30, 20, 10)
    assert measured(max_plans=1).plan == pin(10), "each engine has one"


@pytest.mark.parametrize(("free", "runs"), [(1600, 2), (1599, 1)])
def test_xla_runs_once_while_plans_are_built_if_there_is_memory(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, free: int, runs: int
) -> None:
    ran: list[float] = []
    compiled, pins = contest.compile_over_sets, [pin(each) for each in gpu.engines]

    def compile_over_sets(function: Callable[..., Any], types: Any) -> Any:
        program = compiled(function, types)

        def counted(sets: Any) -> Any:
            us: Any = program(sets)
            ran.append(us)
            return us

        return counted

    class Counted(Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            assert plan.request in pins
            before.append(ran.count(gpu.xla_us))
            return super().time(plan, **options)

    before: list[int] = []
    monkeypatch.setattr(contest, "compile_over_sets", compile_over_sets)
    monkeypatch.setattr(races, "PlanStopwatch", Counted)
    gpu.free_bytes = free
    measured()
    # It is timed after the plans.
    assert (before[0], ran.count(gpu.xla_us)) == (runs - 1, runs)


@pytest.mark.parametrize("exact", [False, True])
def test_ways_that_round_sums_do_not_race_where_digits_count(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    ((part, options, _),) = traced_graphs(matmul, x, w)
    found = ranking.legalize(part, H200)
    rounding = replace(found, candidates=tuple(map(_rounding, found.candidates)))
    monkeypatch.setattr(ranking, "legalize", lambda *_: rounding)
    choice = measure(part, replace(options, exact_dtypes=exact), H200)
    assert choice.plan == ("" if exact else pin(10))


def _rounding(rewrite: Rewrite) -> Rewrite:
    return replace(rewrite, rounds_sums=True)


def test_xla_wins_where_it_is_faster_and_the_best_plan_is_kept(gpu: Gpu) -> None:
    gpu.xla_us = 5
    choice = measured()
    assert (choice.implementation, choice.plan) == ("xla", pin(10))


def test_a_plan_with_wrong_results_is_warned_of_and_not_chosen(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.wrong = {10}
    choice = measured()
    assert choice.plan == pin(20)
    assert choice.first_ratio == 1.5
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"plan {made_plan(pin(10)).name} for matmul(bf16[1,8,16]," in record.message
    assert "differ from the reference's by 0.2 of their norm" in record.message


def test_where_all_plans_are_wrong_xla_is_left(gpu: Gpu) -> None:
    gpu.wrong = set(gpu.engines)
    choice = measured()
    assert (choice.implementation, choice.plan, choice.cudnn_us) == ("xla", "", None)


def test_a_plan_that_does_not_run_is_passed_over(gpu: Gpu) -> None:
    gpu.broken = {10}
    choice = measured()
    assert (choice.plan, choice.cudnn_us) == (pin(20), 20), "also a much slower one"


class _Builders:
    """Stands for processes that build plans; one of them crashes on an engine."""

    def __init__(self, gpu: Gpu, crashes: int) -> None:
        self._gpu, self._crashes = gpu, crashes
        self.told: list[tuple[str, str]] = []

    def plan(self, text: str, request: str) -> PlanInfo:
        self.told.append(("plan", request))
        return self._gpu.plan(text, request=request, device=3)

    def built_elsewhere(self, text: str, request: str) -> bytes:
        self.told.append(("built elsewhere", request))
        if request == pin(self._crashes):
            raise UnsupportedError("cuDNN crashed")
        return text.encode()

    def taken(self, text: str, request: str, built: Callable[[], bytes]) -> PlanInfo:
        assert built() == text.encode()
        self.told.append(("taken", request))
        return self._gpu.plan(text, request=request, device=3)


def test_other_processes_build_what_is_not_first(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.engines = (30, 20, 10)
    builders = _Builders(gpu, crashes=10)

    def listed(*_: Any, **__: Any) -> tuple[Candidate, ...]:
        return tuple(replace(made_plan(pin(n)), engine=1) for n in gpu.engines)

    monkeypatch.setattr(native, "candidates", listed)
    monkeypatch.setattr(native, "plan", None)
    monkeypatch.setattr(
        fastest, "plan_builders", lambda *_: contextlib.nullcontext(builders)
    )
    monkeypatch.setattr(fastest, "_ENOUGH_PARTS", 1)
    monkeypatch.setattr(fastest, "_ENOUGH_CORES", 1)
    assert measured().plan == pin(20), "the crash is of one plan alone"
    assert builders.told[0] == ("plan", pin(30))
    assert sorted(builders.told[1:]) == [
        ("built elsewhere", pin(10)),
        ("built elsewhere", pin(20)),
        ("taken", pin(20)),
    ]


def _two_ways(part: Graph, target: Any) -> Legalization:
    """Return a part as it is, and with its result named "other"."""
    assert target == H200
    text = to_json(part)
    for place in (':"output"', '["output"'):
        text = text.replace(place, place.replace("output", "other"))
    return Legalization(
        candidates=tuple(
            Rewrite(graph=graph, before=list, after=lambda _, results: list(results))
            for graph in (part, from_json(text))
        )
    )


def test_ways_are_not_compared_by_their_kernels_alone(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way that leaves more to XLA has a faster kernel, and need not be faster."""
    told: list[int] = []

    def candidates(text: str, *, request: str, device: int) -> tuple[Candidate, ...]:
        del request, device
        pins = (20,) if "other" in text else (160, 110)
        return tuple(replace(made_plan(pin(each)), engine=1) for each in pins)

    def plan(text: str, *, request: str, device: int) -> PlanInfo:
        found = gpu.plan(text, request=request, device=device)
        told.append(found.engine)
        return found

    monkeypatch.setattr(ranking, "legalize", _two_ways)
    monkeypatch.setattr(native, "candidates", candidates)
    monkeypatch.setattr(native, "plan", plan)
    measured(max_plans=10)
    assert told == [160, 20, 110]


@pytest.mark.parametrize("fails_from", [1, 2, 3])
def test_a_plan_that_does_not_run_again_is_passed_over(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, fails_from: int
) -> None:
    runs = 0

    class Counted(Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            nonlocal runs
            runs += plan.engine == 100
            if plan.engine == 100 and runs >= fails_from:
                raise MemoryError
            return super().time(plan, **options)

    monkeypatch.setattr(races, "PlanStopwatch", Counted)
    gpu.engines = (104, 100)
    assert measured().plan == pin(104)


def test_what_seems_far_is_looked_at_twice(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {100: 160.0, 40: 400.0}  # what a busy host made of it

    class Counted(Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            us = first.pop(plan.engine, float(plan.engine))
            return Measurement.of([us])

    monkeypatch.setattr(races, "PlanStopwatch", Counted)
    gpu.engines = (100, 90, 40)
    assert measured().plan == pin(90), "what took over 3 times as long stays behind"
    assert not first


def test_without_a_plan_xla_is_left(gpu: Gpu) -> None:
    gpu.engines = ()
    choice = measured()
    assert (choice.implementation, choice.plan, choice.rewritten) == ("xla", "", "")


def test_results_that_nothing_can_be_compared_with_are_not_refused(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(agreement, "reference_results", out_of_memory)
    gpu.wrong = {10}
    assert measured().plan == pin(10)


def test_the_winner_is_of_the_rewriting_that_is_fastest(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second way of rewriting wins, and its digest stands in the choice."""
    graphs: list[Graph] = []

    def legalize(part: Graph, target: Any) -> Legalization:
        found = _two_ways(part, target)
        graphs.extend(each.graph for each in found.candidates)
        return found

    def candidates(text: str, *, request: str, device: int) -> tuple[Candidate, ...]:
        del request, device
        engine = 15 if "other" in text else 20
        return (made_plan(pin(engine)),)

    monkeypatch.setattr(ranking, "legalize", legalize)
    monkeypatch.setattr(native, "candidates", candidates)
    choice = measured()
    assert choice.plan == pin(15)
    assert choice.rewritten == choices.digest_of(graphs[1])
    assert choice.rewritten != choices.digest_of(graphs[0])


class _Failing:
    """Stands for results whose program has failed after it was launched."""

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL")


def test_what_fails_after_its_launch_does_not_run() -> None:
    assert agreement.unless_it_fails(lambda: [_Failing()]) is None
    assert agreement.unless_it_fails(lambda: [1]) == [1]


def test_no_plan_is_compared_when_the_time_is_over(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.wrong = set(gpu.engines)
    now = [0.0]

    def run(step: PartDecision, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        now[0] += 1
        return [2 * x for x in evaluate(step.part, operands)]

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with pytest.raises(OutOfTimeError):
        measured(deadline=0.5)
    assert now == [2], "the fastest, for one set and for all; the second was not run"


def test_measuring_ends_with_its_time(gpu: Gpu) -> None:
    del gpu
    with pytest.raises(OutOfTimeError):
        measured(deadline=time.monotonic() - 1)
