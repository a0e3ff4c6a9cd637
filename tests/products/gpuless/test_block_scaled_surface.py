# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans matmuls in MXFP8 and NVFP4 on Blackwell, and nowhere else."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import f8, plans
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import legalize
from tests.common.gpuless import harness
from tests.products.shared.block_scaled import FORMATS, block_graph

# Rows, columns and blocks: usual, odd, and as few as there may be.
_SIZES = [(8192, 4096, 256), (17, 150, 5), (1, 1, 1)]


def _graphs() -> dict[str, Graph]:
    usual = {
        f"{name} {dtype} {sizes}": block_graph(name, *sizes, dtype=dtype)
        for name in FORMATS
        for dtype in ("bf16", "f16", "f32")
        for sizes in _SIZES
    }
    batches = {
        f"{name} batch, shared {shared}": block_graph(
            name, 256, 128, 8, batch=3, shared=shared
        )
        for name in FORMATS
        for shared in ((), ("a",), ("b",))
    }
    return usual | batches


@pytest.mark.parametrize("gpu", ["b200", "gb200"])
def test_what_is_emitted_is_planned_and_built(gpu: str) -> None:
    target = harness.target(gpu)
    texts = {
        label: to_json(legalize(graph, target).candidates[0].graph)
        for label, graph in _graphs().items()
    }
    if gpu == "gb200":
        assert not harness.unplanned(texts, gpu)
        return
    answers = harness.plan_all(list(texts.values()), gpu)
    for label, answer in zip(texts, answers, strict=True):
        assert "candidates" in answer, (label, answer)
        assert sum(each["is_built"] for each in answer["candidates"]) == 1, label


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_what_is_refused_has_no_plan(gpu: str) -> None:
    graphs = {name: block_graph(name, 256, 128, 8) for name in FORMATS}
    target = harness.target(gpu)
    for graph in graphs.values():
        (reason,) = legalize(graph, target).reasons
        assert f"is sm_{target.sm_version}; matmuls in MXFP8 and NVFP4 need" in reason
    blackwell = harness.target("b200")
    texts = {
        name: to_json(legalize(graph, blackwell).candidates[0].graph)
        for name, graph in graphs.items()
    }
    assert harness.unplanned(texts, gpu) == list(FORMATS)


@pytest.mark.parametrize("recipe", [f8.MXFP8(), f8.NVFP4()], ids=str)
def test_a_layer_with_its_gradients_is_three_products_of_cudnns(recipe: Any) -> None:
    x, w = jnp.zeros((2, 96, 256), jnp.bfloat16), jnp.zeros((256, 384), jnp.bfloat16)

    def loss(x: Any, w: Any) -> Any:
        return f8.dense(x, w, recipe=recipe).astype(jnp.float32).sum()

    gradients = jax.grad(loss, (0, 1))
    text = str(plans.explain(gradients, x, w, device="B200"))
    assert text.count("runs in cuDNN: eng") == 3
    text = str(plans.explain(gradients, x, w, device="H200"))
    assert text.count("runs in XLA, not in cuDNN") == 3
    assert text.count("MXFP8 and NVFP4 need sm_100 (Blackwell) or newer") == 3
