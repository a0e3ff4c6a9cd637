# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans every grouped matmul that legalisation emits."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.graph import (
    DTypeName,
    Graph,
    Tensor,
    derivative_of,
    grouped_matmul_graph,
    to_json,
)
from jax_cudnn.legalize import legalize
from jax_cudnn.legalize.products.grouped_matmul import BY_CUBLASLT
from tests.common.gpuless import harness

# Rows, contraction, columns and groups: usual, odd, few, one group, many groups.
_SIZES = [
    (8192, 1024, 2816, 8),
    (17, 23, 41, 3),
    (1, 1, 1, 2),
    (64, 24, 40, 1),
    (300, 64, 72, 513),
]


def _graph(
    sizes: tuple[int, ...],
    dtype: DTypeName,
    result: DTypeName | None = None,
    roles: str = "group_sizes",
) -> Graph:
    def of(name: str, dtype: DTypeName, *dims: int) -> Tensor:
        order = tuple(range(len(dims)))
        return Tensor(name=name, dtype=dtype, dims=dims, order=order)

    m, k, n, g = sizes
    inputs = {
        "a": of("a", dtype, 1, m, k),
        "b": of("b", dtype, g, k, n),
        roles: of(roles, "i32", 1, g),
    }
    return grouped_matmul_graph(inputs, result or dtype)


def _backward(graph: Graph) -> Graph:
    derivative = derivative_of(graph)
    assert derivative is not None
    backward = derivative.backward(graph, (True, True, False), (True,))
    assert backward is not None
    return backward.graph


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_every_way_has_a_plan(gpu: str) -> None:
    target = harness.target(gpu)
    graphs: dict[str, str] = {}
    results: tuple[tuple[DTypeName, DTypeName], ...] = (
        *(("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16"), ("f16", "f32")),
        *(("f32", "f32"), ("f32", "bf16")),
    )
    for sizes in _SIZES:
        for dtype, result in results:
            graph = _graph(sizes, dtype, result)
            for way, each in (("forward", graph), ("backward", _backward(graph))):
                for i, rewrite in enumerate(legalize(each, target).candidates):
                    if rewrite.waits or BY_CUBLASLT in rewrite.names:
                        continue  # It takes cuBLASLt, which needs a GPU to be asked.
                    label = f"{sizes} {dtype} {result} {way} {i}"
                    graphs[label] = to_json(rewrite.graph)
    assert not harness.unplanned(graphs, gpu)


def test_a_plan_is_built_forward_and_backward() -> None:
    graph = _graph(_SIZES[0], "bf16")
    target = harness.target("h200")
    texts = [
        to_json(next(x.graph for x in legalize(each, target).candidates if not x.waits))
        for each in (graph, _backward(graph))
    ]
    for answer in harness.plan_all(texts, "h200"):
        assert any(each["is_built"] for each in answer["candidates"])


def test_cublaslt_is_asked_where_the_gpu_is() -> None:
    for each in (_graph(_SIZES[0], "bf16"), _backward(_graph(_SIZES[0], "bf16"))):
        ways = legalize(each, harness.target("h200")).candidates
        (rewrite,) = (way for way in ways if BY_CUBLASLT in way.names)
        (answer,) = harness.plan_all([to_json(rewrite.graph)], "h200")
        assert "its plans are made where the GPU is" in str(answer)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_matmul_a_group_takes_no_plan_that_is_compiled(way: str) -> None:
    graph = _graph(_SIZES[0], "bf16")
    each = graph if way == "forward" else _backward(graph)
    (rewrite,) = (
        x for x in legalize(each, harness.target("h200")).candidates if x.waits
    )
    (answer,) = harness.plan_all([to_json(rewrite.graph)], "h200")
    assert "would be compiled for every number of rows" in str(answer)


def test_a_matmul_a_group_wants_groups_that_follow_each_other() -> None:
    graph = _graph(_SIZES[1], "bf16")
    turned = replace(
        graph,
        tensors=tuple(
            replace(t, order=(1, 0, 2)) if t.name == "b" else t for t in graph.tensors
        ),
    )
    (answer,) = harness.plan_all([to_json(turned)], "h200", build=False)
    assert "is stored in the order [1, 0, 2], not group by group" in str(answer)


def test_auto_leaves_it_to_xla_and_cudnn_is_cudnns_but_for_the_matrices() -> None:
    lhs = jnp.ones((32, 16), jnp.bfloat16)
    rhs = jnp.ones((4, 16, 24), jnp.bfloat16)
    sizes = jnp.array([8, 0, 20, 4])

    def gradient(implementation: Any) -> Any:
        def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            y = jax_cudnn.ragged_dot(lhs, rhs, sizes, implementation=implementation)
            return y.astype(jnp.float32).sum()

        return plans.explain(jax.grad(loss, (0, 1)), lhs, rhs, device="h200")

    text = str(gradient("auto"))
    assert "runs in XLA\n  left to XLA (" in text
    assert "grouped matmuls are XLA's until cuDNN was measured to be faster" in text
    text = str(gradient("cudnn"))
    assert text.count("runs in cuDNN") == 2
    assert "the gradient of b is computed by XLA" in text
