# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans every graph that is emitted for norms."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from jax_cudnn.graph import to_json
from jax_cudnn.legalize import legalize
from tests.common.gpuless import harness
from tests.norms.problems import KINDS, OF_ROWS, Problem, backward_of, f8_graph

pytestmark = pytest.mark.sampled

_GPUS = pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
# Of each kind: usual sizes, odd ones, one element, and many features or rows.
_DIMS: dict[str, list[tuple[int, ...]]] = {
    "adaptive_layer_norm": [(4, 128, 512), (3, 17, 1001), (1, 1, 1), (2, 3, 65536)],
    "batch_norm": [(4096, 64), (77, 13), (1, 1), (200704, 256)],
    "group_norm": [
        (4, 64, 1, 900),
        (3, 7, 1, 121),
        (2, 3, 5, 77),
        (1, 1, 1, 1),
        (2, 32, 8, 4096),
    ],
    "layer_norm": [(512, 1024), (77, 1001), (1, 1), (100000, 3), (3, 200001)],
    "rms_norm": [(512, 1024), (77, 1001), (1, 1), (100000, 3), (3, 200001)],
}
_LAST = (0, 3, 1, 2)


def _texts(problems: list[Problem], gpu: str) -> dict[str, str]:
    """Return the first candidates of forward and gradient graphs, by what they are."""
    target = harness.target(gpu)
    found: dict[str, str] = {}
    for problem in problems:
        graphs = [problem.graph]
        if not problem.has_residual:
            # The gradient is that of the norm of the sum.
            graphs.append(backward_of(problem.graph))
        for graph in graphs:
            rewrite = legalize(graph, target).candidates[0]
            found[f"{problem} {graph.nodes[0].kind}"] = to_json(rewrite.graph)
    return found


def _check(problems: list[Problem], gpu: str, *, build: bool = False) -> None:
    texts = _texts(problems, gpu)
    answers = harness.plan_all(list(texts.values()), gpu, build=build)
    for name, answer in zip(texts, answers, strict=True):
        assert "candidates" in answer, (name, answer)
        if build:
            assert any(each["is_built"] for each in answer["candidates"]), name


@_GPUS
@pytest.mark.parametrize("kind", KINDS)
def test_all_sizes_are_planned(kind: str, gpu: str) -> None:
    _check(
        [
            Problem(kind=kind, dims=dims, dtype=dtype, with_statistics=with_statistics)
            for dims, dtype, with_statistics in itertools.product(
                _DIMS[kind], ("bf16", "f32"), (False, True)
            )
        ],
        gpu,
    )


@_GPUS
@pytest.mark.parametrize("kind", KINDS)
def test_all_dtypes_are_planned(kind: str, gpu: str) -> None:
    dims = _DIMS[kind][0]
    _check(
        [
            Problem(kind=kind, dims=dims, dtype=x, scale=scale, bias=bias, output=out)
            for x, scale, bias, out in (
                ("bf16", "bf16", "bf16", None),
                ("bf16", "f32", "bf16", None),
                ("f16", "f32", "f32", None),
                ("f16", None, None, None),
                ("f32", "bf16", None, None),
                ("bf16", None, "f32", "f32"),
                ("f32", "f32", "f32", "bf16"),
            )
        ],
        gpu,
    )


@_GPUS
def test_images_are_planned_as_they_are_stored(gpu: str) -> None:
    """But for gradients that are wrong: of several odd images of 16 bits.

    Groups of several channels become rows, and are right.
    """
    wrong, problems = [], []
    for dims in _DIMS["group_norm"]:
        is_odd = dims[0] > 1 and dims[2] == 1 and math.prod(dims[1:]) % 2 == 1
        for dtype in ("bf16", "f16", "f32"):
            problem = Problem(kind="group_norm", dims=dims, dtype=dtype, order=_LAST)
            (wrong if is_odd and dtype != "f32" else problems).append(problem)
    _check(problems, gpu)
    assert len(wrong) == 2
    for problem in wrong:
        rewrite = legalize(backward_of(problem.graph), harness.target(gpu))
        assert not rewrite.candidates
        assert "odd number of elements" in str(rewrite.reasons)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_some_operands_are_planned(kind: str) -> None:
    """Such as those of scale and bias alone, of images as they are stored."""
    target, texts = harness.target("h200"), {}
    for dims in _DIMS[kind][:3]:
        for order in (None, _LAST)[: 2 if kind == "group_norm" else 1]:
            problem = Problem(kind=kind, dims=dims, dtype="bf16", order=order)
            for wanted in itertools.product((False, True), repeat=3):
                if not any(wanted):
                    continue
                backward = backward_of(problem.graph, wanted)
                rewrites = legalize(backward, target).candidates
                if not rewrites:  # see test_images_are_planned_as_they_are_stored
                    assert (order, dims) == (_LAST, (3, 7, 1, 121))
                    continue
                texts[f"{problem} {wanted}"] = to_json(rewrites[0].graph)
    answers = harness.plan_all(list(texts.values()), "h200", build=False)
    for name, answer in zip(texts, answers, strict=True):
        assert "candidates" in answer, (name, answer)


