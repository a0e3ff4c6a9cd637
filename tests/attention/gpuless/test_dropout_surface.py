# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans attention with dropout, drawn by the kernel or as a mask."""

from typing import Any

import pytest

from jax_cudnn import offline
from jax_cudnn.graph import (
    Graph,
    SdpaAttributes,
    Tensor,
    derivative_of,
    sdpa_graph,
    to_json,
)
from jax_cudnn.legalize import legalize
from tests.common.gpuless import harness

pytestmark = pytest.mark.sampled

_GPUS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200")
_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (30, 0)},
    "lengths": {"key_lengths": ("i32", (2, 1, 1, 1))},
    "bias": {"bias": ("bf16", (1, 4, 192, 320))},
}


def _graphs(case: dict[str, Any]) -> list[Graph]:
    """Return a forward graph and its gradient."""
    given: dict[str, tuple[Any, tuple[int, ...]]] = {
        "query": ("bf16", (2, 4, 192, 64)),
        "key": ("bf16", (2, 2, 320, 64)),
        "value": ("bf16", (2, 2, 320, 64)),
        **{role: x for role, x in case.items() if role in ("bias", "key_lengths")},
        "dropout_seed": ("i32", (1, 1, 1, 1)),
        "dropout_offset": ("i32", (2, 4, 1, 1)),
    }
    tensors = {
        role: Tensor(name=role, dtype=dtype, dims=dims, order=(0, 1, 2, 3))
        for role, (dtype, dims) in given.items()
    }
    attributes = SdpaAttributes(
        scale=0.125,
        is_causal=case.get("is_causal", False),
        window=case.get("window", ()),
        dropout=0.25,
        dropout_heads=4,
    )
    graph = sdpa_graph(tensors, attributes=attributes, with_stats=True)
    derivative = derivative_of(graph)
    assert derivative is not None
    wanted = tuple(tensor.dtype == "bf16" for tensor in graph.input_tensors)
    backward = derivative.backward(graph, wanted, (True, False))
    assert backward is not None
    return [graph, backward.graph]


@pytest.mark.parametrize("gpu", _GPUS)
@pytest.mark.parametrize("name", _CASES)
def test_each_way_to_dropout_is_planned(name: str, gpu: str) -> None:
    # For the version that a kernel's numbers were compared with, so both ways.
    target = offline.find(gpu).target(91900)
    ways = [
        [to_json(rewrite.graph) for rewrite in legalize(graph, target).candidates]
        for graph in _graphs(_CASES[name])
    ]
    forms = 2 if "window" in _CASES[name] else 1  # as a band, or part of the mask
    assert len(ways[0]) == forms * (2 if target.sm_version == 90 else 1)
    graphs = [text for each in ways for text in each]
    for text, answer in zip(graphs, harness.plan_all(graphs, gpu), strict=True):
        built = [x for x in answer.get("candidates", []) if x["is_built"]]
        assert built, (text, answer)
