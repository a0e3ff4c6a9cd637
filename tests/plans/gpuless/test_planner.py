# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans attention for GPUs that are not present, or says why not."""

import functools
import json
from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest

from jax_cudnn.graph import to_json
from jax_cudnn.policy import ranked
from tests.attention.shared.oracle import SIZES, attention_graph, backward_graph
from tests.common.gpuless import harness
from tests.products.shared.grouped_layers import GroupedLayer

_SIZES = {**SIZES, "d": 64, "e": 64, "s": 65, "t": 129}
_FORWARD = attention_graph(sizes=_SIZES, dtype="bf16", with_stats=True)
_GRAPHS = {"forward": to_json(_FORWARD), "backward": to_json(backward_graph(_FORWARD))}


@functools.cache
def _answers(gpu: str) -> dict[str, dict[str, Any]]:
    answers = harness.plan_all(list(_GRAPHS.values()), gpu)
    return dict(zip(_GRAPHS, answers, strict=True))


@pytest.mark.parametrize("direction", _GRAPHS)
@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_attention_in_bf16_plans_and_builds(gpu: str, direction: str) -> None:
    answer = _answers(gpu)[direction]
    assert "candidates" in answer, answer
    built = [c for c in answer["candidates"] if c["is_built"]]
    assert len(built) == 1, "builds stop at the first success"
    assert built[0]["failure"] == ""
    assert built[0]["build_ms"] > 0
    # The gradient of the query is summed in workspace, whatever the GPU.
    assert (built[0]["workspace_bytes"] > 0) or direction == "forward"


@pytest.mark.parametrize("direction", _GRAPHS)
def test_a_turing_gpu_is_refused_with_the_reason(direction: str) -> None:
    answer = _answers("t4")[direction]
    assert answer["error"] == "UnsupportedError"
    version = harness.CUDNN
    text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    assert answer["message"].startswith(
        f"cuDNN {text} has no plan for this graph on sm_75.\n  - "
    )
    assert any("Ampere" in reason for reason in answer["reasons"]), answer["reasons"]


def test_a_choice_pins_the_engine_that_it_was_read_from() -> None:
    graph = _GRAPHS["forward"]
    listed = harness.plan_all([graph], "h200", build=False)[0]["candidates"]
    assert len(listed) > 1
    last = listed[-1]
    assert json.loads(last["request"]) == {
        "engine": last["engine"],
        "knobs": dict(last["knobs"]),
        "variant": last["variant"],
    }
    (answer,) = harness.plan_all(
        [graph], "h200", build=False, requests=[last["request"]]
    )
    (pinned,) = answer["candidates"]
    assert pinned["name"] == last["name"]
    assert pinned["request"] == last["request"]


def test_a_place_among_those_of_an_engine_pins_as_well() -> None:
    layer = GroupedLayer((28, 28), (3, 3), groups=1, width=64, each=64)
    part = layer.parts(jnp.bfloat16)["conv_fprop"]
    graph = to_json(ranked(part, None)[0].rewrite.graph)
    listed = harness.plan_all([graph], "h200", build=False)[0]["candidates"]
    counts = Counter(each["engine"] for each in listed)
    ((engine, count),) = counts.most_common(1)
    assert count > 1
    same = [each for each in listed if each["engine"] == engine]
    requests = [
        f'{{"engine":{engine},"nth":{i},"variant":0}}' for i in range(count + 1)
    ]
    answers = harness.plan_all([graph] * len(requests), "h200", requests=requests)
    for wanted, answer in zip(same, answers[:-1], strict=True):
        (built,) = answer["candidates"]
        assert built["is_built"]
        assert (built["name"], built["request"]) == (wanted["name"], wanted["request"])
    assert answers[-1]["error"] == "UnsupportedError"
    assert answers[-1]["reasons"] == [
        f"engine {engine} has {count} candidates, and nth, which counts from 0, is "
        f"{count}"
    ]


def test_a_choice_that_cannot_be_followed_is_refused() -> None:
    unknown_engine = '{"engine":12345,"knobs":{},"variant":0}'
    expected = {
        "{": ("GraphError", "request: not JSON"),
        "[]": ("GraphError", "request: expected an object, got a list"),
        '{"engine":1,"knobs":{}}': ("GraphError", "request.variant: missing field"),
        '{"engine":1,"knobs":{"SIZE":1},"variant":0}': (
            "GraphError",
            "request.knobs.SIZE: unknown knob",
        ),
        '{"engine":1,"nth":-1,"variant":0}': (
            "GraphError",
            "request.nth: -1 is negative",
        ),
        '{"engine":1,"knobs":{},"nth":0,"variant":0}': (
            "GraphError",
            "request.knobs: unknown field",
        ),
        '{"engine":1.5,"knobs":{},"variant":0}': (
            "GraphError",
            "request.engine: expected an integer, got a number",
        ),
        '{"engine":1,"knobs":{},"variant":2}': (
            "GraphError",
            "request.variant: 2 is not one of the graph's 2",
        ),
        unknown_engine: ("UnsupportedError", f"with the request {unknown_engine}."),
    }
    graphs = [_GRAPHS["forward"]] * len(expected)
    answers = harness.plan_all(graphs, "h200", requests=list(expected))
    for answer, (error, message) in zip(answers, expected.values(), strict=True):
        assert answer["error"] == error
        assert message in answer["message"]


def test_what_python_rewrites_is_refused_by_name() -> None:
    graphs = [
        attention_graph(dtype="bf16", mask="11st"),
        attention_graph(dtype="bf16", lengths=("key_lengths",)),
        attention_graph(sizes={**SIZES, "s": 0}, dtype="bf16"),
    ]
    answers = harness.plan_all([to_json(graph) for graph in graphs], "h200")
    assert [answer["error"] for answer in answers] == ["UnsupportedError"] * 3
    mask, lengths, empty = (answer["message"] for answer in answers)
    assert "sdpa: cuDNN has no mask operand" in mask
    assert "takes query_lengths and key_lengths together" in lengths
    assert "'output' with dims [2, 6, 0, 13] has no elements" in empty
