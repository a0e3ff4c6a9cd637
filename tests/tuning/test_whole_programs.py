# SPDX-License-Identifier: Apache-2.0
"""Tests of the programs that tuning measures whole, and of what `autotune` says."""

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import GraphError, UnsupportedError, choices, conv, matmul, sdpa
from jax_cudnn.choices import ChoiceTable, Trial
from jax_cudnn.config import Options
from jax_cudnn.lowering import primitives, scoped, traced_graphs, traced_program
from jax_cudnn.lowering.decision import decide_part
from jax_cudnn.lowering.scope import scope
from jax_cudnn.plans import tuning
from jax_cudnn.tuning import (
    NotRunError,
    OutOfTimeError,
    Programs,
    expected_bytes,
    memory,
    programs,
)
from jax_cudnn.tuning.in_context import ProgramTimes
from tests.common.planner import H200, made_plan
from tests.tuning.made_programs import Made, choice_of, key_of, who_runs

pytestmark = pytest.mark.once


# --- programs -------------------------------------------------------------------------


def test_a_program_runs_on_drawn_operands() -> None:
    table = np.arange(12.0, dtype=np.float32).reshape(3, 4)

    def step(x: Any, key: Any, index: Any, flag: Any, scale: float) -> Any:
        noise = jax.random.normal(key, x.shape, x.dtype)
        total = jnp.where(flag[:, None], (x + noise) * scale, 0)
        return total + jnp.asarray(table, x.dtype)[index], key

    x = jnp.ones((3, 4), jnp.bfloat16)
    operands = (x, jax.random.key(0, impl="rbg"), jnp.ones(3, int), jnp.ones(3, bool))
    jitted = jax.jit(step, donate_argnums=0, static_argnums=4)
    contest = Programs(jitted.trace(*operands, 0.5), jax.devices()[0])
    numbers: Any = contest.compile([Trial({}), Trial({})])
    assert numbers == [0, 1]
    times = contest.times([1, 0, 1])
    assert len(times) == 3
    assert min(times) > 0
    assert not x.is_deleted()


@pytest.mark.parametrize("is_jitted", [False, True])
def test_integers_say_how_much_work_there_is(is_jitted: bool) -> None:
    """Those of the arguments, and of constants; 0 where there is but a shape."""
    table = jnp.arange(3)

    def step(x: Any, sizes: Any, flags: Any, other: Any) -> Any:
        return x + 1, sizes + table, ~flags, other

    function = jax.jit(step) if is_jitted else step
    shape = jax.ShapeDtypeStruct((3,), jnp.int32)
    args = jnp.full(3, 7.0), jnp.array([5, 0, 2]), np.array([True, False, True]), shape
    traced = traced_program(function, *args)
    contest = Programs(traced.program, jax.devices()[0], traced.arrays)
    assert contest.compile([Trial({})]) == [0]
    x, sizes, flags, other = contest._calls[0]()
    assert sizes.tolist() == [5, 1, 4]
    assert flags.tolist() == [False, True, False]
    assert other.tolist() == [0, 0, 0]
    assert jnp.all(x <= 2)


def test_integers_beside_numbers_and_static_arguments() -> None:
    def step(x: Any, count: Any, name: Any, sizes: Any) -> Any:
        assert name in ("a", 5)
        return x * 2, count + 1, sizes

    wide = np.array([5, 0, 2], np.int64)
    for name in ("a", 5):
        jitted = jax.jit(step, static_argnums=2)
        traced = traced_program(jitted, np.ones(3), jnp.array(7), name, wide)
        contest = Programs(traced.program, jax.devices()[0], traced.arrays)
        assert contest.compile([Trial({})]) == [0]
        _, count, sizes = contest._calls[0]()
        assert (int(count), sizes.tolist()) == (8, [5, 0, 2])
    traced = traced_program(jax.jit(lambda n, x, f: (x * n, f)), 3, wide, 0.5)
    assert traced.arrays == (3, wide, None)
    # Which of them is static cannot be told from a count.
    traced = traced_program(jax.jit(step, static_argnums=2), 0.5, 7, 5, wide)
    contest = Programs(traced.program, jax.devices()[0], traced.arrays)
    assert contest.compile([Trial({})]) == [0]
    assert contest._calls[0]()[2].tolist() == [0, 0, 0]


