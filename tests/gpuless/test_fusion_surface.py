# SPDX-License-Identifier: Apache-2.0
"""Does the real cuDNN plan the graphs of conv and matmul, and refuse what we say?

The pinned wheel (nvidia-cudnn-jit) has the engines that cuDNN compiles at run time. The
full cuDNN has precompiled ones besides, for plain convolutions (with groups, depthwise)
and a few fusions, so that it may take more than is said here. docs/support.md
shows the same verdicts as a table.
"""

from collections.abc import Callable

import pytest

from jax_cudnn.graph import Graph, Node, to_json
from jax_cudnn.legalize import is_contraction, legalize
from tests import fusion_cases
from tests.gpuless import harness
from tests.gpuless.verdicts import Verdict, target, verdicts

_GPUS = ("a100", "h200", "b200")
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f8_e4m3fn": 1, "f8_e5m2": 1, "i8": 1, "u8": 1}

# Parts that differ in what the kernel has to do; these are built, not only planned.
_BUILT = (
    "conv/a traced function/f16/training",
    "conv/gelu_exact/f32/forward",
    "conv/scale, bias, residual, gelu/bf16/around",
    "conv/scale, bias, residual, gelu/bf16/training",
    "conv, bias, gelu/3-D/bf16/forward",
    "conv, bias, gelu/7 channels in, 5 out/bf16/grad_w",
    "conv, bias, gelu/depthwise/f32/forward",
    "conv, bias, gelu/stride/f16/grad_x",
    "conv of 8 bits/scale, bias, relu, result in bf16/i8/forward",
    "transposed conv/bias/bf16/forward",
    "matmul/scale, bias, residual, gelu/f16/training",
    "matmul, bias, gelu/b transposed, sums of 59, 61 columns/bf16/grad_b",
    "matmul, bias, gelu/one a for a batch of b/f32/grad_a",
    "matmul, weights of 8 bits/i8, scale along the sum/bf16/forward",
)


def test_cases_have_names_of_their_own() -> None:
    names = [case.name for case in fusion_cases.ALL]
    assert len(names) == len(set(names))
    keys = [verdict.key for verdict in verdicts("h200")]
    assert len(keys) == len(set(keys))


# --- what the documentation says ------------------------------------------------------


def _contraction(graph: Graph) -> Node:
    (node,) = filter(is_contraction, graph.nodes)
    return node


def _channels(graph: Graph) -> tuple[int, int, int]:
    """Return groups, and channels in and out of each, of fprop or wgrad."""
    node = _contraction(graph)
    names = dict((*node.inputs, *node.outputs))
    x = graph.tensor(names["x"])
    w = graph.tensor(names["w" if node.kind == "conv_fprop" else "grad_w"])
    groups = x.dims[1] // w.dims[1]
    return groups, w.dims[1], w.dims[0] // groups


def _loads_whole(graph: Graph, unit_bytes: int) -> bool:
    """Whether channels of one pixel and group fill units of that many bytes."""
    name = dict(_contraction(graph).inputs)["x"]
    size = _BYTES[graph.tensor(name).dtype]
    return not any(count * size % unit_bytes for count in _channels(graph)[1:])


def _is_refused(graph: Graph, sm_version: int) -> bool:
    """f8 on Ampere, products of u8, and gradients of filters in small groups."""
    node = _contraction(graph)
    dtypes = {t.dtype for t in graph.tensors}
    if sm_version < 89 and dtypes & {"f8_e4m3fn", "f8_e5m2"}:
        return True
    if {graph.tensor(name).dtype for _, name in node.inputs} == {"u8"}:
        return True
    if node.kind == "conv_wgrad" and _channels(graph)[0] > 1:
        return sm_version < 90 or not _loads_whole(graph, 16)
    return False


def _sums_in_16_bits(graph: Graph) -> bool:
    """Whether a product is summed over the batch from 16 bits: two kernels."""
    kinds = {node.kind for node in graph.nodes}
    narrow = {t.dtype for t in graph.input_tensors} & {"bf16", "f16"}
    return {"matmul", "reduction"} <= kinds and bool(narrow)


