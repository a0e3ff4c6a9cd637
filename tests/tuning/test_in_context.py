# SPDX-License-Identifier: Apache-2.0
"""Tests that tuning ends with the choices that make the whole program fastest."""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import GraphError, UnsupportedError, choices, conv, matmul, sdpa
from jax_cudnn.choices import Choice, ChoiceTable, Key, Trial
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
    in_context,
    memory,
    programs,
)
from jax_cudnn.tuning.in_context import Chosen, ProgramTimes, settle
from tests.common.planner import H200, made_plan

pytestmark = pytest.mark.once


def _key(name: str) -> Key:
    return Key(device="NVIDIA H200", cudnn=91900, graph=name)


def _choice(op: str, cudnn_us: float = 10.0, xla_us: float = 11.0) -> Choice:
    winner: Any = "cudnn" if cudnn_us <= xla_us else "xla"
    return Choice(
        op=op,
        operands="",
        implementation=winner,
        plan='{"engine":1}',
        cudnn_us=cudnn_us,
        xla_us=xla_us,
    )


class _Made:
    """Programs whose times a function of the choices tells."""

    def __init__(self, cost: Callable[[Chosen], float], fails: str = "") -> None:
        self.cost, self.fails = cost, fails
        self.compiled: list[Chosen] = []

    def compile(self, trials: Sequence[Trial]) -> list[int | NotRunError]:
        return list(map(self._compile, trials))

    def _compile(self, trial: Trial) -> int | NotRunError:
        who = {each and each.implementation for each in trial.choices.values()}
        if self.fails and who == {self.fails}:
            return NotRunError(f"{self.fails} does not run")
        self.compiled.append(trial.choices)
        return len(self.compiled) - 1

    def times(self, numbers: Sequence[int]) -> list[float]:
        return [self.cost(self.compiled[number]) for number in numbers]


def _settle(
    programs: _Made,
    found: dict[Key, Choice],
    before: Chosen | None = None,
    deadline: float = math.inf,
    runs: dict[Key, int] | None = None,
) -> tuple[Chosen, ProgramTimes]:
    return settle(
        programs,
        found,
        before or {},
        runs=runs,
        deadline=deadline,
        say=lambda _: None,
    )


def _who(chosen: Chosen) -> list[str | None]:
    return [choice and choice.implementation for choice in chosen.values()]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_as_fast_as_the_fastest_contender(seed: int) -> None:
    rng = random.Random(seed)
    found = {
        _key(str(i)): _choice(rng.choice("abc"), *rng.choices((5, 9, 10, 11), k=2))
        for i in range(rng.randint(1, 6))
    }
    before = {key: _choice("old") for key in found if rng.random() < 0.5}
    alone = {
        (key, who): rng.uniform(1, 20)
        for key, who in itertools.product(found, ("cudnn", "xla", None))
    }

    def cost(chosen: Chosen) -> float:
        return sum(alone[k, c and c.implementation] for k, c in chosen.items())

    programs = _Made(cost)
    chosen, times = _settle(programs, found, before)
    least = cost(chosen)
    assert least == pytest.approx(times.chosen_us, abs=0.1)
    for each in programs.compiled[:4]:
        assert least <= cost(each) * 1.005 + 1e-9
    assert len(programs.compiled) <= 5 + len({c.op for c in found.values()})


@pytest.mark.parametrize("fastest", ["cudnn", "xla"])
def test_what_was_not_measured_stays_as_it_was(fastest: str) -> None:
    found = {_key("n"): _choice("norm", 10, 12)}
    before = {_key("n"): None, _key("old"): _choice("old"), _key("new"): None}

    def cost(chosen: Chosen) -> float:
        who = chosen[_key("n")]
        return 20 if who is not None and who.implementation == fastest else 30

    programs = _Made(cost)
    chosen, times = settle(
        programs, found, before, runs={_key("n"): 1}, deadline=math.inf,
        say=lambda _: None, is_all=False,
    )  # fmt: skip
    assert _who(chosen)[0] == fastest
    for each in programs.compiled:
        assert each.get(_key("old"), before[_key("old")]) == before[_key("old")]
        assert each.get(_key("new")) is None
    # Those that are untuned are named, as whoever compiles them ahead names them.
    assert before in programs.compiled
    assert "(untuned 30.0, XLA where calls were measured " in str(times)
    assert not times.is_xla_alone