def test_arrays_that_are_gone_are_zeros() -> None:
    gone = jnp.array([1, 2])
    gone.delete()
    traced = traced_program(lambda x, y: x + y, gone, jnp.array([3, 4]))
    contest = Programs(traced.program, jax.devices()[0], traced.arrays)
    assert contest.compile([Trial({})]) == [0]
    assert contest._calls[0]()[0].tolist() == [3, 4]


def test_a_trial_is_in_force_while_its_program_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    run = primitives.run_reference

    def spy(*args: Any, **options: Any) -> Any:
        seen.append((scope().trial, scope().tuner))
        return run(*args, **options)

    monkeypatch.setattr(primitives, "run_reference", spy)
    x = jnp.ones((4, 8))
    with scoped(tuner=lambda *_: None):
        traced = traced_program(lambda x: matmul(x, x.T, activation="relu"), x)
    contest = Programs(traced.program, jax.devices()[0])
    seen.clear()
    trials = Trial({}), Trial({})
    assert contest.compile(trials) == [0, 1]
    # Each in a thread of its own, in any order.
    assert sorted(seen, key=lambda each: trials.index(each[0])) == [
        (trial, None) for trial in trials
    ]


def test_what_was_compiled_ahead_is_not_compiled_again() -> None:
    runs = itertools.count()

    def step(x: jax.Array) -> jax.Array:
        y = matmul(x, x.T, activation="relu")
        return y + next(runs)  # which program it is

    x = jnp.ones((4, 8))
    contest = Programs(traced_program(step, x).program, jax.devices()[0])
    assert "_operands" not in vars(contest), "they take no memory yet"
    key, choice = key_of("m"), choice_of("matmul")
    compiled: list[Any] = []
    make = contest._compiled
    contest._compiled = lambda trial: compiled.append(trial) or make(trial)
    assert contest.compilation_s == math.inf
    contest.compile_ahead(Trial({key: choice}))
    assert 0 < contest.compilation_s < math.inf
    trials = [Trial({key: None}), Trial({key: replace(choice)})]
    assert contest.compile(trials) == [0, 1]
    assert [each.choices for each in compiled] == [{key: choice}, {key: None}]


@pytest.mark.parametrize("error", [UnsupportedError("no plan"), NotRunError("full")])
def test_what_fails_ahead_is_tried_again(error: Exception) -> None:
    contest = Programs(jax.jit(lambda x: x + 1).trace(1.0), jax.devices()[0])
    make = contest._compiled

    def fail(_: Trial) -> Any:
        if isinstance(error, NotRunError):
            return error
        raise error

    contest._compiled = fail
    contest.compile_ahead(Trial({}))
    contest._compiled = make
    assert contest.compilation_s == math.inf
    assert contest.compile([Trial({})]) == [0]


def test_a_program_without_memory_for_it_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = jnp.ones((1024, 256))
    run = Programs(jax.jit(lambda x: x + 1).trace(x), jax.devices()[0])
    stats = {"bytes_limit": 2**21, "bytes_in_use": 2**20 + 1}
    gpu: Any = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(programs, "free_bytes", lambda _: memory.free_bytes(gpu))
    (found,) = run.compile([Trial({})])
    assert isinstance(found, NotRunError)
    assert str(found) == "a run needs 0.0 GiB of memory, and 0.0 GiB are free"
    stats["bytes_in_use"] = 0
    assert run.compile([Trial({})]) == [0]


def test_programs_that_are_far_behind_run_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = jnp.ones(3)
    contest = Programs(jax.jit(lambda x: x + 1).trace(x), jax.devices()[0])
    numbers: Any = contest.compile([Trial({})] * 4)
    times = dict(zip(contest._calls, (1e5, 1.02e5, 1.04e5, 2e5), strict=True))
    ran: list[float] = []

    def run(call: Any, count: int) -> float:
        assert count == 1
        ran.append(times[call])
        return times[call]

    monkeypatch.setattr(programs, "_run", run)
    assert contest.times(numbers) == list(times.values())
    # Once to know how long each takes, and then in rounds.
    assert [ran.count(us) - 1 for us in times.values()] == [7, 7, 3, 3]
    # One alone has nothing to be compared with.
    ran.clear()
    assert contest.times([numbers[0], numbers[3]]) == [1e5, 2e5]
    assert [ran.count(us) - 1 for us in (1e5, 2e5)] == [3, 3]


