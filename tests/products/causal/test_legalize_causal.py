# SPDX-License-Identifier: Apache-2.0
"""Tests the ways to run a causal convolution by cuDNN, without a GPU."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_cudnn
from jax_cudnn import causal_conv1d
from jax_cudnn.graph import Graph, Target
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.legalize import legalize
from jax_cudnn.legalize.products.causal_conv1d import CONVOLUTION, FUNCTION
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.policy import ranked
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate
from tests.common.legal_ways import check_form, run_way

pytestmark = pytest.mark.once

_H200 = Target(name="H200", sm_version=90, sm_count=132, cudnn_version=92801)
_OLDER = replace(_H200, cudnn_version=92100)


def _graphs(
    taps: int = 4,
    wanted: tuple[int, ...] = (0, 1, 2),
    dtype: Any = jnp.float32,
    **options: Any,
) -> list[Graph]:
    """Return the graphs of a convolution with its gradients."""
    layout = options.get("dimension_numbers", "NWC")
    shape = (2, 9, 12) if layout == "NWC" else (2, 12, 9)
    shapes = (shape, (taps, 12) if layout == "NWC" else (12, taps), (12,))
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def call(*operands: jax.Array) -> jax.Array:
        x, w, bias = operands
        bias = {} if options.get("no_bias") else {"bias": bias}
        named = {k: v for k, v in options.items() if k != "no_bias"}
        return jnp.sum(causal_conv1d(x, w, **bias, **named).astype(jnp.float32))

    graphs = [g for g, *_ in traced_graphs(jax.value_and_grad(call, wanted), *types)]
    return [g for g in graphs if g.nodes[0].kind.startswith("causal")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dimension_numbers": "NCW", "activation": None},
        {"no_bias": True, "wanted": (0, 1)},
        {"wanted": (0,), "dimension_numbers": "NCW"},
        {"taps": 9},
        {"taps": 256},
        {"dtype": jnp.bfloat16},
    ],
    ids=str,
)
def test_all_ways_mean_the_same(options: dict[str, Any]) -> None:
    forward, backward = _graphs(**options)
    for graph in (forward, backward):
        operands = draw_arrays(graph)
        want = evaluate(graph, operands)
        ways = legalize(graph, _H200).candidates
        is_of_function = [FUNCTION in way.names for way in ways]
        assert is_of_function[0] == (options.get("taps") != 9)
        assert not any(is_of_function[1:])
        assert all(CONVOLUTION in way.names for way in ways[1:])
        for way in ways:
            check_form(way.graph)
            tolerance = 2e-5 if options.get("dtype") is None else 2e-2
            for x, y in zip(run_way(way, operands), want, strict=True):
                assert x.dtype == y.dtype
                x, y = (np.asarray(each, np.float64) for each in (x, y))
                most = np.max(np.abs(y))
                np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * most)


@pytest.mark.parametrize("layout", ["NWC", "NCW"])
def test_the_function_gets_what_its_header_asks_for(layout: str) -> None:
    for graph in _graphs(
        dtype=jnp.bfloat16, no_bias=True, wanted=(0,), dimension_numbers=layout
    ):
        way = legalize(graph, _H200).candidates[0]
        (node,) = way.graph.nodes
        roles = roles_in(way.graph, node)
        is_last = layout == "NWC"
        orders = {name: t.order for name, t in roles.items()}
        assert orders["x"] == ((0, 1, 2) if is_last else (0, 2, 1))
        assert orders["w"] == ((0, 1) if is_last else (1, 0))
        assert roles["bias"].dtype == "bf16"
        if node.kind.endswith("_backward"):
            assert orders["grad_w"] == orders["w"]
            assert roles["grad_w"].dtype == roles["grad_bias"].dtype == "f32"
        else:
            assert orders["output"] == orders["x"]
        assert not way.notes  # Nothing is transposed.


def test_arrays_with_channels_last_are_transposed_for_256_taps() -> None:
    for taps, order in ((128, (0, 1, 2)), (256, (0, 2, 1))):
        for graph in _graphs(taps):
            way = legalize(graph, _H200).candidates[0]
            assert FUNCTION in way.names
            (node,) = way.graph.nodes
            assert roles_in(way.graph, node)["x"].order == order


def test_older_cudnns_have_a_depthwise_convolution() -> None:
    for graph in _graphs():
        ways = legalize(graph, _OLDER).candidates
        assert ways
        assert all(CONVOLUTION in way.names for way in ways)
    # Without x's gradient, cuDNN has nothing to do.
    backward = _graphs(wanted=(1, 2))[1]
    assert FUNCTION in legalize(backward, _H200).candidates[0].names
    refused = legalize(backward, _OLDER)
    assert not refused.candidates
    assert refused.reasons == (
        "cuDNN 9.21.0 is older than 9.22, which has cudnnCausalConv1dForward",
    )


def test_segments_are_xlas() -> None:
    x, w = jnp.ones((2, 9, 12)), jnp.ones((4, 12))
    ids = jnp.ones((2, 9), jnp.int32)

    def call(x: Any, w: Any, ids: Any) -> Any:
        return causal_conv1d(x, w, segment_ids=ids)

    ((graph, *_),) = traced_graphs(call, x, w, ids)
    found = legalize(graph, _H200)
    assert not found.candidates
    assert found.reasons == ("segment_ids: cuDNN's causal convolution has no segments",)


@pytest.mark.parametrize("steps", [2**8, 2**14])
def test_auto_takes_the_function_for_large_arrays(steps: int) -> None:
    """Where it was measured; smaller ones, and the other way, are XLA's."""

    def call(x: Any, w: Any) -> Any:
        return jnp.sum(causal_conv1d(x, w) ** 2)

    types = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((2, steps, 512), (4, 512))
    ]
    graphs = [g for g, *_ in traced_graphs(jax.grad(call, (0, 1)), *types)]
    graphs = [g for g in graphs if g.nodes[0].kind.startswith("causal")]
    assert len(graphs) == 2
    for graph in graphs:
        for way in ranked(graph, _H200):
            is_large = steps == 2**14
            assert (not way.slower) == (is_large and FUNCTION in way.rewrite.names)


def test_a_program_for_a_gpu_calls_it() -> None:
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(causal_conv1d(x, w, implementation="cudnn") ** 2)

    program = export.export(
        jax.jit(jax.grad(loss, (0, 1))),
        platforms=["cuda"],
        disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
    )(jnp.ones((2, 9, 12)), jnp.ones((4, 12)))
    text = export.deserialize(program.serialize()).mlir_module()
    assert text.count("custom_call @jax_cudnn") == 2
    assert "causal_conv1d_backward" in text