@pytest.mark.parametrize(("deadline", "is_tried"), [(21.0, True), (19.0, False)])
def test_operations_change_over_if_there_is_time_for_as_much_again(
    deadline: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Slow(_Made):
        def compile(self, trials: Sequence[Trial]) -> list[int | NotRunError]:
            now[0] += 10
            return super().compile(trials)

    monkeypatch.setattr(in_context.time, "monotonic", lambda: now[0])
    found = {_key("n"): _choice("norm", 10, 10.1), _key("m"): _choice("matmul", 10, 20)}
    programs = Slow(lambda chosen: 20 - (_who(chosen) == ["xla", "cudnn"]))
    chosen, _ = _settle(programs, found, deadline=deadline)
    assert (_who(chosen) == ["xla", "cudnn"]) == is_tried
    assert now == [20 if is_tried else 10]


def test_an_operation_changes_over_where_that_helps_its_neighbours() -> None:
    # Alone, cuDNN's norm is faster; XLA's is computed within its neighbour's code.
    found = {_key("n"): _choice("norm", 10, 12), _key("m"): _choice("matmul", 10, 20)}

    def cost(chosen: Chosen) -> float:
        norm, product = _who(chosen)
        return (10 if norm == "cudnn" else 2) + (10 if product == "cudnn" else 20)

    chosen, times = _settle(_Made(cost), found)
    assert _who(chosen) == ["xla", "cudnn"]
    assert times == ProgramTimes(
        chosen_us=12, untuned_us=22, xla_us=22, cudnn_us=None, kernels_us=20
    )
    assert str(times) == (
        "the whole program, in microseconds: 12.0 (untuned 22.0, XLA alone 22.0, each "
        "kernel's winner 20.0)"
    )


@pytest.mark.parametrize(
    ("seconds", "tried"), [(0.0, 6), (5.0, 6), (5.1, 5), (10.0, 3), (11.0, 2), (90, 2)]
)
def test_fewer_operations_change_over_where_programs_take_long_to_compile(
    seconds: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "abcdefg"
    found = {_key(op): _choice(op, 10 + i, 11 + i) for i, op in enumerate(names)}
    now = [0.0]

    class Slow(_Made):
        def compile(self, trials: Sequence[Trial]) -> list[int | NotRunError]:
            now[0] += seconds * len(trials)
            return super().compile(trials)

    def cost(chosen: Chosen) -> float:
        return sum(
            10.0 if x and x.implementation == "cudnn" else 11 for x in chosen.values()
        )

    monkeypatch.setattr(in_context.time, "monotonic", lambda: now[0])
    programs = Slow(cost)
    # Each runs more often than the next, so that "a" takes longest of all.
    runs = {key: 2 ** (len(names) - i) for i, key in enumerate(found)}
    _settle(programs, found, dict(found), runs=runs)
    kernels, xla, *changed = programs.compiled
    assert set(_who(xla)) == {"xla"}
    ops = [
        choice.op
        for each in changed
        for key, choice in each.items()
        if choice and choice != kernels[key]
    ]
    assert ops == [*names][:tried], "those whose calls take longest"


@pytest.mark.parametrize(
    ("norms", "spared", "is_tried"),
    [
        (1, 2.5, True),  # XLA's norm loses 2, and XLA fuses away 2.5.
        (1, 1.9, True),  # Near enough: there is a slack of 1 % of 20.
        (1, 1.5, False),
        (2, 2.5, False),  # It loses 4.
        (None, 1.5, True),  # There is a loop, and who knows.
    ],
)
def test_an_operation_that_loses_more_than_xla_spares_stays(
    norms: int | None, spared: float, is_tried: bool
) -> None:
    found = {_key("n"): _choice("norm", 10, 12), _key("m"): _choice("matmul", 10, 20)}
    count = norms or 1

    def cost(chosen: Chosen) -> float:
        norm, product = _who(chosen)
        us = count * (10 if norm == "cudnn" else 12)
        us += 10 if product == "cudnn" else 20
        return us - spared if norm == product == "xla" else us

    before = dict.fromkeys(found)
    programs = _Made(lambda chosen: 50 if None in _who(chosen) else cost(chosen))
    runs = norms and {_key("n"): norms, _key("m"): 1}
    chosen, times = _settle(programs, found, before, runs=runs)
    assert _who(chosen) == ["cudnn", "cudnn"]
    assert times.untuned_us == 50
    assert (["xla", "cudnn"] in map(_who, programs.compiled)) == is_tried


@pytest.mark.parametrize(
    ("cudnn_us", "runs", "is_tried"),
    [
        (14.0, 1, True),  # 4 more than the winners' 50.
        (14.0, 2, False),  # 8 more than their 60.
        (99.0, None, True),  # There is a loop, and who knows.
    ],
)
def test_cudnn_alone_is_not_tried_where_its_calls_lose_far_too_much(
    cudnn_us: float, runs: int | None, is_tried: bool
) -> None:
    found = {
        _key("a"): _choice("a", 40, 90),
        _key("b"): _choice("b", cudnn_us, 10),
    }
    programs = _Made(lambda chosen: 9.0 if None in _who(chosen) else 50.0)
    counts = runs and {_key("a"): 1, _key("b"): runs}
    times = _settle(programs, found, dict.fromkeys(found), runs=counts)[1]
    assert (["cudnn", "cudnn"] in map(_who, programs.compiled[:4])) == is_tried
    assert (times.cudnn_us is not None) == ("cuDNN alone" in str(times)) == is_tried


@pytest.mark.parametrize(("runs", "is_tried"), [(1, False), (2, True), (None, True)])
def test_an_operation_that_takes_next_to_nothing_stays(
    runs: int | None, is_tried: bool
) -> None:
    found = {_key("a"): _choice("a", 10, 11), _key("b"): _choice("b", 900, 910)}
    programs = _Made(lambda chosen: 1500.0)  # 1 % of it is 15.
    counts = runs and {_key("a"): runs, _key("b"): 1}
    _settle(programs, found, dict.fromkeys(found), runs=counts)
    assert (["xla", "cudnn"] in map(_who, programs.compiled)) == is_tried
    assert ["cudnn", "xla"] in map(_who, programs.compiled)


def test_from_choices_without_times_every_operation_is_tried() -> None:
    found = {_key("n"): _choice("norm", 10, 12), _key("m"): _choice("matmul", 10, 20)}
    programs = _Made(lambda chosen: 1.0 if _who(chosen) == [None, None] else 40.0)
    runs = dict.fromkeys(found, 1)
    chosen, _ = _settle(programs, found, dict.fromkeys(found), runs=runs)
    assert _who(chosen) == [None, None]
    assert [None, "cudnn"] in map(_who, programs.compiled)
    assert ["cudnn", None] in map(_who, programs.compiled)


def test_an_implementation_that_does_not_run_says_nothing_of_what_it_spares() -> None:
    found = {_key("n"): _choice("norm", 10, 12), _key("m"): _choice("matmul", 10, 20)}
    programs = _Made(lambda _: 1.0, fails="xla")
    _settle(programs, found, runs=dict.fromkeys(found, 1))
    assert ["xla", "cudnn"] in map(_who, programs.compiled)


def test_what_cudnn_runs_slower_alone_stays_xlas() -> None:
    # XLA fuses what is around a call, and cuDNN does not: there is nothing to gain.
    found = {
        _key("a1"): _choice("a", 12, 10),
        _key("a2"): _choice("a", 10, 12),
        _key("b"): _choice("b", 12, 10),
        _key("c"): _choice("c", 10.4, 10),
    }
    programs = _Made(lambda chosen: 10 - sum(who == "xla" for who in _who(chosen)))
    _settle(programs, found)
    changed = [_who(each) for each in programs.compiled[4:]]
    # From XLA alone, which is fastest here, a2 and c may change over.
    assert changed == [["xla", "cudnn", "xla", "xla"], ["xla", "xla", "xla", "cudnn"]]


def test_what_is_far_apart_alone_does_not_change_over() -> None:
    found = {_key("a"): _choice("a", 10, 100), _key("b"): _choice("b", 10, 11)}
    programs = _Made(lambda _: 1.0)
    _settle(programs, found)
    assert ["xla", "cudnn"] not in list(map(_who, programs.compiled))
    assert ["cudnn", "xla"] in list(map(_who, programs.compiled))


def test_xla_runs_no_call_for_which_it_takes_far_longer() -> None:
    found = {_key("a"): _choice("a", 10, 31), _key("b"): _choice("b", 10, 29)}
    programs = _Made(lambda _: 1.0)
    times = _settle(programs, found)[1]
    assert ["cudnn", "xla"] in list(map(_who, programs.compiled))
    assert all(_who(each)[0] in ("cudnn", None) for each in programs.compiled)
    assert "XLA but for calls that take it over 3 times as long 1.0" in str(times)


def test_the_untuned_program_may_win() -> None:
    found = {_key("a"): _choice("a"), _key("b"): _choice("b", 9, 8)}
    old = replace(found[_key("a")], implementation="xla")
    programs = _Made(lambda chosen: 1.0 if _who(chosen) == ["xla", None] else 2.0)
    chosen, times = _settle(programs, found, {_key("a"): old})
    assert chosen == {_key("a"): old, _key("b"): None}
    assert times.chosen_us == times.untuned_us == 1.0


def test_what_seemed_to_gain_is_timed_beside_all_others_at_the_end() -> None:
    """Two by two, whatever is timed second seems faster, as on a GPU that warms up."""
    found = {_key("a"): _choice("a"), _key("b"): _choice("b", 9, 8)}

    class Misleading(_Made):
        def times(self, numbers: Sequence[int]) -> list[float]:
            if len(numbers) == 2:
                return [10.0, 5.0]
            return super().times(numbers)

    programs = Misleading(lambda chosen: 7.0 if chosen == found else 9.0)
    chosen, times = _settle(programs, found)
    assert chosen == found
    assert times.chosen_us == times.kernels_us == 7.0
    assert times.untuned_us == 9.0


def test_a_tie_is_the_kernels() -> None:
    found = {_key("a"): _choice("a"), _key("b"): _choice("b", 9, 8)}
    programs = _Made(lambda chosen: 100.0 if chosen == found else 99.8)
    assert _settle(programs, found)[0] == found


def test_contenders_that_do_not_run_are_left_out() -> None:
    found = {_key("a"): _choice("a"), _key("b"): _choice("b", 9, 8)}
    times = _settle(_Made(lambda _: 1.0, fails="xla"), found)[1]
    assert times.xla_us is None
    assert times.cudnn_us == 1.0
    with pytest.raises(NotRunError, match="cudnn does not run"):
        _settle(_Made(lambda _: 1.0, fails="cudnn"), {_key("a"): _choice("a")})


def test_without_time_the_kernels_choices_stay() -> None:
    found = {_key("a"): _choice("a"), _key("b"): _choice("b", 9, 8)}
    programs = _Made(lambda _: 1.0)
    chosen, times = _settle(programs, found, deadline=0.0)
    assert programs.compiled == [found]
    assert chosen == found
    assert times == ProgramTimes(chosen_us=1.0, kernels_us=1.0)


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
    key, choice = _key("m"), _choice("matmul")
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
    by_xla = replace(_choice("matmul"), implementation="xla")
    table.add({key: by_xla})
    gpu: Any = _Gpu()

    def who(trial: Trial | None) -> bool:
        return decide_part(graph, gpu, Options(), trial).rewrite is not None

    assert not who(None)
    assert who(Trial({key: None}))
    assert not who(Trial({}))
    table.forget([key, _key("another")])
    assert who(None)
    assert not who(Trial({key: by_xla}))
    assert Trial({}) != Trial({})


# --- autotune -------------------------------------------------------------------------


def _measured(parts: Any, *_: Any) -> Any:
    return (_choice("matmul") for _ in parts)


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
    assert list(found.choices.values()) == [_choice("matmul")]


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
        yield _choice("matmul")
        raise OutOfTimeError

    args = small, large, jnp.ones((64, 16))
    untuned: list[Any] = []
    untils: list[float] = []

    class Made(_Made):
        compilation_s = math.inf

        def compile_ahead(self, trial: Trial) -> None:
            untuned.append(trial.choices)
            self.compilation_s = compilation_s

    monkeypatch.setattr(
        tuning, "Programs", lambda *_: Made(lambda chosen: float(len(_who(chosen))))
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
    assert _who(found.choices) == ["cudnn"]
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
