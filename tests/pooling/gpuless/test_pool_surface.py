# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans every pooling that legalisation emits, on every GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.graph import (
    AvgPoolAttributes,
    Graph,
    MaxPoolAttributes,
    Tensor,
    derivative_of,
    pool_graph,
    to_json,
)
from jax_cudnn.legalize import legalize
from tests.common.gpuless import harness

_ORDERS = {"first": (0, 1, 2, 3, 4), "last": (0, 2, 3, 4, 1)}
_SIZES = (3, 5, 17, 12, 9)
# Window, stride and padding along every spatial axis.
_WINDOWS = {
    "halves": (2, 2, (0, 0)),
    "same": (3, 2, (1, 1)),
    "uneven": (3, 2, (0, 1)),
    "wide": (7, 1, (3, 3)),
    "gaps": (2, 3, (0, 0)),
    "cut": (3, 1, (-1, 1)),
}


def _graph(
    kind: str, space: int, layout: str, window: tuple[Any, ...], dtype: Any
) -> Graph:
    size, stride, (low, high) = window
    fields = {
        "window_shape": (size,) * space,
        "window_strides": (stride,) * space,
        "padding_low": (low,) * space,
        "padding_high": (high,) * space,
    }
    order = [axis for axis in _ORDERS[layout] if axis < space + 2]
    dims = _SIZES[: space + 2]
    x = Tensor(name="x", dtype=dtype, dims=dims, order=tuple(order))
    if kind == "max_pool":
        return pool_graph(x, attributes=MaxPoolAttributes(**fields))
    attributes = AvgPoolAttributes(
        **fields, count_include_pad=not kind.endswith("exclude")
    )
    return pool_graph(x, attributes=attributes)


def _backward(graph: Graph) -> Graph:
    derivative = derivative_of(graph)
    assert derivative is not None
    backward = derivative.backward(graph, (True,), (True,))
    assert backward is not None
    return backward.graph


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_every_pooling_has_a_plan(gpu: str) -> None:
    target = harness.target(gpu)
    graphs: dict[str, str] = {}
    for kind in ("max_pool", "avg_pool", "avg_pool_exclude"):
        for space, layout in ((1, "last"), (2, "first"), (2, "last"), (3, "last")):
            for name, window in _WINDOWS.items():
                for dtype in ("bf16", "f16", "f32"):
                    graph = _graph(kind, space, layout, window, dtype)
                    every = {"forward": graph}
                    if kind != "max_pool":
                        every["backward"] = _backward(graph)
                    for way, each in every.items():
                        (rewrite,) = legalize(each, target).candidates
                        label = f"{kind} {way} {space} {layout} {name} {dtype}"
                        graphs[label] = to_json(rewrite.graph)
    assert not harness.unplanned(graphs, gpu)


def test_a_plan_is_built_of_each_kind() -> None:
    graph = _graph("avg_pool", 2, "last", _WINDOWS["same"], "bf16")
    kinds = [_graph("max_pool", 2, "last", _WINDOWS["same"], "bf16"), graph]
    kinds.append(_backward(graph))
    for answer in harness.plan_all([*map(to_json, kinds)], "h200"):
        assert any(each["is_built"] for each in answer["candidates"])


def test_channels_first_have_no_plan() -> None:
    """The transposition of legalisation is needed."""
    graph = _graph("avg_pool", 2, "first", _WINDOWS["same"], "bf16")
    for each in (graph, _backward(graph)):
        (answer,) = harness.plan_all([to_json(each)], "h200", build=False)
        assert "resample" in str(answer["reasons"])


def test_one_spatial_axis_and_negative_padding_are_refused_by_the_builder() -> None:
    line = _graph("max_pool", 1, "last", _WINDOWS["same"], "bf16")
    cut = _graph("max_pool", 2, "last", _WINDOWS["cut"], "bf16")
    first, second = harness.plan_all([*map(to_json, (line, cut))], "h200", build=False)
    assert "max_pool: cuDNN has no pooling over one spatial axis" in str(first)
    assert "max_pool: cuDNN has no negative padding_low" in str(second)


def test_auto_leaves_pooling_to_xla_and_cudnn_is_cudnns() -> None:
    x = jnp.ones((2, 8, 8, 16), jnp.bfloat16)

    def mean(implementation: Any, x: jax.Array) -> jax.Array:
        return jax_cudnn.avg_pool(x, (2, 2), implementation=implementation).sum()

    text = str(plans.explain(jax.grad(lambda x: mean("auto", x)), x, device="h200"))
    assert "runs in XLA\n  left to XLA (" in text
    assert "cuDNN was not measured to pool faster than XLA" in text
    text = str(plans.explain(jax.grad(lambda x: mean("cudnn", x)), x, device="h200"))
    assert text.count("runs in cuDNN") == 2
    assert "runs in XLA" not in text