@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_built(kind: str) -> None:
    _check([Problem(kind=kind, dims=_DIMS[kind][0], dtype="bf16")], "h200", build=True)


# The residual is added in the kernel.
_RESIDUAL: dict[str, Any] = {"has_residual": True, "with_statistics": True}


@pytest.mark.parametrize("kind", OF_ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_residuals_are_planned_for_usual_sizes(kind: str, dtype: str) -> None:
    same: dict[str, Any] = {"dtype": dtype, "scale": dtype, "bias": dtype}
    problems = [
        Problem(kind=kind, dims=(16384, features), **same, **_RESIDUAL)
        for features in (768, 1024, 4096, 8192)
    ]
    _check(problems, "h200")
    _check([replace(each, with_statistics=False) for each in problems], "h200")


@pytest.mark.parametrize("kind", OF_ROWS)
def test_residuals_of_other_sizes_have_no_plan(kind: str) -> None:
    """XLA adds these. When this fails, cuDNN adds more of them itself."""
    same: dict[str, Any] = {"dtype": "bf16", "scale": "bf16", "bias": "bf16"}
    odd = Problem(kind=kind, dims=(512, 1001), **same, **_RESIDUAL).graph
    rewrite = legalize(odd, harness.target("h200")).candidates
    texts = [to_json(each.graph) for each in rewrite]
    answers = harness.plan_all(texts, "h200", build=False)
    assert ["candidates" in each for each in answers] == [False, True]


@pytest.mark.parametrize("kind", OF_ROWS)
def test_residuals_have_no_plan_with_wider_factors(kind: str) -> None:
    """When this fails, legalize/norms/rows.py may take them."""
    wide = Problem(kind=kind, dims=(512, 1024), dtype="bf16", **_RESIDUAL)
    assert _refused(wide)
    _check([wide], "h200")


@pytest.mark.parametrize("gpu", ["h200", "b200"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_results_in_f8_are_planned_and_built(kind: str, gpu: str) -> None:
    target = harness.target(gpu)
    graphs = [
        f8_graph(kind, dims, dtype=dtype, scale=scale, output=output)
        for dims in ((512, 1024), (77, 1001), (1, 1))
        for dtype, scale in (("bf16", "bf16"), ("bf16", "f32"), ("f32", "f32"))
        for output in ("f8_e4m3fn", "f8_e5m2")
    ]
    rewrite = [legalize(graph, target).candidates[0].graph for graph in graphs]
    answers = harness.plan_all([to_json(graph) for graph in rewrite], gpu)
    for graph, answer in zip(graphs, answers, strict=True):
        assert "candidates" in answer, (graph, answer)
        assert any(each["is_built"] for each in answer["candidates"])


def test_ampere_writes_no_f8() -> None:
    graph = f8_graph("layer_norm", (512, 1024))
    assert "writes no f8" in legalize(graph, harness.target("a100")).reasons[0]
    whole = legalize(graph, None).candidates[0].graph
    (answer,) = harness.plan_all([to_json(whole)], "a100", build=False)
    assert answer["error"] == "UnsupportedError"


def _refused(problem: Problem, *, is_backward: bool = False) -> bool:
    graph = backward_of(problem.graph) if is_backward else problem.graph
    (answer,) = harness.plan_all([to_json(graph)], "h200", build=False)
    return answer.get("error") == "UnsupportedError"


def test_what_is_completed_has_no_plan_as_it_is() -> None:
    """When one of these fails, legalize/norms/rows.py need not do its part."""
    dims = (512, 1024)
    assert _refused(Problem(kind="layer_norm", dims=dims, scale=None))
    assert _refused(Problem(kind="layer_norm", dims=dims, bias=None))
    assert _refused(Problem(kind="batch_norm", dims=dims))
    full = {"with_statistics": True, "dtype": "bf16"}
    assert _refused(Problem(kind="batch_norm", dims=(77, 13), **full))
    assert _refused(Problem(kind="batch_norm", dims=dims, output="f32", **full))
    image = (4, 64, 1, 900)
    assert _refused(Problem(kind="group_norm", dims=image, output="f32", **full))
    assert _refused(Problem(kind="group_norm", dims=(4, 8, 8, 900), **full))
    assert _refused(
        Problem(kind="layer_norm", dims=dims, with_statistics=True), is_backward=True
    )
