# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans every graph of f8 attention, and refuses what we say."""

from typing import Any

import pytest

from jax_cudnn.graph import to_json
from jax_cudnn.legalize import legalize
from tests.attention.shared.f8_graphs import f8_graph
from tests.common.gpuless import harness

pytestmark = pytest.mark.sampled

_BOTH = ("query_lengths", "key_lengths")
_BASE: dict[str, Any] = {"s": 128, "t": 192, "d": 64, "e": 64}
_CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "e5m2": {"dtype": "f8_e5m2"},
    "to_e5m2": {"result": "f8_e5m2"},
    "causal": {"is_causal": True},
    "causal_more_queries": {"is_causal": True, "s": 300, "t": 200},
    "window": {"window": (31, 15)},
    "window_causal": {"window": (31, 0), "is_causal": True},
    "lengths": {"lengths": _BOTH},
    "lengths_causal": {"lengths": ("key_lengths",), "is_causal": True},
    "odd": {"s": 77, "t": 129, "d": 20, "e": 36},
    "one_query": {"s": 1},
    "one_query_lengths": {"s": 1, "lengths": ("key_lengths",)},
    "one_key": {"t": 1},
    "multi_query": {"h": 8, "k": 1},
    "heads_first": {"order": (0, 1, 2, 3)},
    "tokens_first": {"order": (2, 0, 1, 3)},
    "output_alone": {"with_stats": False, "with_amax": False},
    "head_16": {"d": 16, "e": 16},
    "head_128": {"d": 128, "e": 128},
    "head_192_128": {"d": 192, "e": 128},
}
_HOPPER_ONLY = {
    "head_256": {"d": 256, "e": 256},
    "head_64_256": {"d": 64, "e": 256},
}
_BLACKWELL_ONLY = {
    "to_bf16": {"result": "bf16"},
    "to_f16": {"result": "f16"},
}
_ALL = {**_CASES, **_HOPPER_ONLY, **_BLACKWELL_ONLY}


@pytest.mark.parametrize(
    "gpu", ["h200", pytest.param("b200", marks=pytest.mark.thorough)]
)
def test_what_is_emitted_is_planned_and_built(gpu: str) -> None:
    more = _HOPPER_ONLY if gpu == "h200" else _BLACKWELL_ONLY
    target = harness.target(gpu)
    cases = {**_CASES, **more}
    texts = [
        to_json(legalize(f8_graph(**{**_BASE, **case}), target).candidates[0].graph)
        for case in cases.values()
    ]
    for name, answer in zip(cases, harness.plan_all(texts, gpu), strict=True):
        assert "candidates" in answer, (name, answer)
        assert sum(each["is_built"] for each in answer["candidates"]) == 1, name


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_what_is_refused_has_no_plan(gpu: str) -> None:
    """The refusals of limits that have a graph; cuDNN is asked for what we wrote."""
    target = harness.target(gpu)
    refused = {
        name: graph
        for name, case in _ALL.items()
        if not legalize(graph := f8_graph(**{**_BASE, **case}), target).candidates
    }
    expected = {
        "a100": set(_ALL),
        "h200": set(_BLACKWELL_ONLY),
        "b200": set(_HOPPER_ONLY),
    }
    assert set(refused) == expected[gpu]
    texts = [to_json(graph) for graph in refused.values()]
    for name, answer in zip(
        refused, harness.plan_all(texts, gpu, build=False), strict=True
    ):
        assert answer.get("error") == "UnsupportedError", (name, answer)
        assert answer["reasons"]


def test_a_single_query_has_no_plan_on_hopper_as_it_is() -> None:
    """When this fails, legalize/attention/f8.py need not repeat it."""
    graph = to_json(f8_graph(**{**_BASE, "s": 1}))
    (answer,) = harness.plan_all([graph], "h200", build=False)
    assert answer["error"] == "UnsupportedError"
