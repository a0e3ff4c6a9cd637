# SPDX-License-Identifier: Apache-2.0
"""Tests that tasks compile at once, and are timed one after another."""

import functools
import threading
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn.tuning.together import Background, WithFollowUp, in_stages, together

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)


def test_tasks_meet_one_another() -> None:
    meeting = threading.Barrier(3, timeout=30)

    def meet(number: int) -> int:
        meeting.wait()
        return number

    assert together([lambda i=i: meet(i) for i in range(3)]) == [0, 1, 2]
    assert together([]) == []


def test_what_follows_a_task_runs_alone_while_others_go_on() -> None:
    others, told = threading.Event(), list[str]()

    def follow(found: str) -> str:
        told.append(f"{found} begins")
        assert others.wait(timeout=30)
        told.append(f"{found} ends")
        return found.upper()

    # The last task lets what follows go on, with one thread for all but these.
    tasks = [WithFollowUp(functools.partial(str, each), follow) for each in "ab"]
    found = together([tasks[0], lambda: 1, tasks[1], others.set])
    assert found == ["A", 1, "B", None]
    assert sorted(told[::2]) == ["a begins", "b begins"]
    assert [each[0] for each in told[::2]] == [each[0] for each in told[1::2]]
    assert tasks[0]() == "A"


def test_what_follows_may_raise() -> None:
    def fail(found: int) -> None:
        raise KeyError(found)

    with pytest.raises(KeyError, match="7"):
        together([WithFollowUp(lambda: 7, fail), lambda: None])


def test_double_precision_holds_in_the_threads() -> None:
    def dtype() -> Any:
        return jnp.ones(3).dtype

    with jax.enable_x64(True):
        assert together([dtype]) == [jnp.float64]
    assert together([dtype]) == [jnp.float32]


def test_what_a_task_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("a")

    with pytest.raises(KeyError, match="a"):
        together([fail, lambda: None])


def _work(
    name: str, stages: int, told: list[str], fails: bool = False
) -> Generator[list[Any], list[Any], str]:
    for stage in range(stages):
        found = yield [functools.partial(tuple, (name, stage)), threading.get_ident]
        assert found[0] == (name, stage)
        told.append(f"{name}{stage}")
    if fails:
        raise TimeoutError
    return name


def test_works_go_on_one_after_another_and_return_in_order() -> None:
    told: list[str] = []
    works = [_work(name, stages, told) for name, stages in (("a", 3), ("b", 1))]
    assert list(in_stages([*works, _work("c", 2, told)])) == ["a", "b", "c"]
    assert told == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_what_was_returned_before_a_failure_is_there() -> None:
    told: list[str] = []
    found = in_stages([_work("a", 1, told), _work("b", 1, told, fails=True)])
    assert next(found) == "a"
    with pytest.raises(TimeoutError):
        next(found)


def test_what_goes_on_aside_begins_while_others_are_timed() -> None:
    begun, timed = threading.Event(), threading.Event()

    def build() -> str:
        begun.set()
        assert timed.wait(timeout=30)
        return "built"

    def take(built: Any) -> str:
        assert timed.is_set()
        return f"{built()} and taken"

    def first() -> Generator[list[Any], list[Any], str]:
        yield []
        (found,) = yield [Background(build, take)]
        return found

    def second() -> Generator[list[Any], list[Any], str]:
        yield []
        assert begun.wait(timeout=30), "it waits for this work to go on"
        timed.set()
        yield []
        return "timed"

    assert list(in_stages([first(), second()])) == ["built and taken", "timed"]


def test_what_fails_aside_is_told_to_what_comes_of_it() -> None:
    def fail() -> None:
        raise KeyError("a")

    def take(built: Any) -> str:
        with pytest.raises(KeyError, match="a"):
            built()
        return "told"

    def work() -> Generator[list[Any], list[Any], str]:
        (found,) = yield [Background(fail, take)]
        return found

    assert list(in_stages([work()])) == ["told"]


def test_nothing_goes_on_aside_once_a_work_has_failed() -> None:
    told: list[str] = []
    meeting, late = threading.Event(), threading.Event()
    ended = threading.Semaphore(0)

    def wait() -> None:
        assert meeting.wait(timeout=30)
        ended.release()

    def work() -> Generator[list[Any], list[Any], str]:
        asides = [Background(wait, lambda built: built()) for _ in range(3)]
        yield []
        yield [*asides, Background(late.set, lambda built: built())]
        return "never"

    with pytest.raises(TimeoutError):
        list(in_stages([work(), _work("b", 1, told, fails=True)]))
    assert told == ["b0"]
    # What had begun goes on, and what had not never does.
    meeting.set()
    for _ in range(3):
        assert ended.acquire(timeout=30)
    assert not late.wait(timeout=0.2)
