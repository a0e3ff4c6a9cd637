# SPDX-License-Identifier: Apache-2.0
"""Tests on the CPU that a pooling, rewritten for cuDNN, gives what it gave before."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.graph import (
    AvgPoolAttributes,
    Graph,
    MaxPoolAttributes,
    Tensor,
    derivative_of,
    pool_graph,
)
from jax_cudnn.legalize import legalize
from jax_cudnn.policy import ranked
from jax_cudnn.reference.dtypes import jax_dtype
from tests.common.evaluating import evaluate, evaluate_legal

pytestmark = pytest.mark.sampled

_SIZES = (2, 3, 7, 6, 5)
_LAST, _FIRST, _MIXED = (0, 2, 3, 4, 1), (0, 1, 2, 3, 4), (2, 1, 0, 4, 3)
_PADS = {"none": (0, 0), "uneven": (1, 2), "cut": (-1, 2), "cut_both": (-1, -1)}


def _graphs(space: int, order: Any, pad: tuple[int, int], dtype: Any) -> list[Graph]:
    """Return a graph of each kind, with windows that all have elements."""
    fields: dict[str, Any] = {
        "window_shape": (3, 4, 3)[:space],
        "window_strides": (1, 2, 1)[:space],
        "padding_low": (pad[0], 1, 0)[:space],
        "padding_high": (0, pad[1], 1)[:space],
    }
    order = tuple(axis for axis in order if axis < space + 2)
    x = Tensor(name="x", dtype=dtype, dims=_SIZES[: space + 2], order=order)
    found = [pool_graph(x, attributes=MaxPoolAttributes(**fields))]
    for counts in (True, False):
        attributes = AvgPoolAttributes(**fields, count_include_pad=counts)
        graph = pool_graph(x, attributes=attributes)
        derivative = derivative_of(graph)
        assert derivative is not None
        backward = derivative.backward(graph, (True,), (True,))
        assert backward is not None
        found += [graph, backward.graph]
    return found


@pytest.mark.parametrize("pad", _PADS.values(), ids=_PADS.keys())
@pytest.mark.parametrize("order", [_LAST, _FIRST, _MIXED])
@pytest.mark.parametrize("space", [1, 2, 3])
def test_the_rewritten_graph_gives_the_same(space: int, order: Any, pad: Any) -> None:
    for graph in _graphs(space, order, pad, "f32"):
        (rewrite,) = legalize(graph, None).candidates
        node = rewrite.graph.sole_node()
        assert node is not None
        attributes: Any = node.attributes
        assert len(attributes.window_shape) == max(space, 2)
        assert min(*attributes.padding_low, *attributes.padding_high) >= 0
        rank = max(space, 2) + 2
        last = (0, *range(2, rank), 1)
        assert all(tensor.order == last for tensor in rewrite.graph.tensors)
        rng = np.random.default_rng(space)
        (shape,) = (tensor.stored_shape for tensor in graph.input_tensors)
        operands = [jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.float32))]
        got = evaluate_legal(rewrite, operands)
        want = evaluate(graph, operands)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)


def test_what_runs_outside_of_the_kernel_is_told() -> None:
    graph = _graphs(2, _FIRST, (-1, 2), "bf16")[0]
    (rewrite,) = legalize(graph, None).candidates
    assert rewrite.notes == (
        "x is cut outside the kernel: padding is negative",
        "x is transposed to channels-last, in which cuDNN computes",
        "output is transposed to channels-last, in which cuDNN computes",
        "x is converted outside the kernel: cuDNN pools bf16 wrongly",
        "output is converted outside the kernel: cuDNN pools bf16 wrongly",
    )
    (way,) = ranked(graph, None)
    assert way.slower.startswith("cuDNN was not measured to pool faster than XLA")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_kernels_get_bf16_as_f32_but_for_the_gradient(dtype: Any) -> None:
    for graph in _graphs(2, _LAST, (0, 0), dtype):
        (rewrite,) = legalize(graph, None).candidates
        is_gradient = graph.nodes[0].kind.endswith("backward")
        wanted = "f32" if dtype == "bf16" and not is_gradient else dtype
        assert {tensor.dtype for tensor in rewrite.graph.tensors} == {wanted}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("number", [-np.inf, np.inf, np.nan, -3.4028235e38, -0.0])
def test_maxima_of_a_kernel_that_begins_at_the_lowest_number(
    dtype: Any, number: float
) -> None:
    """A window may have nothing but this number."""
    graph = _graphs(2, _LAST, (0, 0), dtype)[0]
    (rewrite,) = legalize(graph, None).candidates
    (tensor,) = graph.input_tensors
    x = np.random.default_rng(0).standard_normal(tensor.stored_shape)
    x[:, :4, :5] = number
    operands = [jnp.asarray(x, jnp.float32).astype(jax_dtype(tensor.dtype))]

    def kernel(operands: Any) -> list[jax.Array]:
        (y,) = evaluate(rewrite.graph, operands)
        lowest = jnp.finfo(jnp.float32).min
        return [jnp.maximum(y.astype(jnp.float32), lowest).astype(y.dtype)]

    (got,), (want,) = (
        evaluate_legal(rewrite, operands, kernel),
        evaluate(graph, operands),
    )
    np.testing.assert_array_equal(np.asarray(got, "f4"), np.asarray(want, "f4"))


def test_f64_is_left_to_xla() -> None:
    for graph in _graphs(2, _LAST, (0, 0), "f64"):
        legalization = legalize(graph, None)
        assert legalization.reasons == ("f64: cuDNN pools bf16, f16 and f32",)
        assert not legalization.candidates


def test_windows_without_elements_are_left_to_xla() -> None:
    x = Tensor(name="x", dtype="f32", dims=(2, 3, 5), order=(0, 1, 2))
    attributes = MaxPoolAttributes(
        window_shape=(2,), window_strides=(1,), padding_low=(2,), padding_high=(0,)
    )
    (reason,) = legalize(pool_graph(x, attributes=attributes), None).reasons
    assert reason.startswith("a window has only padding")
    fewer = replace(attributes, padding_low=(1,))
    assert legalize(pool_graph(x, attributes=fewer), None).candidates


def test_the_lowered_text_asks_cudnn_when_told_to() -> None:
    def pooled(x: jax.Array, implementation: Any) -> jax.Array:
        return jax_cudnn.max_pool(x, (2, 2), implementation=implementation)

    x = jax.ShapeDtypeStruct((2, 4, 4, 8), jnp.bfloat16)
    for implementation, is_there in (("cudnn", True), ("auto", False), ("xla", False)):
        traced = jax.jit(pooled, static_argnums=1).trace(x, implementation)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("jax_cudnn" in text) == is_there
