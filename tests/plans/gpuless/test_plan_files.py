# SPDX-License-Identifier: Apache-2.0
"""Tests that a plan is the same after a round trip through a file."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import (
    avg_pool,
    conv,
    fuse,
    layer_norm,
    matmul,
    plans,
    ragged_dot,
    sdpa,
)
from jax_cudnn.graph import to_json
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.lowering import traced_graphs
from tests.common.gpuless import harness


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _loss(*operands: jax.Array, op: Any, **options: Any) -> jax.Array:
    return op(*operands, implementation="cudnn", **options).astype(jnp.float32).sum()


def _fused(x: Any, w: Any, residual: Any, *, implementation: Any) -> jax.Array:
    with plans.using(implementation=implementation):
        return fuse(lambda x, w, r: jnp.tanh(x @ w) * r)(x, w, residual)


_OPERATIONS: dict[str, Any] = {
    "sdpa": ((sdpa, {"is_causal": True}), [_shape(2, 96, 6, 64)] * 3),
    "conv": (
        (conv, {"window_strides": (1, 1), "padding": "SAME", "activation": "relu"}),
        [_shape(3, 32, 14, 10), _shape(64, 32, 3, 3)],
    ),
    "matmul": (
        (matmul, {"activation": "gelu"}),
        [_shape(48, 40), _shape(40, 24)],
    ),
    "layer_norm": ((layer_norm, {}), [_shape(48, 256), _shape(256)]),
    "avg_pool": (
        (avg_pool, {"window_shape": (2, 2), "strides": (2, 2)}),
        [_shape(2, 8, 8, 16)],
    ),
    "ragged_dot": (
        (ragged_dot, {"group_sizes": np.array([20, 0, 28], np.int32)}),
        [_shape(48, 40), _shape(3, 40, 24)],
    ),
    "fuse": (
        (_fused, {}),
        [_shape(48, 40), _shape(40, 24), _shape(48, 24)],
    ),
}


@functools.cache
def _graphs() -> dict[str, str]:
    """Return the graphs that a call and its gradients hand to cuDNN."""
    graphs = {}
    for name, ((op, options), operands) in _OPERATIONS.items():
        function = jax.grad(
            functools.partial(_loss, op=op, **options), tuple(range(len(operands)))[:2]
        )
        for graph, _, _ in traced_graphs(function, *operands):
            for part in partition(graph):
                candidates = legalize(part, harness.target("h200")).candidates
                if candidates:
                    graphs[f"{name} {len(graphs)}"] = to_json(candidates[0].graph)
    return graphs


@functools.cache
def _answers() -> dict[str, dict[str, Any]]:
    answers = harness.ship_all(list(_graphs().values()), "h200")
    return dict(zip(_graphs(), answers, strict=True))


def test_every_operation_has_graphs_forward_and_backward() -> None:
    operations = [name.split()[0] for name in _graphs()]
    assert {name: operations.count(name) for name in _OPERATIONS} == {
        "sdpa": 2,
        "conv": 3,
        "matmul": 3,
        "layer_norm": 2,
        "avg_pool": 2,
        "ragged_dot": 2,
        "fuse": 3,
    }


def test_the_plan_that_is_read_is_the_one_that_was_built() -> None:
    graphs = list(_graphs().values())
    built = harness.plan_all(graphs, "h200")
    for (name, answer), listed in zip(_answers().items(), built, strict=True):
        assert "plan" in answer, (name, answer)
        assert answer["graph"] == _graphs()[name]
        assert answer["request"] == ""
        (chosen,) = [c for c in listed["candidates"] if c["is_built"]]
        plan = answer["plan"]
        # Plans before it may have failed: some need a GPU to be built.
        unequal = {"build_ms": 0, "failures": []}
        assert {**plan, **unequal} == {**chosen, **unequal}
        assert plan["build_ms"] > 0, "what it took when it was built"


def test_reading_takes_a_small_part_of_building() -> None:
    building = sum(answer["export_s"] for answer in _answers().values())
    reading = sum(answer["import_s"] for answer in _answers().values())
    assert reading < 0.1 * building


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            "gpu",
            "LibraryError: this plan cannot be used here.\n"
            "  - GPU: made for NVIDIA H200, this is NVIDIA A100",
        ),
        (
            "sm_count",
            "LibraryError: this plan cannot be used here.\n  - GPU: made for sm_90 "
            "with 132 multiprocessors, this is sm_90 with 7 multiprocessors",
        ),
        (
            "sm_version",
            "LibraryError: this plan cannot be used here.\n  - GPU: made for sm_90 "
            "with 132 multiprocessors, this is sm_80 with 132 multiprocessors",
        ),
        (
            "settings",
            "LibraryError: this plan cannot be used here.\n  - environment variables: "
            "made for none, this is NVIDIA_TF32_OVERRIDE=0",
        ),
        ("flipped", "GraphError: not a whole plan file: its checksum is wrong"),
        ("empty", "GraphError: not a whole plan file: it does not begin like one"),
    ],
)
def test_a_plan_is_refused_where_it_does_not_belong(attempt: str, message: str) -> None:
    for answer in _answers().values():
        assert answer["refusals"][attempt] == message


@pytest.mark.parametrize(
    ("field", "library", "made"),
    [("cublaslt_version", "cuBLASLt", "12.8.3"), ("nvrtc_version", "NVRTC", "12.8")],
)
def test_a_plan_is_for_the_libraries_that_cudnn_planned_with(
    field: str, library: str, made: str
) -> None:
    for answer in _answers().values():
        here = answer["libraries"][library]
        assert answer["refusals"][field] == (
            "LibraryError: this plan cannot be used here.\n"
            f"  - {library}: made for {made}, this is {here}"
        )


def test_a_plan_file_cut_short_is_refused() -> None:
    for answer in _answers().values():
        refusal = answer["refusals"]["truncated"]
        assert refusal.startswith("GraphError: not a whole plan file: it has ")


def test_a_choice_travels_with_its_plan() -> None:
    graph = next(iter(_graphs().values()))
    listed = harness.plan_all([graph], "h200", build=False)[0]["candidates"]
    request = listed[-1]["request"]
    (answer,) = harness.ship_all([graph], "h200", requests=[request])
    assert answer["request"] == request
    assert answer["plan"]["request"] == request


def test_a_process_builds_a_plan_that_another_one_reads(tmp_path: Path) -> None:
    text, file = next(iter(_graphs().values())), tmp_path / "plan"
    written, read = harness.build_file(text, "h200", file)
    assert written == {"file": str(file)}
    assert read == {"graph": text, "request": ""}


def test_a_process_says_what_it_cannot_build(tmp_path: Path) -> None:
    wide = functools.partial(_loss, op=matmul)
    ((graph, _, _), *_) = traced_graphs(wide, *[_shape(8, 8)] * 2)
    text = to_json(graph).replace('"bf16"', '"f64"')
    written, _ = harness.build_file(text, "h200", tmp_path / "plan")
    assert written["error"] in ("UnsupportedError", "GraphError")
    assert not (tmp_path / "plan").exists()
