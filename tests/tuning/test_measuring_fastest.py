# SPDX-License-Identifier: Apache-2.0
"""Tests that the fastest plan with right results is found, without a GPU."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, choices, contenders, matmul, native
from jax_cudnn.choices import Choice
from jax_cudnn.graph import Graph, from_json, to_json
from jax_cudnn.legalize import Legalization
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.native import Candidate, PlanInfo
from jax_cudnn.policy import ranking
from jax_cudnn.reference.interpreter import evaluate
from jax_cudnn.tuning import (
    OutOfTimeError,
    agreement,
    contest,
    fastest,
    measure,
    races,
    together,
)
from jax_cudnn.tuning.stopwatch import Measurement
from tests.common.drawn_operands import draw_arrays
from tests.common.planner import H200, PIN, made_plan

pytestmark = pytest.mark.once


def _pin(engine: int) -> str:
    return PIN.replace("4", str(engine))


@dataclass(kw_only=True)
class Gpu:
    """Stands for a GPU whose plans take as many µs as their engines' numbers."""

    engines: tuple[int, ...] = (30, 20, 10)
    wrong: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    xla_us: float = 1000.0
    free_bytes: int = 1600
    ran: list[float] = field(default_factory=lambda: [])

    def candidates(
        self, text: str, *, request: str, device: int
    ) -> tuple[Candidate, ...]:
        del text, request
        assert device == 3
        if not self.engines:
            raise UnsupportedError("no candidate")
        return tuple(made_plan(_pin(engine)) for engine in self.engines)

    def plan(self, text: str, *, request: str, device: int) -> PlanInfo:
        del text
        assert device == 3
        return made_plan(request)

    def run(
        self, step: PartDecision, operands: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        assert step.plan is not None
        assert (step.plan.request, step.target) == (step.request, H200)
        if step.plan.engine in self.broken:
            raise jax.errors.JaxRuntimeError("out of memory")
        results = evaluate(step.part, operands)
        return [1.2 * x if step.plan.engine in self.wrong else x for x in results]


class _Stopwatch:
    def __init__(self, graph: Graph, sets: Any, device: Any, results: Any):
        assert device.local_hardware_id == 3
        for arrays, tensors in (
            (sets[0], graph.input_tensors),
            (results[0], graph.output_tensors),
        ):
            assert [x.shape for x in arrays] == [t.stored_shape for t in tensors]

    def time(self, plan: PlanInfo, **options: Any) -> Measurement:
        assert options["samples"] > 0
        return Measurement.of([float(plan.engine)])


class _Sets:
    size = 100

    def __init__(self, graph: Graph, device: Any):
        assert device.local_hardware_id == 3
        self.graph = graph
        self.types = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.draw()[0]]]

    def compile(self) -> None:
        pass

    def draw(self) -> list[list[jax.Array]]:
        return [draw_arrays(self.graph)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Measure on a stand-in; a program takes as long as its plan, or XLA."""
    gpu = Gpu()
    device = SimpleNamespace(local_hardware_id=3, platform="gpu")
    ran = gpu.ran

    def run_cudnn(step: PartDecision, *operands: jax.Array) -> Sequence[jax.Array]:
        assert step.plan is not None
        ran.append(float(step.plan.engine))
        return gpu.run(step, operands)

    def run_xla(*args: Any) -> Sequence[jax.Array]:
        ran.append(gpu.xla_us)
        return evaluate(args[0], args[1])

    def compile_over_sets(function: Callable[..., Any], types: Any) -> Any:
        # Traced anew, and so added to what ran.
        jax.eval_shape(lambda *xs: function(*xs), *types[0])
        us = ran[-1]
        return lambda sets: us

    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    # One thread after the other, and all of them on the CPU.
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(native, "candidates", gpu.candidates)
    monkeypatch.setattr(native, "plan", gpu.plan)
    monkeypatch.setattr(races, "PlanStopwatch", _Stopwatch)
    monkeypatch.setattr(contest, "OperandSets", _Sets)
    monkeypatch.setattr(contest, "needed_bytes", lambda _: 300)
    monkeypatch.setattr(contest, "free_bytes", lambda _: gpu.free_bytes)
    monkeypatch.setattr(contest, "run_cudnn", run_cudnn)
    monkeypatch.setattr(contest, "run_xla", run_xla)
    monkeypatch.setattr(contest, "compile_over_sets", compile_over_sets)
    monkeypatch.setattr(
        contest, "time_calls", lambda call, count, samples: Measurement.of([call()])
    )
    return gpu


def _measure(deadline: float = float("inf"), max_plans: int | None = None) -> Choice:
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    ((part, options, _),) = traced_graphs(matmul, x, w)
    return measure(part, options, H200, deadline, max_plans)


def test_the_fastest_plan_wins(gpu: Gpu) -> None:
    choice = _measure()
    assert (choice.implementation, choice.plan) == ("cudnn", _pin(10))
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
            made_plan(_pin(int(name[0]))),
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
        return tuple(replace(made_plan(_pin(n)), engine=n // 10) for n in times)

    def plan(text: str, *, request: str, device: int) -> PlanInfo:
        found = gpu.plan(text, request=request, device=device)
        told.append(found.engine)
        return replace(found, engine=found.engine // 10, workspace_bytes=found.engine)

    class Stopwatch(_Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            if plan.workspace_bytes in broken:
                raise RuntimeError("it does not run")
            return Measurement.of([float(times[plan.workspace_bytes])])

    monkeypatch.setattr(native, "candidates", candidates)
    monkeypatch.setattr(native, "plan", plan)
    monkeypatch.setattr(races, "PlanStopwatch", Stopwatch)
    choice = _measure(max_plans=10)
    assert told == built
    told.clear()
    _measure(max_plans=None)
    assert sorted(told) == sorted(times), "without a limit, all of them"
    ran = {n: us for n, us in times.items() if n in built and n not in broken}
    best = min(ran, key=lambda n: ran[n])
    assert choice.plan == _pin(best)
    # The plan that runs untuned is the first in cuDNN's order that runs.
    first = next(us for n, us in ran.items())
    assert choice.first_ratio == round(first / ran[best], 3)


def test_plans_get_more_samples_the_nearer_they_are_to_the_best(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: dict[int, list[int]] = {}

    class Stopwatch(_Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            samples.setdefault(plan.engine, []).append(options["samples"])
            return super().time(plan, **options)

    monkeypatch.setattr(races, "PlanStopwatch", Stopwatch)
    gpu.engines = (301, 151, 150, 104, 100)
    _measure()
    assert samples == {
        301: [1],
        151: [1, 1],
        150: [1, 2],
        104: [1, 2, 7],
        100: [1, 2, 7],
    }


def test_only_plans_that_may_be_built_are_timed(gpu: Gpu) -> None:
    gpu.engines = (30, 20, 10)
    assert _measure(max_plans=1).plan == _pin(10), "each engine has one"


@pytest.mark.parametrize(("free", "runs"), [(1600, 2), (1599, 1)])
def test_xla_runs_once_while_plans_are_built_if_there_is_memory(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, free: int, runs: int
) -> None:
    ran: list[float] = []
    compiled, pins = contest.compile_over_sets, [_pin(each) for each in gpu.engines]

    def compile_over_sets(function: Callable[..., Any], types: Any) -> Any:
        program = compiled(function, types)

        def counted(sets: Any) -> Any:
            us: Any = program(sets)
            ran.append(us)
            return us

        return counted

    class Stopwatch(_Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            assert plan.request in pins
            before.append(ran.count(gpu.xla_us))
            return super().time(plan, **options)

    before: list[int] = []
    monkeypatch.setattr(contest, "compile_over_sets", compile_over_sets)
    monkeypatch.setattr(races, "PlanStopwatch", Stopwatch)
    gpu.free_bytes = free
    _measure()
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
    assert choice.plan == ("" if exact else _pin(10))


def _rounding(rewrite: Rewrite) -> Rewrite:
    return replace(rewrite, rounds_sums=True)


def test_xla_wins_where_it_is_faster_and_the_best_plan_is_kept(gpu: Gpu) -> None:
    gpu.xla_us = 5
    choice = _measure()
    assert (choice.implementation, choice.plan) == ("xla", _pin(10))


def test_a_plan_with_wrong_results_is_warned_of_and_not_chosen(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.wrong = {10}
    choice = _measure()
    assert choice.plan == _pin(20)
    assert choice.first_ratio == 1.5
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"plan {made_plan(_pin(10)).name} for matmul(bf16[1,8,16]," in record.message
    assert "differ from the reference's by 0.2 of their norm" in record.message


def test_where_all_plans_are_wrong_xla_is_left(gpu: Gpu) -> None:
    gpu.wrong = set(gpu.engines)
    choice = _measure()
    assert (choice.implementation, choice.plan, choice.cudnn_us) == ("xla", "", None)


def test_a_plan_that_does_not_run_is_passed_over(gpu: Gpu) -> None:
    gpu.broken = {10}
    choice = _measure()
    assert (choice.plan, choice.cudnn_us) == (_pin(20), 20), "also a much slower one"


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
        if request == _pin(self._crashes):
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
        return tuple(replace(made_plan(_pin(n)), engine=1) for n in gpu.engines)

    monkeypatch.setattr(native, "candidates", listed)
    monkeypatch.setattr(native, "plan", None)
    monkeypatch.setattr(
        fastest, "plan_builders", lambda *_: contextlib.nullcontext(builders)
    )
    monkeypatch.setattr(fastest, "_ENOUGH_PARTS", 1)
    monkeypatch.setattr(fastest, "_ENOUGH_CORES", 1)
    assert _measure().plan == _pin(20), "the crash is of one plan alone"
    assert builders.told[0] == ("plan", _pin(30))
    assert sorted(builders.told[1:]) == [
        ("built elsewhere", _pin(10)),
        ("built elsewhere", _pin(20)),
        ("taken", _pin(20)),
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
        return tuple(replace(made_plan(_pin(pin)), engine=1) for pin in pins)

    def plan(text: str, *, request: str, device: int) -> PlanInfo:
        found = gpu.plan(text, request=request, device=device)
        told.append(found.engine)
        return found

    monkeypatch.setattr(ranking, "legalize", _two_ways)
    monkeypatch.setattr(native, "candidates", candidates)
    monkeypatch.setattr(native, "plan", plan)
    _measure(max_plans=10)
    assert told == [160, 20, 110]


@pytest.mark.parametrize("fails_from", [1, 2, 3])
def test_a_plan_that_does_not_run_again_is_passed_over(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, fails_from: int
) -> None:
    runs = 0

    class Stopwatch(_Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            nonlocal runs
            runs += plan.engine == 100
            if plan.engine == 100 and runs >= fails_from:
                raise MemoryError
            return super().time(plan, **options)

    monkeypatch.setattr(races, "PlanStopwatch", Stopwatch)
    gpu.engines = (104, 100)
    assert _measure().plan == _pin(104)


def test_what_seems_far_is_looked_at_twice(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {100: 160.0, 40: 400.0}  # what a busy host made of it

    class Stopwatch(_Stopwatch):
        def time(self, plan: PlanInfo, **options: Any) -> Measurement:
            us = first.pop(plan.engine, float(plan.engine))
            return Measurement.of([us])

    monkeypatch.setattr(races, "PlanStopwatch", Stopwatch)
    gpu.engines = (100, 90, 40)
    assert _measure().plan == _pin(90), "what took over 3 times as long stays behind"
    assert not first


def test_without_a_plan_xla_is_left(gpu: Gpu) -> None:
    gpu.engines = ()
    choice = _measure()
    assert (choice.implementation, choice.plan, choice.rewritten) == ("xla", "", "")


def test_results_that_nothing_can_be_compared_with_are_not_refused(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(agreement, "reference_results", out_of_memory)
    gpu.wrong = {10}
    assert _measure().plan == _pin(10)


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
        return (made_plan(_pin(engine)),)

    monkeypatch.setattr(ranking, "legalize", legalize)
    monkeypatch.setattr(native, "candidates", candidates)
    choice = _measure()
    assert choice.plan == _pin(15)
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
        _measure(deadline=0.5)
    assert now == [2], "the fastest, for one set and for all; the second was not run"


def test_measuring_ends_with_its_time(gpu: Gpu) -> None:
    del gpu
    with pytest.raises(OutOfTimeError):
        _measure(deadline=time.monotonic() - 1)


# --- contenders -----------------------------------------------------------------------


def _compete(
    monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any], us: float, gpu: Gpu
) -> None:
    """Let a program compete, which takes so long."""
    mine = contenders.Contender(name="mine", version="2", offer=lambda _: None)

    def timed(*operands: jax.Array) -> Any:
        gpu.ran.append(us)
        return program(*operands)

    monkeypatch.setattr(contenders, "all_of", lambda _: [(mine, timed)])


def _multiplied(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return [jnp.matmul(x, y)]


@pytest.mark.parametrize(
    ("us", "winner"), [(9, "mine 2"), (10, "cudnn"), (11, "cudnn")]
)
def test_a_contender_wins_where_it_is_faster(
    us: float, winner: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compete(monkeypatch, _multiplied, us, gpu)
    choice = _measure()
    assert (choice.implementation, choice.plan) == (winner, _pin(10))
    assert choice.contenders_us == (("mine 2", us),)
    assert choice.without_contenders().implementation == "cudnn"


def test_a_contender_with_wrong_results_is_warned_of(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _compete(monkeypatch, lambda x, y: [1.2 * jnp.matmul(x, y)], 1, gpu)
    choice = _measure()
    assert (choice.implementation, choice.contenders_us) == ("cudnn", ())
    (record,) = caplog.records
    assert record.message.startswith("mine 2 for matmul(bf16[1,8,16],")


@pytest.mark.parametrize(
    ("error", "is_warned_of"),
    [(NotImplementedError("no"), False), (KeyError("a"), True)],
)
def test_a_contender_that_fails_is_passed_over(
    error: Exception,
    is_warned_of: bool,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: jax.Array) -> list[jax.Array]:
        raise error

    _compete(monkeypatch, fail, 1, gpu)
    assert _measure().implementation == "cudnn"
    told = [record.message for record in caplog.records]
    assert bool(told) == is_warned_of
    assert all("it fails: KeyError: 'a'" in each for each in told)


# --- little time ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "batches", "left"),
    [
        # Up to twice as many as cores, if a part takes one of these 25 s; then, if one
        # takes as long as those before it, 4 s.
        ([math.inf], [8, 8, 4], 0),
        ([200], [8, 8, 4], 0),
        ([40], [6, 4], 10),
        ([19], [3, 1], 16),
        ([3], [1], 19),
        ([-1], [1], 19),
        # More time, or less, is seen when the next ones begin.
        ([19, 44], [3, 8], 9),
        ([40, 26], [6], 14),
    ],
)
def test_as_many_parts_are_begun_as_there_is_time_for(
    until: list[float], batches: list[int], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, begun, found = [0.0], [], []
    by_others: list[bool] = []

    class Contest:
        def __init__(self, part: Any, *rest: Any) -> None:
            self.part = part
            by_others.append(rest[-1] is not None)

        def choice(self) -> Any:
            yield []
            now[0] += 4
            return self.part

    def in_stages(works: Sequence[Any]) -> Any:
        begun.append(len(works))
        return together.in_stages(works)

    monkeypatch.setattr(fastest, "Contest", Contest)
    monkeypatch.setattr(fastest, "in_stages", in_stages)
    monkeypatch.setattr(fastest, "local_device", lambda: SimpleNamespace(
        local_hardware_id=3
    ))  # fmt: skip
    monkeypatch.setattr(fastest, "plan_builders", lambda *_: contextlib.nullcontext(1))
    monkeypatch.setattr(fastest, "_ENOUGH_PARTS", 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    parts: Any = [(i, None) for i in range(20)]
    ends = iter(until)
    each = fastest.measure_each(parts, H200, until=lambda: next(ends, until[-1]))
    with pytest.raises(OutOfTimeError) if left else contextlib.nullcontext():
        found.extend(each)
    begun[0] -= 1  # what runs beside them
    assert begun == batches
    assert found == list(range(20 - left))
    # Other processes are there from the first large number of parts on.
    before = sum(batches[: batches.index(8)] if 8 in batches else batches)
    assert by_others == [i >= before for i in range(20 - left)]


@pytest.mark.parametrize("until", [math.inf, -1.0])
def test_when_it_is_late_only_the_first_plan_of_an_engine_is_built(
    until: float, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    first, second = made_plan(_pin(10)), made_plan(_pin(10).replace(":2}", ":8}"))
    assert first.request != second.request

    def plan(text: str, *, request: str, device: int) -> PlanInfo:
        asked.append(request)
        return gpu.plan(text, request=request, device=device)

    monkeypatch.setattr(native, "candidates", lambda *_, **__: (first, second))
    monkeypatch.setattr(native, "plan", plan)
    ((part, options, _),) = traced_graphs(
        matmul,
        jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 8), jnp.bfloat16),
    )
    ran: list[str] = []
    beside = [lambda: ran.append(f"after {len(asked)} plans")]
    (choice,) = fastest.measure_each(
        [(part, options)], H200, until=lambda: until, beside=beside
    )
    assert choice.plan in (first.request, second.request)
    assert (second.request in asked) == (until > 0)
    assert ran == ["after 0 plans"]