def _is_unfused(graph: Graph, sm_version: int) -> bool:
    """Grouped convolutions, which are faster so, and sums over a batch."""
    del sm_version
    if _contraction(graph).kind == "conv_fprop" and _channels(graph)[0] > 1:
        return len(graph.nodes) > 1
    return _sums_in_16_bits(graph)


def _is_second_choice(graph: Graph, sm_version: int) -> bool:
    """Gradients of filters with odd channels, which are padded; sums over a batch."""
    del sm_version
    if _contraction(graph).kind == "conv_wgrad" and _channels(graph)[0] == 1:
        return not _loads_whole(graph, 4)
    return _sums_in_16_bits(graph)


# --- what cuDNN says ------------------------------------------------------------------


def _contractions(profile: str) -> list[Verdict]:
    return [verdict for verdict in verdicts(profile) if verdict.has_contraction]


def _said(profile: str, claim: Callable[[Graph, int], bool]) -> set[str]:
    sm_version = target(profile).sm_version
    return {
        verdict.key
        for verdict in _contractions(profile)
        if claim(verdict.part.graph, sm_version)
    }


@pytest.mark.parametrize("profile", _GPUS)
def test_every_contraction_is_planned_or_refused_as_documented(profile: str) -> None:
    every = verdicts(profile)
    assert not [v.key for v in every if any("crash" in a for a in v.answers)]
    refused = {v.key for v in _contractions(profile) if v.found is None}
    assert refused == _said(profile, _is_refused)


@pytest.mark.parametrize("profile", _GPUS)
def test_all_but_what_is_documented_is_fused(profile: str) -> None:
    unfused = {
        v.key
        for v in _contractions(profile)
        if v.found is not None and len(v.found.graph.nodes) < len(v.part.graph.nodes)
    }
    assert unfused == _said(profile, _is_unfused)


@pytest.mark.parametrize("profile", _GPUS)
def test_the_first_candidate_is_planned_but_where_documented(profile: str) -> None:
    later = {
        v.key
        for v in _contractions(profile)
        if v.found is not None and v.found is not v.candidates[0]
    }
    assert later == _said(profile, _is_second_choice)


@pytest.mark.parametrize("profile", _GPUS)
def test_sums_without_a_contraction_are_planned_for_more_than_one_channel(
    profile: str,
) -> None:
    for verdict in verdicts(profile):
        if not verdict.has_contraction and verdict.candidates:
            (sums,) = verdict.candidates
            full = max((t.dims for t in sums.graph.tensors), key=sum)
            assert (verdict.found is None) == (full[1] == 1), verdict.key


@pytest.mark.parametrize("profile", _GPUS)
def test_refusals_carry_reasons(profile: str) -> None:
    for verdict in verdicts(profile):
        assert verdict.reasons or verdict.candidates, verdict.key
        for answer in verdict.answers:
            if "candidates" not in answer:
                assert answer["error"] == "UnsupportedError"
                assert answer["reasons"], verdict.key


@pytest.mark.parametrize("profile", _GPUS)
def test_plans_of_every_sort_build(profile: str) -> None:
    found = {v.key: v.found for v in verdicts(profile)}
    chosen = [legal for key in _BUILT if (legal := found[key]) is not None]
    assert len(chosen) == len(_BUILT)
    texts = [to_json(legal.graph) for legal in chosen]
    for key, answer in zip(_BUILT, harness.plan_all(texts, profile), strict=True):
        built = [c for c in answer["candidates"] if c["is_built"]]
        assert len(built) == 1, key
        assert built[0]["workspace_bytes"] >= 0


def test_a_turing_gpu_is_refused_before_cudnn_is_asked() -> None:
    for case in fusion_cases.ALL[::29]:
        for part in fusion_cases.parts(case):
            if part.step != "around":
                legalization = legalize(part.graph, target("t4"))
                assert not legalization.candidates
                assert "need sm_80 (Ampere) or newer" in legalization.reasons[0]