def test_what_cannot_be_drawn_is_said() -> None:
    ref = jax.new_ref(jnp.ones(3))
    traced = jax.jit(lambda ref, x: ref[...] + x).trace(ref, 1.0)
    with pytest.raises(NotRunError, match=r"it takes Ref\{.*, which is no array"):
        Programs(traced, jax.devices()[0])


# --- choices --------------------------------------------------------------------------


class _Gpu:
    target, is_here = H200, True

    def plan(self, graph_json: str, request: str = "") -> Any:
        del graph_json
        return made_plan(request)


def test_choices_of_a_trial_go_before_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = jnp.ones((64, 64), jnp.bfloat16)
    ((graph, _, _),) = traced_graphs(lambda x: matmul(x, x, activation="relu"), x)
    key = choices.key_of(graph, H200)
    table = ChoiceTable()
    monkeypatch.setattr(choices, "table", lambda: table)
    by_xla = replace(choice_of("matmul"), implementation="xla")
    table.add({key: by_xla})
    gpu: Any = _Gpu()

    def who(trial: Trial | None) -> bool:
        return decide_part(graph, gpu, Options(), trial).rewrite is not None

    assert not who(None)
    assert who(Trial({key: None}))
    assert not who(Trial({}))
    table.forget([key, key_of("another")])
    assert who(None)
    assert not who(Trial({key: by_xla}))
    assert Trial({}) != Trial({})


# --- autotune -------------------------------------------------------------------------


def _measured(parts: Any, *_: Any) -> Any:
    return (choice_of("matmul") for _ in parts)


def _tuned(
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    *args: Any,
    measure_each: Any = _measured,
    **options: Any,
) -> tuple[tuning.Tuning, ChoiceTable, list[Any]]:
    """Tune with a stand-in for an H200; programs run on the CPU."""
    table, kept = ChoiceTable(), []
    monkeypatch.setattr(choices, "table", lambda: table)
    monkeypatch.setattr(choices, "remember", kept.append)
    monkeypatch.setattr(tuning, "local_target", lambda: (0, H200))
    monkeypatch.setattr(tuning, "local_device", lambda: jax.devices("cpu")[0])
    monkeypatch.setattr(tuning, "measure_each", measure_each)
    found = tuning.autotune(function, *args, progress=False, **options)
    return found, table, kept


def _step(x: jax.Array) -> jax.Array:
    return matmul(x, x, activation="relu")


def test_autotune_ends_with_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = jnp.ones((8, 8))
    found, table, kept = _tuned(monkeypatch, _step, x)
    assert isinstance(found.program, ProgramTimes)
    assert str(found).endswith(str(found.program))
    assert table.all() == found.choices == kept[-1]
    found.save(tmp_path / "choices.json")
    assert str(found.program) in (tmp_path / "choices.json").read_text()
    assert choices.read(tmp_path / "choices.json") == found.choices


def test_what_is_best_untuned_has_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = ProgramTimes(chosen_us=1.0)
    monkeypatch.setattr(
        tuning, "settle", lambda _, found, *__, **___: (dict.fromkeys(found), times)
    )
    found, table, kept = _tuned(monkeypatch, _step, jnp.ones((8, 8)))
    assert table.all() == found.choices == kept[-1] == {}
    assert found.program == times


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (_step, {"whole_program": False}, "was not measured"),
        (_step, {"budget_s": -1.0}, "was not measured, for lack of time"),
        (_step, {"budget_s": -math.inf}, "was not measured, for lack of time"),
        (jnp.sin, {}, "was not measured: it has no such calls"),
    ],
)
def test_where_the_program_is_not_measured_it_says_so(
    function: Any, options: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, *_ = _tuned(monkeypatch, function, jnp.ones((8, 8)), **options)
    assert str(found).endswith(f"the whole program {said}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget_s": math.nan}, r"^budget_s is nan\. Pass a number of seconds, or "),
        ({"max_plans": 0}, r"^max_plans is 0\. Pass a number of plans from 1 on"),
    ],
)
def test_what_is_no_number_of_seconds_or_plans_is_refused(
    options: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GraphError, match=said):
        _tuned(monkeypatch, _step, jnp.ones((8, 8)), **options)
    with (
        pytest.raises(GraphError, match=said),
        tuning.autotuning(progress=False, **options),
    ):
        pass


