# SPDX-License-Identifier: Apache-2.0
"""Tests that each candidate is timed or its failure told, without a GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, matmul, native
from jax_cudnn.graph import Graph, from_json
from jax_cudnn.legalize import Legalization, Rewrite
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.native import Candidate, PlanInfo
from jax_cudnn.policy import ranking
from jax_cudnn.tuning import candidate_times
from jax_cudnn.tuning.candidate_times import time_candidates
from jax_cudnn.tuning.stopwatch import Measurement
from tests.common.drawn_operands import draw_arrays
from tests.common.planner import H200, PIN, made_plan

_OTHER = PIN.replace("4", "5")
_LISTED = (
    made_plan(PIN),
    replace(made_plan(PIN), name="unnamed", request=""),
    made_plan(_OTHER),
    replace(made_plan(PIN), refusal="has a note that is refused"),
)


class _Stopwatch:
    """Stands for the clock: the time of a plan is ten times its engine's number."""

    def __init__(self, graph: Graph, sets: Any, device: Any):
        assert device.local_hardware_id == 3
        shapes = [tensor.stored_shape for tensor in graph.input_tensors]
        # What the graph takes, which is not what the part takes: r is padded.
        assert [[x.shape for x in operands] for operands in sets] == [shapes]

    def time(self, plan: PlanInfo, *, samples: int) -> Measurement:
        assert samples > 1
        return Measurement.of([10.0 * plan.engine])


def _part() -> Graph:
    x = jax.ShapeDtypeStruct((8, 5), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((5, 16), jnp.bfloat16)
    ((graph, _, _),) = traced_graphs(matmul, x, w)
    return graph


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Time as on an H200; returns the graphs whose candidates were listed."""
    asked: list[Graph] = []

    def candidates(text: str, *, device: int) -> tuple[Candidate, ...]:
        assert device == 3
        asked.append(from_json(text))
        return _LISTED

    def plan(text: str, *, request: str, device: int) -> PlanInfo:
        assert device == 3
        if request == _OTHER:
            raise UnsupportedError("does not build", ["too much shared memory"])
        return made_plan(request)

    device = SimpleNamespace(local_hardware_id=3)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    monkeypatch.setattr(native, "candidates", candidates)
    monkeypatch.setattr(native, "plan", plan)
    monkeypatch.setattr(candidate_times, "PlanStopwatch", _Stopwatch)
    monkeypatch.setattr(candidate_times, "draw_sets", _draw_sets)
    return asked


def _draw_sets(graph: Graph, device: Any) -> list[list[jax.Array]]:
    assert device.local_hardware_id == 3
    return [draw_arrays(graph)]


def test_every_candidate_is_timed_or_says_why_not(graphs: list[Graph]) -> None:
    first, second, third, fourth = time_candidates(_part(), H200)
    assert len(graphs) == 1
    assert first.time == Measurement(median_us=40.0, low_us=40.0, high_us=40.0)
    assert (first.candidate, first.failure) == (made_plan(PIN), "")
    assert (second.candidate.name, second.time) == ("unnamed", None)
    assert second.failure == "this version of cudnn-frontend cannot name it"
    assert third.time is None
    assert third.failure == "does not build\n  - too much shared memory"
    assert (fourth.time, fourth.failure) == (None, "has a note that is refused")


def test_the_graph_is_the_first_rewriting_that_cudnn_takes(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = _part()
    refused = UnsupportedError("no candidate")
    answers = iter([refused, _LISTED[:1]])

    def candidates(text: str, *, device: int) -> tuple[Candidate, ...]:
        graphs.append(from_json(text))
        answer = next(answers)
        if isinstance(answer, UnsupportedError):
            raise answer
        return answer

    monkeypatch.setattr(native, "candidates", candidates)
    rewrite = Rewrite(graph=part, before=tuple, after=lambda _, results: tuple(results))
    several = Legalization(candidates=(rewrite, rewrite))
    monkeypatch.setattr(ranking, "legalize", lambda part, target: several)
    (timed,) = time_candidates(part, H200)
    assert timed.time is not None
    assert len(graphs) == 2
    none = Legalization()
    monkeypatch.setattr(ranking, "legalize", lambda part, target: none)
    assert time_candidates(part, H200) == []
