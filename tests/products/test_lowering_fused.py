# SPDX-License-Identifier: Apache-2.0
"""Tests which kernels a CUDA program has for conv and matmul, and who chose them."""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import UnsupportedError, conv, matmul, plans
from jax_cudnn.lowering import cuda, traced_graphs
from jax_cudnn.plans import PlanOptions
from tests.products.shared.lowered import (
    BF16,
    Planner,
    calls_of,
    conv_layer,
    gradient_of,
    operands_of,
    with_an_h200,
)


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planner]:
    """Lower as on a machine with an H200, with no choices but the test's own."""
    yield from with_an_h200(monkeypatch)


# --- who runs what --------------------------------------------------------------------


def test_a_layer_is_one_kernel_and_its_gradient_two_more() -> None:
    assert [nodes for nodes, _ in calls_of(conv_layer, *operands_of())] == [
        ["conv_fprop", "add", "silu"]
    ]
    assert [nodes for nodes, _ in calls_of(gradient_of, *operands_of())] == [
        ["conv_fprop", "add", "silu", "identity"],
        ["conv_wgrad"],
        ["conv_dgrad"],
    ]


def test_a_part_without_a_plan_is_xlas_alone(planner: Planner) -> None:
    planner.refused = {"conv_wgrad"}
    found = [nodes[0] for nodes, _ in calls_of(gradient_of, *operands_of())]
    assert found == ["conv_fprop", "conv_dgrad"]
    report = plans.inspect(gradient_of, *operands_of())
    assert [call.implementation for call in report.calls] == [
        "cudnn",
        "xla",
        "xla",
        "cudnn",
    ]
    assert "conv_wgrad: no engine for conv_wgrad" in str(report)


def test_cudnn_raises_for_the_part_that_has_no_plan(planner: Planner) -> None:
    planner.refused = {"conv_wgrad"}

    def gradient(*operands: Any) -> Any:
        return gradient_of(*operands, implementation="cudnn")

    with pytest.raises(UnsupportedError, match=r"cuDNN cannot run conv_wgrad\("):
        calls_of(gradient, *operands_of())


def test_xla_is_never_asked_about_plans(planner: Planner) -> None:
    assert not calls_of(
        lambda *xs: conv_layer(*xs, implementation="xla"), *operands_of()
    )
    assert not planner.asked