def test_a_program_that_does_not_run_keeps_the_kernels_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise NotRunError("its operands failed: out of memory")

    monkeypatch.setattr(tuning, "Programs", fail)
    found, table, _ = _tuned(monkeypatch, _step, jnp.ones((8, 8)))
    assert "was not measured: its operands failed: out of memory" in str(found)
    assert table.all() == found.choices
    assert list(found.choices.values()) == [choice_of("matmul")]


def test_autotune_says_how_many_times_a_program_runs_each_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []

    def settle(_: Any, found: Any, *__: Any, runs: Any, **___: Any) -> Any:
        told.append(runs)
        return found, ProgramTimes(chosen_us=1.0)

    monkeypatch.setattr(tuning, "settle", settle)

    def layers(x: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (_step(_step(x)), None), x, length=3)[0]
        return jax.checkpoint(jax.jit(_step))(x)

    def steps(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, _step, x)

    x = jnp.ones((8, 8))
    for function in (layers, steps):
        _tuned(monkeypatch, function, x)
    assert [runs and list(runs.values()) for runs in told] == [[7], None]


@pytest.mark.parametrize(("compilation_s", "most_s"), [(10, 20), (20, 30)])
def test_what_takes_longest_is_measured_first_and_what_is_left_is_said(
    compilation_s: float,
    most_s: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    small, large = jnp.ones((8, 8)), jnp.ones((16, 16))

    def program(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
        # The product of the small ones runs 100 times.
        x = jax.lax.scan(lambda x, _: (_step(x), None), x, length=100)[0]
        return _step(y), x, matmul(z, y, activation="gelu")

    asked: list[Any] = []

    def measure_each(parts: Any, *rest: Any) -> Any:
        asked.extend(parts)
        *_, until, besides = rest
        untils.append(until() - time.monotonic())
        for beside in besides:
            beside()
        untils.append(until() - time.monotonic())
        yield choice_of("matmul")
        raise OutOfTimeError

    args = small, large, jnp.ones((64, 16))
    untuned: list[Any] = []
    untils: list[float] = []

    class Slow(Made):
        compilation_s = math.inf

        def compile_ahead(self, trial: Trial) -> None:
            untuned.append(trial.choices)
            self.compilation_s = compilation_s

    monkeypatch.setattr(
        tuning, "Programs", lambda *_: Slow(lambda chosen: float(len(who_runs(chosen))))
    )
    found, table, kept = _tuned(
        monkeypatch, program, *args, measure_each=measure_each, budget_s=60
    )
    sizes = [part.output_tensors[0].dims for part, _ in asked]
    assert sizes == [(1, 8, 8), (1, 64, 16), (1, 16, 16)]
    # Half of the time is the program's, and less if it compiles in less than a quarter.
    assert untils == pytest.approx([30, 60 - most_s], abs=3)
    (ahead,) = untuned
    assert list(ahead.values()) == [None] * 3
    assert "not measured, for lack of time: 2" in str(found)
    assert isinstance(found.program, ProgramTimes)
    # Nothing is said or kept of what was not measured.
    assert who_runs(found.choices) == ["cudnn"]
    assert table.all() == found.choices == kept[-1]
    found.save(tmp_path / "choices.json")
    assert choices.read(tmp_path / "choices.json") == found.choices


@pytest.mark.parametrize(
    ("function", "shapes", "most", "moved"),
    [
        (matmul, [(64, 32), (32, 16)], 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16)),
        (
            lambda x, w: conv(x, w, (2, 2), "SAME"),
            [(2, 8, 16, 16), (24, 8, 3, 3)],
            2 * 24 * 8 * 8 * 8 * 9,
            2 * (2 * 8 * 256 + 24 * 72 + 2 * 24 * 64),
        ),
        (
            lambda q, k, v: sdpa(q, k, v),
            [(2, 64, 4, 32), (2, 48, 4, 32), (2, 48, 4, 32)],
            2 * 4 * 64 * 48 * 32,
            2 * (2 * (64 + 48) * 2 * 4 * 32),
        ),
    ],
    ids=["matmul", "conv", "sdpa"],
)
def test_what_a_kernel_moves_and_multiplies_is_expected(
    function: Any, shapes: Any, most: int, moved: int
) -> None:
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    ((graph, _, _),) = traced_graphs(function, *types)
    assert expected_bytes(graph) == pytest.approx(moved + most / 150)
