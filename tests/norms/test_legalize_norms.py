# SPDX-License-Identifier: Apache-2.0
"""Tests that legalised norms mean what the graph means and fit cuDNN."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_cudnn.graph import Graph, Target, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.policy import ranked
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate, evaluate_legal
from tests.norms.problems import DIMS, KINDS, OF_ROWS, Problem, backward_of, f8_graph

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_H200 = Target(name="h200", sm_version=90, sm_count=132, cudnn_version=91900)
_T4 = Target(name="t4", sm_version=75, sm_count=40, cudnn_version=91900)


def _check(graph: Graph, seed: int = 0, rtol: float = 2e-5) -> list[Graph]:
    """Compare what each candidate computes, by the reference, with what is meant."""
    operands = draw_arrays(graph, seed)
    expected = evaluate(graph, operands)
    found = legalize(graph, _H200)
    assert found.candidates, found.reasons
    for rewrite in found.candidates:
        results = evaluate_legal(rewrite, operands)
        for tensor, one, two in zip(
            graph.output_tensors, results, expected, strict=True
        ):
            assert one.dtype == two.dtype
            assert one.shape == tensor.stored_shape
            np.testing.assert_allclose(
                np.asarray(one, np.float64),
                np.asarray(two, np.float64),
                rtol=rtol if two.dtype == np.float32 else 2e-2,
                atol=rtol * 10 if two.dtype == np.float32 else 3e-2,
                err_msg=tensor.name,
            )
    return [rewrite.graph for rewrite in found.candidates]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", ["f32", "bf16", None])
@pytest.mark.parametrize("bias", ["f32", "bf16", None])
def test_factors_are_completed(kind: str, scale: str | None, bias: str | None) -> None:
    for dtype, with_statistics in itertools.product(("f32", "bf16"), (False, True)):
        problem = Problem(
            kind=kind,
            dtype=dtype,
            scale=scale,
            bias=bias,
            with_statistics=with_statistics,
        )
        for emitted in _check(problem.graph):
            (node,) = emitted.nodes
            roles = dict(node.inputs)
            assert "scale" in roles
            assert ("bias" in roles) or node.kind == "rms_norm"
            factors = {emitted.tensor(roles[r]).dtype for r in roles if r != "x"}
            assert len(factors) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", ["f32", "bf16", None])
@pytest.mark.parametrize("bias", ["f32", "bf16", None])
def test_gradients_are_completed(
    kind: str, scale: str | None, bias: str | None
) -> None:
    for with_statistics in (False, True):
        graph = Problem(
            kind=kind,
            scale=scale,
            bias=bias,
            dtype="bf16",
            with_statistics=with_statistics,
        ).graph
        count = len(graph.inputs)
        for wanted in itertools.product((False, True), repeat=count):
            if not any(wanted):
                continue
            emitted = _check(backward_of(graph, wanted))
            for each in emitted:
                (node,) = each.nodes
                inputs, outputs = dict(node.inputs), dict(node.outputs)
                assert not {"grad_mean", "grad_rstd"} & inputs.keys()
                assert {"grad_x", "grad_scale"} <= outputs.keys()
                assert "grad_bias" in outputs or node.kind == "rms_norm_backward"


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_statistics_have_a_cotangent(kind: str) -> None:
    graph = Problem(kind=kind, with_statistics=True).graph
    count = len(graph.outputs)
    for i in range(1, count):
        nonzero = [j == i for j in range(count)]
        backward = backward_of(graph, nonzero=nonzero)
        (node,) = backward.nodes
        own = {"grad_mean", "grad_rstd"} & dict(node.inputs).keys()
        assert len(own) == 1
        _check(backward)


@pytest.mark.parametrize("kind", KINDS)
def test_other_orders_of_axes(kind: str) -> None:
    rank = len(DIMS[kind])
    for order in itertools.permutations(range(rank)):
        graph = Problem(kind=kind, order=order, with_statistics=True).graph
        for emitted in (*_check(graph), *_check(backward_of(graph))):
            (node,) = emitted.nodes
            x = emitted.tensor(dict(node.inputs)["x"])
            if node.kind not in ("group_norm", "group_norm_backward"):
                assert x.order == tuple(range(len(x.dims)))


@pytest.mark.parametrize("kind", OF_ROWS)
@pytest.mark.parametrize("factors", ["f32", "bf16", None])
def test_a_residual_is_added_in_the_kernel_or_before(
    kind: str, factors: str | None
) -> None:
    for dtype, order in itertools.product(("f32", "bf16"), ((0, 1), (1, 0))):
        graph = Problem(
            kind=kind,
            dtype=dtype,
            scale=factors,
            bias=factors,
            order=order,
            has_residual=True,
            with_statistics=True,
        ).graph
        emitted = _check(graph)
        is_within = ["residual" in dict(each.nodes[0].inputs) for each in emitted]
        assert is_within == [True, False] if factors in (dtype, None) else [False]
    other = Problem(kind=kind, dtype="bf16", scale="bf16", bias="bf16", output="f32")
    assert len(_check(replace(other, has_residual=True).graph)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_another_dtype_of_the_output(kind: str) -> None:
    for dtype, output in (("bf16", "f32"), ("f32", "bf16"), ("f16", "f32")):
        graph = Problem(kind=kind, dtype=dtype, output=output).graph
        _check(graph)
        _check(backward_of(graph))


@pytest.mark.parametrize("kind", KINDS)
def test_what_cudnn_has_no_norm_for(kind: str) -> None:
    graph = Problem(kind=kind, dtype="f64").graph
    assert "f64" in legalize(graph, _H200).reasons[0]
    graph = Problem(kind=kind).graph
    assert "sm_75" in legalize(graph, _T4).reasons[0]
    old = replace(_H200, cudnn_version=90700)
    assert "older than 9.8" in legalize(graph, old).reasons[0]
    assert legalize(graph, None).candidates


@pytest.mark.parametrize("kind", KINDS)
def test_auto_leaves_norms_to_xla(kind: str) -> None:
    graph = Problem(kind=kind).graph
    for each in (graph, backward_of(graph)):
        for way in ranked(each, _H200):
            assert "until cuDNN was measured" in way.slower


_LARGE: dict[str, Any] = {
    "kind": "layer_norm",
    "dims": (8192, 2048),
    "dtype": "bf16",
    "scale": "bf16",
    "bias": "bf16",
    "with_statistics": True,
}


@pytest.mark.parametrize(
    ("changes", "target", "forward", "backward"),
    [
        ({}, {}, True, True),
        ({"kind": "rms_norm", "bias": None}, {}, True, True),
        ({"scale": None, "bias": None}, {}, True, True),
        ({"with_statistics": False}, {}, False, True),
        ({"dims": (8191, 2048)}, {}, False, False),
        ({"dims": (2**20, 96)}, {}, False, False),
        ({"dims": (396186, 128)}, {}, False, False),
        ({"dims": (32768, 640)}, {}, False, False),
        ({"dims": (32768, 768)}, {}, True, True),
        ({"dims": (2048, 8192)}, {}, True, True),
        ({"dims": (2048, 8320)}, {}, False, False),
        ({"dtype": "f16", "scale": "f16", "bias": "f16"}, {}, False, False),
        ({"dtype": "f32", "scale": "f32", "bias": "f32"}, {}, False, False),
        ({"scale": "f32"}, {}, False, False),
        ({"output": "f32"}, {}, False, False),
        ({"kind": "batch_norm"}, {}, False, False),
        ({}, {"cudnn_version": 91901}, True, True),
        # The nearest version that was measured decides for others.
        ({}, {"cudnn_version": 92801}, True, True),
        ({}, {"name": "NVIDIA H100 80GB HBM3"}, True, True),
        ({}, {"name": "NVIDIA H100 PCIe"}, False, False),
    ],
)
def test_auto_takes_cudnns_norms_where_they_were_measured_to_be_faster(
    changes: dict[str, Any], target: dict[str, Any], forward: bool, backward: bool
) -> None:
    problem = Problem(**{**_LARGE, **changes})
    # Statistics that are results have no cotangents where they are only saved.
    without = replace(problem, with_statistics=False)
    gpu = replace(_H200, **{"name": "NVIDIA H200", **target})
    graphs = {problem.graph: forward, backward_of(without.graph): backward}
    for each, is_cudnns in graphs.items():
        (way,) = ranked(each, gpu)
        assert (not way.slower) == is_cudnns, each.nodes[0].kind


@pytest.mark.parametrize("with_statistics", [False, True])
@pytest.mark.parametrize(
    ("changes", "gpu", "within", "apart"),
    [
        ({}, "NVIDIA H100 80GB HBM3", True, True),
        ({"kind": "rms_norm", "bias": None}, "NVIDIA H100 80GB HBM3", True, True),
        ({"dims": (8191, 2048)}, "NVIDIA H100 80GB HBM3", False, False),
        # There no residual was timed within a kernel.
        ({}, "NVIDIA H200", False, True),
    ],
)
def test_auto_takes_cudnns_norms_with_residuals_where_they_were_measured(
    changes: dict[str, Any], gpu: str, within: bool, apart: bool, with_statistics: bool
) -> None:
    options = {**_LARGE, **changes, "with_statistics": with_statistics}
    graph = Problem(has_residual=True, **options).graph
    ways = ranked(graph, replace(_H200, name=gpu))
    taken = [not way.slower for way in ways]
    assert taken == [within, apart and with_statistics]


def test_a_complete_graph_is_emitted_as_it_is() -> None:
    graph = Problem(kind="layer_norm", with_statistics=True).graph
    (rewrite,) = legalize(graph, _H200).candidates
    assert to_json(rewrite.graph) == to_json(graph)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("scale", ["f32", "bf16", None])
def test_results_in_f8(kind: str, scale: str | None) -> None:
    graph = f8_graph(kind, (5, 7), scale=scale)
    operands = draw_arrays(graph)
    (rewrite,) = legalize(graph, _H200).candidates
    (found,) = evaluate_legal(rewrite, operands)
    (want,) = evaluate(graph, operands)
    assert found.dtype == want.dtype
    pair = [np.asarray(x, np.float32) for x in (found, want)]
    np.testing.assert_array_equal(*pair)
    old = replace(_H200, sm_version=80)
    assert "sm_80 writes no f8" in legalize(graph, old).reasons[0]


def test_f8_needs_a_scale() -> None:
    graph = Problem(kind="layer_norm", output="f8_e4m3fn").graph
    assert "output is f8_e4m3fn" in legalize(graph, _H200).reasons[0]
