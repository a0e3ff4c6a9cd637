# SPDX-License-Identifier: Apache-2.0
"""Tests that several processes build plans, and this one builds what they cannot.

Processes and the extension are made up here; tests/plans/gpuless/test_plan_files.py
builds.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_cudnn import LibraryError, UnsupportedError, native
from jax_cudnn.native import PlanInfo
from jax_cudnn.offline import builders
from jax_cudnn.offline.builders import PlanBuilders, plan_builders
from tests.common.planner import H200, PIN, made_plan

pytestmark = pytest.mark.once

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class _Process:
    """A process that answers as a test says; it may be asked one thing at a time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.is_closed = threading.Event()
        self._lock = threading.Lock()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._lock.acquire(blocking=False), "two ask one process at once"
        try:
            self.asked.append(question)
            return self.answer(question)
        finally:
            self._lock.release()

    def close(self) -> None:
        self.is_closed.set()


class _Extension:
    """The plan cache of this process: what was imported, and what it had to build."""

    def __init__(self) -> None:
        self.imported: list[bytes] = []
        self.built: list[str] = []
        self.error: Exception | None = None

    def import_plan(self, data: bytes, *, device: int, keep: bool) -> None:
        assert (device, keep) == (3, True)
        if self.error is not None:
            raise self.error
        self.imported.append(data)

    def plan(self, graph_json: str, *, request: str, device: int) -> PlanInfo:
        assert device == 3
        if graph_json.encode() not in self.imported:
            self.built.append(graph_json)
        return made_plan(request)


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> _Extension:
    made = _Extension()
    monkeypatch.setattr(native, "import_plan", made.import_plan)
    monkeypatch.setattr(native, "plan", made.plan)
    monkeypatch.setattr(native, "device_properties", lambda ordinal: f"of {ordinal}")
    return made


def _builds(question: dict[str, Any]) -> dict[str, Any]:
    Path(question["file"]).write_bytes(question["graph"].encode())
    return {"file": question["file"]}


def _of(*answers: Answer) -> tuple[PlanBuilders, list[_Process]]:
    processes = [_Process(answer) for answer in answers]
    return PlanBuilders(H200, 3, processes), processes  # type: ignore[arg-type]


def test_a_plan_is_built_elsewhere_and_found_here(extension: _Extension) -> None:
    made, (process,) = _of(_builds)
    assert made.plan("a graph", request=PIN) == made_plan(PIN)
    (question,) = process.asked
    assert question["request"] == PIN
    assert question["device_properties"] == "of 3"
    assert question["target"]["name"] == H200.name
    assert (extension.imported, extension.built) == ([b"a graph"], [])
    assert not Path(question["file"]).exists()


def test_a_plan_that_is_pinned_by_its_place_is_built_here(
    extension: _Extension,
) -> None:
    made, (process,) = _of(_builds)
    place = '{"engine":45,"nth":1,"variant":0}'
    assert made.plan("a graph", request=place) == made_plan(place)
    assert (process.asked, extension.built) == ([], ["a graph"])


def test_a_plan_file_is_written_now_and_taken_later(extension: _Extension) -> None:
    made, _ = _of(_builds)
    data = made.built_elsewhere("a graph", PIN)
    assert (data, extension.imported) == (b"a graph", [])
    assert made.taken("a graph", PIN, lambda: data) == made_plan(PIN)
    assert (extension.imported, extension.built) == ([b"a graph"], [])

    def crashed() -> None:
        raise UnsupportedError("cuDNN crashed")

    with pytest.raises(UnsupportedError, match="cuDNN crashed"):
        made.taken("another", PIN, crashed)


def test_each_process_builds_one_plan_at_a_time(extension: _Extension) -> None:
    meeting = threading.Barrier(2, timeout=30)

    def together(question: dict[str, Any]) -> dict[str, Any]:
        meeting.wait()
        return _builds(question)

    made, processes = _of(together, together)
    threads = [
        threading.Thread(target=made.plan, args=(f"graph {i}", PIN)) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(process.asked) for process in processes] == [3, 3]
    assert len(extension.imported) == 6
    assert not extension.built


def test_what_others_cannot_build_is_built_here(extension: _Extension) -> None:
    made, (process,) = _of(lambda _: {"error": "UnsupportedError", "message": "no"})
    made.plan("one", PIN)
    made.plan("two", PIN)
    assert extension.built == ["one", "two"]
    assert len(process.asked) == 2, "the next graph may be built elsewhere"


def test_without_processes_all_is_built_here(extension: _Extension) -> None:
    def missing(_: dict[str, Any]) -> dict[str, Any]:
        raise LibraryError("it does not start")

    made, (process,) = _of(missing)
    made.plan("one", PIN)
    made.plan("two", PIN)
    assert extension.built == ["one", "two"]
    assert len(process.asked) == 1


def test_plans_that_cannot_be_read_are_asked_for_no_more(extension: _Extension) -> None:
    extension.error = LibraryError("made for another GPU")
    made, (process,) = _of(_builds)
    made.plan("one", PIN)
    made.plan("two", PIN)
    assert extension.built == ["one", "two"]
    assert len(process.asked) == 1


@pytest.mark.parametrize("error", [RuntimeError, UnsupportedError])
def test_one_plan_that_cannot_be_read_is_built_here(
    extension: _Extension, error: type[Exception]
) -> None:
    extension.error = error("it needs another workspace than when it was written")
    made, (process,) = _of(_builds)
    made.plan("one", PIN)
    extension.error = None
    made.plan("two", PIN)
    assert extension.built == ["one"]
    assert extension.imported == [b"two"]
    assert len(process.asked) == 2


def test_what_crashes_there_is_not_tried_here(extension: _Extension) -> None:
    made, _ = _of(lambda _: {"crash": "SIGSEGV", "message": ""})
    with pytest.raises(UnsupportedError, match="crashed on this graph"):
        made.plan("one", PIN)
    assert not extension.built


@pytest.mark.usefixtures("extension")
def test_processes_end_behind_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [_Process(_builds) for _ in range(2)]
    monkeypatch.setattr(builders, "_processes", lambda count: processes[:count])
    with plan_builders(H200, 3, 2) as made:
        made.plan("a graph", PIN)
        assert not any(process.is_closed.is_set() for process in processes)
    assert all(process.is_closed.wait(30) for process in processes)
    # None is asked again, which would start it anew.
    assert made.built_elsewhere("another", PIN) is None
    assert sum(len(process.asked) for process in processes) == 1
