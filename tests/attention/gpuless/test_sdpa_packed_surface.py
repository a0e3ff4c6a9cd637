# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans packed sequences, forward and backward, where we say so."""

import dataclasses
from typing import Any

import pytest

from jax_cudnn.graph import Graph, to_json
from jax_cudnn.graph.attention.sdpa import SDPA
from jax_cudnn.legalize import legalize
from tests.attention.shared.packed import Rows, graph_of
from tests.common.gpuless import harness

_ROWS = Rows(
    queries=[[(0, 9)] * 5] * 2, keys=[[(0, 9)] * 5] * 2, s=300, t=400, d=64, e=64
)
_CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "from_end": {"causal": True, "from_end": True},
    "window": {"window": (20, 3)},
    "odd_heads": {"d": 77, "e": 40, "causal": True},
    "short": {"max_length": (1, 70)},
    "head_128": {"d": 128, "e": 128, "causal": True},
}


def _graphs(rows: Rows) -> list[Graph]:
    forward = graph_of(rows, "bf16")
    assert SDPA.derivative is not None
    wanted = tuple(tensor.dtype != "i32" for tensor in forward.input_tensors)
    has_lse = (False, True) if rows.e < 128 else (False,)
    found = [SDPA.derivative.backward(forward, wanted, (True, x)) for x in has_lse]
    return [forward, *(each.graph for each in found if each is not None)]


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_packed_sequences_have_plans(gpu: str, name: str) -> None:
    rows = dataclasses.replace(_ROWS, **_CASES[name])
    for graph in _graphs(rows):
        first, *_ = legalize(graph, harness.target(gpu)).candidates
        assert "query_offsets" in first.graph.inputs
        is_built = name == "from_end"
        (answer,) = harness.plan_all([to_json(first.graph)], gpu, build=is_built)
        assert answer.get("candidates"), answer


def test_ampere_gets_a_mask() -> None:
    for graph in _graphs(_ROWS):
        (rewrite,) = legalize(graph, harness.target("a100")).candidates
        assert "query_offsets" not in rewrite.graph.inputs
        (answer,) = harness.plan_all([to_json(rewrite.graph)], "a100", build=False)
        assert answer.get("candidates"), answer


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"longest": ()}, "packed sequences need lengths and the longest of them"),
        ({}, "cuDNN takes offsets of sequences in place of starts"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], text: str) -> None:
    graph = graph_of(_ROWS, "bf16")
    if changes:
        graph = legalize(graph, harness.target("h200")).candidates[0].graph
        (node,) = graph.nodes
        attributes: Any = dataclasses.replace(node.attributes, **changes)  # type: ignore[type-var]
        node = dataclasses.replace(node, attributes=attributes)
        graph = dataclasses.replace(graph, nodes=(node,))
    (answer,) = harness.plan_all([to_json(graph)], "h200", build=False)
    assert text in str(answer), answer
