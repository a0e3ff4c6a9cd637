# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans the graphs of conv and matmul, and refuses what we say.

The pinned wheel (nvidia-cudnn-jit) has the engines that cuDNN compiles at run time. The
full cuDNN also has precompiled engines, for plain convolutions (with groups, depthwise)
and a few fusions. So it may take more than these tests say. docs/support.md shows the
same verdicts as a table.
"""

from collections.abc import Callable

import jax.numpy as jnp
import pytest

from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.policy import ranked
from tests.common.gpuless import harness
from tests.common.gpuless.harness import target
from tests.products.gpuless.verdicts import Verdict, verdicts
from tests.products.shared import fusion_cases
from tests.products.shared.conv_graphs import conv_graph
from tests.products.shared.grouped_layers import GroupedLayer
from tests.tools.script import load_script

# One process asks cuDNN about every part, and remembers the answers.
pytestmark = [pytest.mark.sampled, pytest.mark.xdist_group("verdicts")]

_GPUS = ("a100", "h200", "b200")

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


# --- what the documentation says ------------------------------------------------------


@pytest.mark.thorough
def test_the_page_of_what_is_supported_is_current() -> None:
    table = load_script("support_table")
    text = table.FILE.read_text(encoding="utf-8")
    assert text == table.page(), "run python -m scripts.support_table"


def _sums_in_16_bits(graph: Graph) -> bool:
    """Whether a product is summed over the batch from 16 bits: two kernels."""
    kinds = {node.kind for node in graph.nodes}
    narrow = {t.dtype for t in graph.input_tensors} & {"bf16", "f16"}
    return {"matmul", "reduction"} <= kinds and bool(narrow)


def _is_unfused(graph: Graph, sm_version: int) -> bool:
    """Depthwise convolutions, which are faster so, and sums over a batch."""
    del sm_version
    if fusion_cases.contraction(graph).kind == "conv_fprop" and len(graph.nodes) > 1:
        groups, channels, _ = fusion_cases.channels(graph)
        return groups > 1 and channels == 1
    return _sums_in_16_bits(graph)


def _is_second_choice(graph: Graph, sm_version: int) -> bool:
    """Sums over a batch, and some gradients of filters in groups.

    Without its precompiled engines, cuDNN takes few of these but with merged groups.
    These come first in 16 bits, but for depthwise convolutions along two axes.
    """
    if fusion_cases.contraction(graph).kind == "conv_wgrad":
        groups, channels, outputs = fusion_cases.channels(graph)
        x = graph.input_tensors[0]
        has_own = channels == outputs == 1 and len(x.dims) == 4
        comes_as_it_is = has_own or x.dtype == "f32"
        is_taken = sm_version >= 90 and fusion_cases.loads_whole(graph)
        return groups > 1 and comes_as_it_is and not is_taken
    return _sums_in_16_bits(graph)


# --- what cuDNN says ------------------------------------------------------------------


def _is_planned_unfused(verdict: Verdict) -> bool:
    rewrite, graph = verdict.found, verdict.part.graph
    return rewrite is not None and len(rewrite.graph.nodes) < len(graph.nodes)


def _is_planned_later(verdict: Verdict) -> bool:
    return verdict.found is not None and verdict.found is not verdict.candidates[0]


_CLAIMS: dict[str, tuple[Callable[[Verdict], bool], Callable[[Graph, int], bool]]] = {
    "refused": (lambda verdict: verdict.found is None, fusion_cases.is_refused),
    "unfused": (_is_planned_unfused, _is_unfused),
    "second choice": (_is_planned_later, _is_second_choice),
}


@pytest.mark.parametrize("gpu", _GPUS)
def test_every_part_is_planned_or_refused_as_documented(gpu: str) -> None:
    # One test for all claims: each process that asks cuDNN takes a while.
    every = verdicts(gpu)
    assert len({verdict.key for verdict in every}) == len(every)
    assert not [v.key for v in every if any("crash" in a for a in v.answers)]
    sm_version = target(gpu).sm_version
    contractions = [verdict for verdict in every if verdict.has_contraction]
    for claim, (is_found, is_said) in _CLAIMS.items():
        found = {v.key for v in contractions if is_found(v)}
        said = {v.key for v in contractions if is_said(v.part.graph, sm_version)}
        assert found == said, claim
    for verdict in every:
        if not verdict.has_contraction and verdict.candidates:
            assert (verdict.found is None) == _is_one_channel(verdict), verdict.key
        _check_reasons(verdict)


def _is_one_channel(verdict: Verdict) -> bool:
    """Whether a part without a contraction has one channel: cuDNN sums none such."""
    tensors = verdict.candidates[0].graph.tensors
    return max((t.dims for t in tensors), key=sum)[1] == 1


def _check_reasons(verdict: Verdict) -> None:
    assert verdict.reasons or verdict.candidates, verdict.key
    for answer in verdict.answers:
        if "candidates" not in answer:
            assert answer["error"] == "UnsupportedError", verdict.key
            assert answer["reasons"], verdict.key


@pytest.mark.parametrize("gpu", _GPUS)
def test_plans_of_every_sort_build(gpu: str) -> None:
    chosen = verdicts(gpu, _BUILT)
    assert {verdict.key for verdict in chosen} == {*_BUILT}
    rewrite = [verdict.found for verdict in chosen]
    texts = [to_json(each.graph) for each in rewrite if each is not None]
    assert len(texts) == len(_BUILT)
    for verdict, answer in zip(chosen, harness.plan_all(texts, gpu), strict=True):
        built = [c for c in answer["candidates"] if c["is_built"]]
        assert len(built) == 1, verdict.key
        assert built[0]["workspace_bytes"] >= 0


def test_a_turing_gpu_is_refused_before_cudnn_is_asked() -> None:
    for case in fusion_cases.ALL[::29]:
        for part in fusion_cases.parts(case):
            if part.step != "around":
                legalization = legalize(part.graph, target("t4"))
                assert not legalization.candidates
                assert "need sm_80 (Ampere) or newer" in legalization.reasons[0]


# --- one kernel, or several -----------------------------------------------------------


@pytest.mark.parametrize("gpu", _GPUS)
@pytest.mark.parametrize("sizes", [(28, 28), (70,)])
def test_depthwise_convolutions_have_a_kernel_with_what_follows(
    gpu: str, sizes: tuple[int, ...]
) -> None:
    layer = GroupedLayer(sizes, (3,) * len(sizes), groups=64, activation="silu")
    *_, last = [
        way.rewrite for way in ranked(layer.parts(jnp.bfloat16)["conv_fprop"], None)
    ]
    assert len(last.graph.nodes) > 1
    assert not harness.unplanned({"kept": to_json(last.graph)}, gpu)


@pytest.mark.parametrize("gpu", _GPUS)
def test_a_filter_s_gradient_of_a_relu_is_planned_without_it(gpu: str) -> None:
    graph = conv_graph("conv_wgrad", "bf16", axes=2, size=16, prologue="relu")
    ways = [way.rewrite for way in ranked(graph, target(gpu))]
    assert all(len(way.graph.nodes) == 1 for way in ways) == (gpu == "b200")
    alone = [way for way in ways if len(way.graph.nodes) == 1]
    assert not harness.unplanned({"alone": to_json(alone[0].graph)}, gpu)
