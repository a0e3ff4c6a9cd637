# SPDX-License-Identifier: Apache-2.0
"""Tests that a program for a named GPU is pinned to that GPU's plans."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import offline, plans
from jax_cudnn.graph import to_json
from jax_cudnn.plans import PlanOptions
from tests.attention.shared.oracle import SIZES, attention_graph, backward_graph

pytestmark = pytest.mark.sampled

_X = jax.ShapeDtypeStruct((2, 129, 4, 64), jnp.bfloat16)


def _loss(x: jax.Array) -> jax.Array:
    return jnp.sum(jax_cudnn.sdpa(x, x, x, is_causal=True).astype(jnp.float32))


def _launches(text: str) -> list[tuple[str, str, int]]:
    """Return target, request and workspace of each call in a program's text."""
    found = re.findall(
        r'custom_call @(jax_cudnn\.\w+)\(.*?request = "([^"]*)".*?(?:x|<)(\d+)xui8>\)',
        text,
    )
    return [
        (target, request.replace(r"\22", '"'), int(size))
        for target, request, size in found
    ]


def _lower(device: str) -> str:
    with plans.using(device=device):
        traced = jax.jit(jax.grad(_loss)).trace(_X)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_gradient_has_the_plans_that_inspect_names() -> None:
    with plans.using(device="H200"):
        calls = plans.inspect(jax.grad(_loss), _X).calls
    launches = _launches(_lower("H200"))
    assert [target for target, _, _ in launches] == ["jax_cudnn.graph"] * 2
    assert [size for _, _, size in launches] == [c.workspace_bytes for c in calls]
    for (_, request, _), call in zip(launches, calls, strict=True):
        assert call.plan is not None
        assert call.plan.startswith(f"eng{json.loads(request)['engine']}_")


def test_each_gpu_has_its_own_program() -> None:
    texts = {device: _lower(device) for device in ("H200", "A100", "B200")}
    assert len(set(texts.values())) == 3
    engines = {
        device: [json.loads(request)["engine"] for _, request, _ in _launches(text)]
        for device, text in texts.items()
    }
    assert engines["H200"] != engines["A100"]
    cudnn = offline.planner.greeting()["cudnn_version"]
    for device, text in texts.items():
        assert re.findall(r"cudnn_version = (\d+)", text) == [str(cudnn)] * 2
        sm_version = str(offline.find(device).sm_version)
        assert re.findall(r"sm_version = (\d+)", text) == [sm_version] * 2
    assert _lower("nvidia h200") == texts["H200"]


def test_a_pinned_plan_keeps_to_what_a_call_allows() -> None:
    with plans.using(PlanOptions(deterministic=True), device="H200"):
        traced = jax.jit(jax.grad(_loss)).trace(_X)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    requests = [json.loads(request) for _, request, _ in _launches(text)]
    assert len(requests) == 2
    assert all(request["deterministic"] is True for request in requests)
    assert [size for *_, size in _launches(text)] != [
        size for *_, size in _launches(_lower("H200"))
    ]


def test_a_program_is_exported_and_read_back() -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    with plans.using(device="H200"):
        exported = jax.export.export(
            jax.jit(jax.grad(_loss)),
            platforms=["cuda"],
            disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
        )(_X)
    read = jax.export.deserialize(exported.serialize())
    assert read.platforms == ("cuda",)
    assert _launches(read.mlir_module()) == _launches(_lower("H200"))


def test_this_machine_runs_the_reference_meanwhile() -> None:
    x = jnp.asarray(
        np.asarray(np.random.default_rng(0).normal(size=_X.shape), _X.dtype)
    )
    plain = jax.jit(jax.grad(_loss))(x)
    with plans.using(device="H200", implementation="cudnn"):
        there = jax.jit(jax.grad(_loss))(x)
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(there))


def test_the_order_of_the_gpus_does_not_matter() -> None:
    forward = attention_graph(
        sizes={**SIZES, "d": 40, "e": 24}, dtype="f16", with_stats=True
    )
    text = to_json(backward_graph(forward))
    names = [gpu.name for gpu in offline.known() if gpu.sm_version >= 80]

    def answers(order: list[str]) -> dict[str, Any]:
        offline.planner._ask.cache_clear()
        return {name: offline.named_gpu(name).candidates(text) for name in order}

    assert answers(names) == answers(names[::-1])


@pytest.mark.parametrize("gpu", offline.known(), ids=lambda gpu: gpu.short_name)
def test_cudnn_takes_every_description(gpu: offline.GpuDescription) -> None:
    function = jax.jit(_loss)
    with plans.using(device=gpu.name):
        (call,) = plans.inspect(function, _X).calls
    if gpu.sm_version < 80:
        assert call.implementation == "xla"
    else:
        assert call.implementation == "cudnn"
        assert call.plan is not None