def test_full_precision_of_f32_is_xlas(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jax_cudnn")
    operands = operands_of(jnp.float32)
    assert len(calls_of(conv_layer, *operands)) == 1
    assert not calls_of(lambda *xs: conv_layer(*xs, precision="highest"), *operands)
    assert "TF32, less than the precision 'highest'" in caplog.text
    with jax.default_matmul_precision("float32"):
        assert not calls_of(conv_layer, *operands)
    # Products of bf16 are exact in f32 whatever is asked for.
    assert (
        len(calls_of(lambda *xs: conv_layer(*xs, precision="highest"), *operands_of()))
        == 1
    )


_ALGORITHM = jax.lax.DotAlgorithmPreset


@pytest.mark.parametrize(
    ("precision", "honoured"),
    [
        ("fastest", ("bf16", "f32")),
        ("bfloat16_3x", ("bf16", "f32")),
        (jax.lax.Precision.HIGH, ("bf16", "f32")),
        (("default", "high"), ("bf16", "f32")),
        (("default", "highest"), ("bf16",)),
        ("highest", ("bf16",)),
        (_ALGORITHM.DEFAULT, ("bf16", "f32")),
        (_ALGORITHM.TF32_TF32_F32, ("f32",)),
        ("BF16_BF16_F32", ("bf16",)),
        (_ALGORITHM.BF16_BF16_F32_X3, ()),
        ("F32_F32_F32", ()),
    ],
    ids=str,
)
def test_cudnn_runs_the_precisions_that_it_has(
    precision: Any, honoured: tuple[str, ...]
) -> None:
    found = set()
    for name, dtype in (("bf16", BF16), ("f32", jnp.float32)):
        a, b = jnp.ones((4, 8), dtype), jnp.ones((8, 16), dtype)

        def product(a: Any, b: Any) -> jax.Array:
            return matmul(a, b, precision=precision)

        if calls_of(product, a, b):
            found.add(name)
        # A convolution has no algorithm to lax either.
        is_preset = getattr(precision, "name", precision) in _ALGORITHM.__members__
        layer = calls_of(
            lambda *xs: conv_layer(*xs, precision=precision), *operands_of(dtype)
        )
        assert bool(layer) == (is_preset or name in honoured)
    assert found == {*honoured}


def _depthwise(x: Any, w: Any, **options: Any) -> jax.Array:
    return conv(
        x,
        w,
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=16,
        **options,
    )


@pytest.mark.parametrize("engine", [5, 2])
def test_a_first_plan_of_a_slow_engine_is_left_to_xla(
    planner: Planner, engine: int
) -> None:
    planner.engine = engine
    x, w = jnp.ones((2, 9, 7, 16), BF16), jnp.ones((3, 3, 1, 16), BF16)
    (call,) = plans.inspect(_depthwise, x, w).calls
    assert len(calls_of(_depthwise, x, w)) == (engine == 5)
    if engine == 5:
        assert call.implementation == "cudnn"
        return
    assert call.implementation == "xla"
    assert any("first plan is of engine 2" in reason for reason in call.reasons)
    # Who asks for cuDNN, or for certain plans, gets them.
    for asked in ({"implementation": "cudnn"}, {"plan": PlanOptions(engines=(2,))}):
        assert calls_of(lambda x, w, asked=asked: _depthwise(x, w, **asked), x, w)


def test_xla_rounds_sums_of_16_bits_on_a_gpu(planner: Planner) -> None:
    planner.refused = {"matmul"}
    x = jnp.ones((4, 8), BF16)

    def text(platform: str) -> str:
        def layer(x: Any) -> jax.Array:
            return matmul(x, x.T, activation="relu")

        traced = jax.jit(layer).trace(x)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert re.search(r"dot_general.*-> tensor<[14x]+xbf16>", text("cuda"))
    assert re.search(r"dot_general.*-> tensor<[14x]+xf32>", text("cpu"))


def test_xla_rounds_sums_over_8_bit_weights_as_well(planner: Planner) -> None:
    planner.refused = {"matmul"}
    x, scale = jnp.ones((4, 8), BF16), jnp.ones(8, jnp.float32)

    def text(dtype: Any) -> str:
        w = jnp.ones((8, 8), dtype)
        traced = jax.jit(lambda x, w: matmul(x, w, scale_b=scale)).trace(x, w)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    for dtype in (jnp.int8, jnp.float8_e5m2):
        assert re.search(r"dot_general.*-> tensor<[148x]+xbf16>", text(dtype)), dtype


def test_xla_rounds_no_cotangent_to_f8() -> None:
    f8 = jnp.float8_e4m3fn
    operands = (jnp.ones((4, 8), f8), jnp.ones((8, 16), f8), jnp.ones((4, 16), BF16))

    def gradients(a: Any, b: Any, cotangent: Any) -> Any:
        def product(a: Any, b: Any) -> jax.Array:
            return matmul(a, b, preferred_element_type=BF16, implementation="xla")

        return jax.vjp(product, a, b)[1](cotangent)

    traced = jax.jit(gradients).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    pattern = r"dot_general.*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\)"
    assert re.findall(pattern, text) == [("bf16", "bf16")] * 2


def _convolutions(function: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """Return the dtypes of operands and result of each convolution of XLA's on CUDA."""
    traced = jax.jit(function).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    pattern = (
        r"stablehlo.convolution\(.*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\) -> "
        r"tensor<[\dx]+x(\w+)>"
    )
    found = re.findall(pattern, text)
    assert len(found) == text.count("stablehlo.convolution(")
    return found


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
@pytest.mark.parametrize(
    "preferred", [None, jnp.int32, jnp.int16, jnp.float32, jnp.bfloat16]
)
def test_xla_convolves_8_bit_integers_in_f64(
    dtype: Any, preferred: Any, planner: Planner
) -> None:
    planner.refused = {"conv_fprop"}
    x, w, _ = operands_of(dtype)

    def run(x: Any, w: Any) -> jax.Array:
        return conv(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"),
                    preferred_element_type=preferred)  # fmt: skip

    assert _convolutions(run, x, w) == [("f64", "f64", "f64")]


def test_sums_of_8_bit_integers_are_exact_as_xla_has_them_on_a_gpu() -> None:
    # More than f32 has digits for: 9 x 512 products of up to 255 x 255.
    rng = np.random.default_rng(3)
    x = rng.integers(128, 256, (1, 3, 3, 512)).astype(np.uint8)
    w = rng.integers(128, 256, (3, 3, 512, 5)).astype(np.uint8)

    def run(x: Any, w: Any) -> jax.Array:
        return conv(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"),
                    preferred_element_type=jnp.int32)  # fmt: skip

    ((graph, options, _),) = traced_graphs(run, x, w)
    (got,) = cuda.run_xla(graph, (jnp.asarray(x), jnp.asarray(w)), options)
    want = np.tensordot(x[0].astype(np.int64), w.astype(np.int64), 3)
    assert got.dtype == jnp.int32
    assert want.max() > 2**26
    np.testing.assert_array_equal(got[0, 0, 0], want)


@pytest.mark.parametrize("preferred", [None, BF16, jnp.float32])
def test_xla_convolves_no_f8(preferred: Any, planner: Planner) -> None:
    planner.refused = {"conv_fprop", "conv_dgrad", "conv_wgrad"}

    def gradients(x: Any, w: Any) -> Any:
        def run(x: Any, w: Any) -> jax.Array:
            return conv(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"),
                        preferred_element_type=preferred)  # fmt: skip

        value, pullback = jax.vjp(run, x, w)
        return pullback(value)

    x, w, _ = operands_of(jnp.float8_e4m3fn)
    found = _convolutions(gradients, x, w)
    assert len(found) == 3
    assert "f8E4M3FN" not in str([pair[:2] for pair in found])


def test_a_transposed_convolution_of_8_bits_is_lowered() -> None:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return conv(
            x, w, padding=((1, 1), (1, 1)), lhs_dilation=(2, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=jnp.float32,
        )  # fmt: skip

    x = jax.ShapeDtypeStruct((2, 6, 6, 5), jnp.int8)
    w = jax.ShapeDtypeStruct((3, 3, 5, 7), jnp.int8)
    assert jax.jit(run).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
