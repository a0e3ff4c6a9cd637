# SPDX-License-Identifier: Apache-2.0
"""Tests that the work around a kernel keeps shapes and dtypes.

JAX's promotion is strict here, as users may have it. Nothing runs: shapes are followed.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn.graph import Graph, Tensor
from jax_cudnn.legalize import Rewrite, legalize
from jax_cudnn.reference.dtypes import jax_dtype
from tests.attention.shared.features import FEATURES, Feature
from tests.common.planner import H200
from tests.norms.calls import CALLS, Call, operands
from tests.products.shared.fused import graphs
from tests.products.shared.fusion_cases import ALL, Case, parts

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _types(tensors: Sequence[Tensor]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype)) for t in tensors]


def _check_types(graph: Graph) -> int:
    """Follow each candidate from a graph's operands to its results; count them."""
    candidates = legalize(graph, H200).candidates
    for rewrite in candidates:
        run = functools.partial(_run, rewrite)
        results = jax.eval_shape(run, *_types(graph.input_tensors))
        _assert_types(results, graph.output_tensors)
    return len(candidates)


def _run(rewrite: Rewrite, *operands: jax.Array) -> tuple[jax.Array, ...]:
    def kernel(given: Sequence[jax.Array]) -> list[jax.Array]:
        _assert_types(given, rewrite.graph.input_tensors)
        return [
            jnp.zeros(x.shape, x.dtype) for x in _types(rewrite.graph.output_tensors)
        ]

    return rewrite.run(kernel, operands)


def _assert_types(arrays: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    for x, want in zip(arrays, _types(tensors), strict=True):
        assert (x.shape, x.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.key)
def test_of_attention(feature: Feature) -> None:
    found = graphs(feature.call, *feature.operands)
    if feature.trained:
        found += graphs(feature.gradient(), feature.cotangent(), *feature.operands)
    assert sum(_check_types(graph) for graph, _ in found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_of_norms(call: Call, dtype: str) -> None:
    x, *parameters = operands(call, dtype=dtype)

    def pulled(x: jax.Array, *parameters: jax.Array) -> Any:
        results, pull = jax.vjp(call.run, x, *parameters)
        return pull(results)

    assert sum(_check_types(graph) for graph, _ in graphs(pulled, x, *parameters))


def _every(cases: Sequence[Case]) -> Iterator[Graph]:
    for case in cases:
        for part in parts(case):
            yield part.graph


@pytest.mark.parametrize("share", range(8))
def test_of_fusions(share: int) -> None:
    assert sum(map(_check_types, _every(ALL[share::8])))
