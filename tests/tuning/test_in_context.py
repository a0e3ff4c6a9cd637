# SPDX-License-Identifier: Apache-2.0
"""Tests that tuning ends with the choices that make the whole program fastest."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jax_cudnn.choices import Choice, Key, Trial
from jax_cudnn.tuning import (
    NotRunError,
    in_context,
)
from jax_cudnn.tuning.in_context import Chosen, ProgramTimes, settle
from tests.tuning.made_programs import Made, choice_of, key_of, who_runs

pytestmark = pytest.mark.once

# Both of which cuDNN runs faster alone.
_TWO = {
    key_of("n"): choice_of("norm", 10, 12),
    key_of("m"): choice_of("matmul", 10, 20),
}


def _settle(
    programs: Made,
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


@pytest.mark.parametrize("seed", range(20))
def test_it_is_as_fast_as_the_fastest_contender(seed: int) -> None:
    rng = random.Random(seed)
    found = {
        key_of(str(i)): choice_of(rng.choice("abc"), *rng.choices((5, 9, 10, 11), k=2))
        for i in range(rng.randint(1, 6))
    }
    before = {key: choice_of("old") for key in found if rng.random() < 0.5}
    alone = {
        (key, who): rng.uniform(1, 20)
        for key, who in itertools.product(found, ("cudnn", "xla", None))
    }

    def cost(chosen: Chosen) -> float:
        return sum(alone[k, c and c.implementation] for k, c in chosen.items())

    programs = Made(cost)
    chosen, times = _settle(programs, found, before)
    least = cost(chosen)
    assert least == pytest.approx(times.chosen_us, abs=0.1)
    for each in programs.compiled[:4]:
        assert least <= cost(each) * 1.005 + 1e-9
    assert len(programs.compiled) <= 5 + len({c.op for c in found.values()})


@pytest.mark.parametrize("fastest", ["cudnn", "xla"])
def test_what_was_not_measured_stays_as_it_was(fastest: str) -> None:
    found = {key_of("n"): choice_of("norm", 10, 12)}
    before = {key_of("n"): None, key_of("old"): choice_of("old"), key_of("new"): None}

    def cost(chosen: Chosen) -> float:
        who = chosen[key_of("n")]
        return 20 if who is not None and who.implementation == fastest else 30

    programs = Made(cost)
    chosen, times = settle(
        programs, found, before, runs={key_of("n"): 1}, deadline=math.inf,
        say=lambda _: None, is_all=False,
    )  # fmt: skip
    assert who_runs(chosen)[0] == fastest
    for each in programs.compiled:
        assert each.get(key_of("old"), before[key_of("old")]) == before[key_of("old")]
        assert each.get(key_of("new")) is None
    # Those that are untuned are named, as whoever compiles them ahead names them.
    assert before in programs.compiled
    assert "(untuned 30.0, XLA where calls were measured " in str(times)
    assert not times.is_xla_alone


@pytest.mark.parametrize(("deadline", "is_tried"), [(21.0, True), (19.0, False)])
def test_operations_change_over_if_there_is_time_for_as_much_again(
    deadline: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Slow(Made):
        def compile(self, trials: Sequence[Trial]) -> list[int | NotRunError]:
            now[0] += 10
            return super().compile(trials)

    monkeypatch.setattr(in_context.time, "monotonic", lambda: now[0])
    found = {
        key_of("n"): choice_of("norm", 10, 10.1),
        key_of("m"): choice_of("matmul", 10, 20),
    }
    programs = Slow(lambda chosen: 20 - (who_runs(chosen) == ["xla", "cudnn"]))
    chosen, _ = _settle(programs, found, deadline=deadline)
    assert (who_runs(chosen) == ["xla", "cudnn"]) == is_tried
    assert now == [20 if is_tried else 10]


def test_an_operation_changes_over_where_that_helps_its_neighbours() -> None:
    # Alone, cuDNN's norm is faster; XLA's is computed within its neighbour's code.
    found = dict(_TWO)

    def cost(chosen: Chosen) -> float:
        norm, product = who_runs(chosen)
        return (10 if norm == "cudnn" else 2) + (10 if product == "cudnn" else 20)

    chosen, times = _settle(Made(cost), found)
    assert who_runs(chosen) == ["xla", "cudnn"]
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
    found = {key_of(op): choice_of(op, 10 + i, 11 + i) for i, op in enumerate(names)}
    now = [0.0]

    class Slow(Made):
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
    assert set(who_runs(xla)) == {"xla"}
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
    found = dict(_TWO)
    count = norms or 1

    def cost(chosen: Chosen) -> float:
        norm, product = who_runs(chosen)
        us = count * (10 if norm == "cudnn" else 12)
        us += 10 if product == "cudnn" else 20
        return us - spared if norm == product == "xla" else us

    before = dict.fromkeys(found)
    programs = Made(lambda chosen: 50 if None in who_runs(chosen) else cost(chosen))
    runs = norms and {key_of("n"): norms, key_of("m"): 1}
    chosen, times = _settle(programs, found, before, runs=runs)
    assert who_runs(chosen) == ["cudnn", "cudnn"]
    assert times.untuned_us == 50
    assert (["xla", "cudnn"] in map(who_runs, programs.compiled)) == is_tried


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
        key_of("a"): choice_of("a", 40, 90),
        key_of("b"): choice_of("b", cudnn_us, 10),
    }
    programs = Made(lambda chosen: 9.0 if None in who_runs(chosen) else 50.0)
    counts = runs and {key_of("a"): 1, key_of("b"): runs}
    times = _settle(programs, found, dict.fromkeys(found), runs=counts)[1]
    assert (["cudnn", "cudnn"] in map(who_runs, programs.compiled[:4])) == is_tried
    assert (times.cudnn_us is not None) == ("cuDNN alone" in str(times)) == is_tried


@pytest.mark.parametrize(("runs", "is_tried"), [(1, False), (2, True), (None, True)])
def test_an_operation_that_takes_next_to_nothing_stays(
    runs: int | None, is_tried: bool
) -> None:
    found = {key_of("a"): choice_of("a", 10, 11), key_of("b"): choice_of("b", 900, 910)}
    programs = Made(lambda chosen: 1500.0)  # 1 % of it is 15.
    counts = runs and {key_of("a"): runs, key_of("b"): 1}
    _settle(programs, found, dict.fromkeys(found), runs=counts)
    assert (["xla", "cudnn"] in map(who_runs, programs.compiled)) == is_tried
    assert ["cudnn", "xla"] in map(who_runs, programs.compiled)


def test_from_choices_without_times_every_operation_is_tried() -> None:
    found = dict(_TWO)
    programs = Made(lambda chosen: 1.0 if who_runs(chosen) == [None, None] else 40.0)
    runs = dict.fromkeys(found, 1)
    chosen, _ = _settle(programs, found, dict.fromkeys(found), runs=runs)
    assert who_runs(chosen) == [None, None]
    assert [None, "cudnn"] in map(who_runs, programs.compiled)
    assert ["cudnn", None] in map(who_runs, programs.compiled)


def test_an_implementation_that_does_not_run_says_nothing_of_what_it_spares() -> None:
    found = dict(_TWO)
    programs = Made(lambda _: 1.0, fails="xla")
    _settle(programs, found, runs=dict.fromkeys(found, 1))
    assert ["xla", "cudnn"] in map(who_runs, programs.compiled)


def test_what_cudnn_runs_slower_alone_stays_xlas() -> None:
    # XLA fuses what is around a call, and cuDNN does not: there is nothing to gain.
    found = {
        key_of("a1"): choice_of("a", 12, 10),
        key_of("a2"): choice_of("a", 10, 12),
        key_of("b"): choice_of("b", 12, 10),
        key_of("c"): choice_of("c", 10.4, 10),
    }
    programs = Made(lambda chosen: 10 - sum(who == "xla" for who in who_runs(chosen)))
    _settle(programs, found)
    changed = [who_runs(each) for each in programs.compiled[4:]]
    # From XLA alone, which is fastest here, a2 and c may change over.
    assert changed == [["xla", "cudnn", "xla", "xla"], ["xla", "xla", "xla", "cudnn"]]


def test_what_is_far_apart_alone_does_not_change_over() -> None:
    found = {key_of("a"): choice_of("a", 10, 100), key_of("b"): choice_of("b", 10, 11)}
    programs = Made(lambda _: 1.0)
    _settle(programs, found)
    assert ["xla", "cudnn"] not in list(map(who_runs, programs.compiled))
    assert ["cudnn", "xla"] in list(map(who_runs, programs.compiled))


def test_xla_runs_no_call_for_which_it_takes_far_longer() -> None:
    found = {key_of("a"): choice_of("a", 10, 31), key_of("b"): choice_of("b", 10, 29)}
    programs = Made(lambda _: 1.0)
    times = _settle(programs, found)[1]
    assert ["cudnn", "xla"] in list(map(who_runs, programs.compiled))
    assert all(who_runs(each)[0] in ("cudnn", None) for each in programs.compiled)
    assert "XLA but for calls that take it over 3 times as long 1.0" in str(times)


def test_the_untuned_program_may_win() -> None:
    found = {key_of("a"): choice_of("a"), key_of("b"): choice_of("b", 9, 8)}
    old = replace(found[key_of("a")], implementation="xla")
    programs = Made(lambda chosen: 1.0 if who_runs(chosen) == ["xla", None] else 2.0)
    chosen, times = _settle(programs, found, {key_of("a"): old})
    assert chosen == {key_of("a"): old, key_of("b"): None}
    assert times.chosen_us == times.untuned_us == 1.0


def test_what_seemed_to_gain_is_timed_beside_all_others_at_the_end() -> None:
    """Two by two, whatever is timed second seems faster, as on a GPU that warms up."""
    found = {key_of("a"): choice_of("a"), key_of("b"): choice_of("b", 9, 8)}

    class Misleading(Made):
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
    found = {key_of("a"): choice_of("a"), key_of("b"): choice_of("b", 9, 8)}
    programs = Made(lambda chosen: 100.0 if chosen == found else 99.8)
    assert _settle(programs, found)[0] == found


def test_contenders_that_do_not_run_are_left_out() -> None:
    found = {key_of("a"): choice_of("a"), key_of("b"): choice_of("b", 9, 8)}
    times = _settle(Made(lambda _: 1.0, fails="xla"), found)[1]
    assert times.xla_us is None
    assert times.cudnn_us == 1.0
    with pytest.raises(NotRunError, match="cudnn does not run"):
        _settle(Made(lambda _: 1.0, fails="cudnn"), {key_of("a"): choice_of("a")})


def test_without_time_the_kernels_choices_stay() -> None:
    found = {key_of("a"): choice_of("a"), key_of("b"): choice_of("b", 9, 8)}
    programs = Made(lambda _: 1.0)
    chosen, times = _settle(programs, found, deadline=0.0)
    assert programs.compiled == [found]
    assert chosen == found
    assert times == ProgramTimes(chosen_us=1.0, kernels_us=1.0)
