# SPDX-License-Identifier: Apache-2.0
"""Plans many graphs for GPUs that are not present, with jax_cudnn.offline."""

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_cudnn import offline
from jax_cudnn.graph import Target
from jax_cudnn.offline import planner, worker
from jax_cudnn.offline.process import PlanningProcess

# That of the pinned wheel, in pyproject.toml.
CUDNN = 92700
_PLAN_FILES = Path(__file__).parent / "plan_file_worker.py"


@functools.cache
def missing() -> str | None:
    """Return what keeps these tests from running here, or None."""
    if reason := offline.obstacle():
        return reason
    if planner.greeting()["driver"] == worker.DRIVER:
        return "a real libcuda.so.1 exists: these tests are for machines without one"
    return None


def plan_all(
    graphs: Sequence[str],
    gpu: str,
    *,
    build: bool = True,
    requests: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Plan every graph for a GPU by its name; one answer per graph, in order.

    An answer has "candidates", a list of the fields of ``native.Candidate``, or
    "error", "message" and "reasons" of what was raised, or "crash", the signal that
    ended the planning process at that graph. ``requests`` has one request per graph, or
    none at all.
    """
    _require()
    description = offline.find(gpu)
    return [
        planner.ask(graph, description, request, build=build)
        for graph, request in _pairs(graphs, requests)
    ]


def unplanned(graphs: Mapping[str, str], gpu: str) -> list[str]:
    """Return the labels of the graphs of which cuDNN lists no plan for a GPU."""
    unique = list(dict.fromkeys(graphs.values()))
    answers = dict(zip(unique, plan_all(unique, gpu, build=False), strict=True))
    return [
        label for label, text in graphs.items() if not answers[text].get("candidates")
    ]


def ship_all(
    graphs: Sequence[str], gpu: str, *, requests: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Put the plan of every graph through a plan file; one answer per graph.

    An answer has "graph", "request" and "plan" as read from the file, its "bytes",
    "export_s" and "import_s", the seconds for building and writing it and for reading
    it, the versions of its "libraries", and "refusals", what was said to it where it
    does not belong or is damaged.
    """
    _require()
    process = PlanningProcess((sys.executable, "-P", str(_PLAN_FILES)))
    try:
        return [
            process.ask(planner.question(graph, offline.find(gpu), request, build=True))
            for graph, request in _pairs(graphs, requests)
        ]
    finally:
        process.close()


def build_file(graph: str, gpu: str, file: Path) -> tuple[dict[str, Any], ...]:
    """Have a process write a plan to a file, and another one read it; their answers."""
    _require()
    question = planner.question(graph, offline.find(gpu), "", build=True)
    answers: list[dict[str, Any]] = []
    reading = (sys.executable, "-P", str(_PLAN_FILES))
    for process in (PlanningProcess(), PlanningProcess(reading)):
        try:
            answers.append(process.ask({**question, "file": str(file)}))
        finally:
            process.close()
    return tuple(answers)


def _require() -> None:
    if reason := missing():
        raise RuntimeError(f"cannot plan without a GPU here: {reason}")


def _pairs(graphs: Sequence[str], requests: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(graphs, requests or [""] * len(graphs), strict=True))


def target(gpu: str) -> Target:
    """Return the GPU of a name, with the cuDNN that the tests plan with."""
    return offline.find(gpu).target(CUDNN)
