# SPDX-License-Identifier: Apache-2.0
"""Tests the planning process, with programs in cuDNN's place."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_cudnn import LibraryError
from jax_cudnn.offline.process import PlanningProcess

pytestmark = pytest.mark.once

_ROOT = Path(__file__).parents[2]


# Answers with the graph in capitals; some graphs are commands.
_FAKE = """
import json, os, signal, sys, time
count = int(open(sys.argv[1]).read()) + 1
open(sys.argv[1], "w").write(str(count))
print("to be read after a crash", file=sys.stderr, flush=True)
print(json.dumps({"cudnn_version": 91900, "start": count}), flush=True)
for line in sys.stdin:
    graph = json.loads(line)["graph"]
    if graph == "abort":
        os.abort()
    if graph == "exit":
        sys.exit(3)
    if graph == "half":
        print('{"candida', end="", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if graph == "sleep":
        time.sleep(60)
    print(json.dumps({"candidates": graph.upper(), "pid": os.getpid()}), flush=True)
"""


def _start(
    tmp_path: Path, source: str = _FAKE, timeout_s: float = 60
) -> PlanningProcess:
    (tmp_path / "count").write_text("0")
    command = (sys.executable, "-c", source, str(tmp_path / "count"))
    return PlanningProcess(command, timeout_s)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[PlanningProcess]:
    made = _start(tmp_path)
    yield made
    made.close()


def test_one_process_answers_many_requests(process: PlanningProcess) -> None:
    first = process.ask({"graph": "a"})
    assert first["candidates"] == "A"
    assert process.ask({"graph": "b"}) == {**first, "candidates": "B"}
    assert process.greeting() == {"cudnn_version": 91900, "start": 1}


@pytest.mark.parametrize(
    ("graph", "end"),
    [("abort", "SIGABRT"), ("exit", "exit status 3"), ("half", "SIGSEGV")],
)
def test_a_crash_is_the_answer_for_its_graph_alone(
    process: PlanningProcess, graph: str, end: str
) -> None:
    assert process.ask({"graph": "a"})["candidates"] == "A"
    answer = process.ask({"graph": graph})
    assert answer == {"crash": end, "message": "to be read after a crash"}
    assert process.ask({"graph": "b"})["candidates"] == "B"
    assert process.greeting()["start"] == 2


def test_a_graph_that_takes_forever_is_given_up(tmp_path: Path) -> None:
    process = _start(tmp_path, timeout_s=2)
    assert process.ask({"graph": "sleep"})["crash"] == "no answer in 2 s"
    assert process.ask({"graph": "b"})["candidates"] == "B"
    process.close()


def test_an_answer_that_nobody_waited_for_is_nobody_s(
    process: PlanningProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.ask({"graph": "a"})["candidates"] == "A"

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask({"graph": "b"})
    assert process.ask({"graph": "c"})["candidates"] == "C"
    assert process.greeting()["start"] == 2


def test_no_graph_is_blamed_for_a_process_killed_in_between(
    process: PlanningProcess,
) -> None:
    pid = process.ask({"graph": "a"})["pid"]
    os.kill(pid, 9)
    while _is_running(pid):
        pass
    assert process.ask({"graph": "b"})["candidates"] == "B"
    assert process.greeting()["start"] == 2


def _is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"  # its end is not fetched before the next question


def test_closing_ends_the_process_and_asking_starts_it_again(
    process: PlanningProcess,
) -> None:
    pid = process.ask({"graph": "a"})["pid"]
    process.close()
    process.close()
    assert not Path(f"/proc/{pid}").exists()
    assert process.ask({"graph": "b"})["candidates"] == "B"


def test_threads_take_turns(process: PlanningProcess) -> None:
    found: dict[str, str] = {}

    def ask(graph: str) -> None:
        for _ in range(20):
            found[graph] = process.ask({"graph": graph})["candidates"]
            assert found[graph] == graph.upper()

    threads = [threading.Thread(target=ask, args=(f"g{i}",)) for i in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {f"g{i}": f"G{i}" for i in range(7)}
    assert process.greeting()["start"] == 1


def test_what_is_missing_and_what_does_not_start_are_told(tmp_path: Path) -> None:
    missing = 'print(\'{"missing": "no libcudnn.so.9"}\')'
    with pytest.raises(LibraryError, match=r"^no libcudnn.so.9$"):
        _start(tmp_path, missing).greeting()
    broken = 'import sys; sys.exit("the package is torn")'
    with pytest.raises(
        LibraryError, match=r"did not start \(exit status 1\):\nthe package is torn"
    ):
        _start(tmp_path, broken).ask({"graph": "a"})


def test_the_process_ends_with_the_one_that_asks(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.plans.test_offline_process import _start
print(_start(Path({str(tmp_path)!r})).ask({{"graph": "a"}})["pid"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        # The checkout comes last: an installed package goes before its sources.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(_ROOT)]),
        },
    )
    assert not Path(f"/proc/{int(done.stdout)}").exists()
