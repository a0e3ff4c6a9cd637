# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans every graph that sdpa emits, and refuses what we say."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import masks, offline, score_mods, sdpa
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import subprograms
from tests.attention.gpuless.emitted import emitted_graphs, semantic_graphs
from tests.attention.shared.cases import ALL, Case
from tests.attention.shared.oracle import SIZES, attention_graph, backward_graph
from tests.common.gpuless import harness

pytestmark = pytest.mark.sampled

_GPUS = ("a100", "h200", "b200")
# Their operands are large, and their graphs are those of other cases.
_CASES = [c for c in ALL if not c.name.startswith(("large_", "many_"))]
_DIRECTIONS = ("forward", "backward")

# Graphs that differ in what the kernel has to do; these are built, not only planned.
_BUILT = (
    "head_size_1",
    "head_size_77",
    "head_size_128",
    "lengths_1_128_causal",
    "lengths_1009_997_full",
    "heads_7_1",
    "head_sizes_40_24",
    "bias_hst_4_2",
    "bias_f32",
    "mask_bst_dead",
    "both_lengths",
    "residual_groups",
    "f16_64_causal",
)


@functools.cache
def _surface(gpu: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return cuDNN's answer to each candidate of each graph, by case and direction."""
    emitted: dict[tuple[str, str], list[Graph]] = {}
    for case in _CASES:
        graphs = emitted_graphs(case, harness.target(gpu))
        for direction, candidates in zip(_DIRECTIONS, graphs, strict=True):
            emitted[case.name, direction] = candidates
    texts = sorted({to_json(g) for graphs in emitted.values() for g in graphs})
    answers = dict(zip(texts, harness.plan_all(texts, gpu, build=False), strict=True))
    return {
        key: [answers[to_json(graph)] for graph in graphs]
        for key, graphs in emitted.items()
    }


def _is_refused(case: Case, direction: str, gpu: str) -> bool:
    """What the documentation says: only gradients of large heads, by architecture."""
    if direction == "forward" or gpu == "h200":
        return False
    d = -(-case.d // 8) * 8
    e = case.d if case.e is None else case.e
    # The cotangent of the log-sum-exp takes three columns of the values.
    e = -(-(e + 3 * case.with_residual) // 8) * 8
    is_extra = gpu == "b200" and (d, e) in ((192, 128), (256, 256))
    return max(d, e) > 128 and not is_extra


@pytest.mark.parametrize("gpu", _GPUS)
def test_every_emitted_graph_is_planned_or_refused_as_documented(gpu: str) -> None:
    surface = _surface(gpu)
    assert not [key for key, answers in surface.items() if _crashes(answers)]
    refused = {
        key
        for key, answers in surface.items()
        if not any("candidates" in answer for answer in answers)
    }
    assert refused == {
        (case.name, direction)
        for case in _CASES
        for direction in _DIRECTIONS
        if _is_refused(case, direction, gpu)
    }


def _crashes(answers: list[dict[str, Any]]) -> bool:
    return any("crash" in answer for answer in answers)


@pytest.mark.parametrize("gpu", _GPUS)
def test_refusals_carry_cudnns_reasons(gpu: str) -> None:
    for answers in _surface(gpu).values():
        for answer in answers:
            if "candidates" not in answer:
                assert answer["error"] == "UnsupportedError"
                assert answer["reasons"], answer


@pytest.mark.parametrize("gpu", _GPUS)
def test_plans_of_every_sort_build(gpu: str) -> None:
    cases = [case for case in _CASES if case.name in _BUILT]
    assert len(cases) == len(_BUILT)
    texts = [
        to_json(candidates[0])
        for case in cases
        for candidates in emitted_graphs(case, harness.target(gpu))
    ]
    for answer in harness.plan_all(texts, gpu):
        built = [c for c in answer["candidates"] if c["is_built"]]
        assert len(built) == 1
        assert built[0]["workspace_bytes"] >= 0


def test_a_turing_gpu_is_refused_before_cudnn_is_asked() -> None:
    for graph in semantic_graphs(Case(name="turing")):
        legalization = legalize(graph, harness.target("t4"))
        assert not legalization.candidates
        assert "needs sm_80 (Ampere) or newer" in legalization.reasons[0]


_MAXIMUM: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (64, 32)},
    "lengths": {"key_value_seq_lengths": jnp.array([200, 31])},
    "packed": {"mask": masks.Packed(jnp.array([[0, 99, 256]] * 2)), "is_causal": True},
    "mask": {"mask": jnp.ones((2, 1, 256, 256), bool)},
    "bias_and_sinks": {
        "bias": jnp.ones((1, 8, 256, 256), jnp.bfloat16),
        "sinks": jnp.ones(8),
    },
    "softcap": {"score_mod": score_mods.softcap(30.0), "is_causal": True},
    "dropout": {"dropout_rate": 0.125, "dropout_key": jax.random.key(0)},
}


@pytest.mark.parametrize("gpu", _GPUS)
def test_the_maximum_is_planned_beside_all_options(gpu: str) -> None:
    query, key = (jnp.zeros((2, 256, heads, 128), jnp.bfloat16) for heads in (8, 2))
    texts: dict[str, str] = {}
    for name, options in _MAXIMUM.items():
        call = functools.partial(sdpa, return_max_logit=True, **options)
        jaxpr = jax.make_jaxpr(call)(query, key, key).jaxpr
        ((graph, _, _),) = subprograms(jaxpr)
        for target in (harness.target(gpu), offline.find(gpu).target(91900)):
            rewrite, *_ = legalize(graph, target).candidates
            texts[f"{name}, {target.cudnn_version}"] = to_json(rewrite.graph)
    assert not harness.unplanned(texts, gpu)


@pytest.mark.parametrize("gpu", _GPUS)
def test_f32_has_a_forward_plan_and_no_gradient(gpu: str) -> None:
    sizes = {**SIZES, "d": 64, "e": 64}
    forward = attention_graph(dtype="f32", sizes=sizes, with_stats=True)
    graphs = [to_json(forward), to_json(backward_graph(forward))]
    planned, refused = harness.plan_all(graphs, gpu, build=False)
    assert planned["candidates"]
    assert refused["error"] == "UnsupportedError"
