# SPDX-License-Identifier: Apache-2.0
"""Which contractions "auto" leaves to XLA: their classes, sizes and rules."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.config import Options, PlanOptions
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import legalize, measured
from jax_cudnn.legalize.measured import Rule
from jax_cudnn.lowering import traced_program
from jax_cudnn.lowering.decision import decide_part
from jax_cudnn.native import PlanInfo
from jax_cudnn.plans.inspection import why_of
from tests.native.readers import parse_request

pytestmark = pytest.mark.once

_DATA = Path(jax_cudnn.__file__).parent / "data" / "rules" / "rules.json"


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def parts_of(function: Callable[..., Any], *args: Any) -> list[Graph]:
    graphs = traced_program(function, *args).graphs
    return [part for graph in graphs for part in graph.parts]


def conv(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax_cudnn.conv(x, w, padding="SAME", dimension_numbers=layout, **options)


def gelu(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax_cudnn.matmul(a, b, activation="gelu")


def gelu_of_f32(a: jax.Array, b: jax.Array) -> jax.Array:
    return gelu(a.astype(jnp.float32), b.astype(jnp.float32))


def silu_of_bias(x: jax.Array, w: jax.Array) -> jax.Array:
    return conv(x, w, bias=jnp.ones(w.shape[-1], x.dtype), activation="silu")


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (jax_cudnn.matmul, [array(65, 7), array(7, 3)], "matmul, 16 bits, alone"),
        (gelu, [array(65, 7), array(7, 3)], "matmul, 16 bits, more"),
        (gelu, [array(64, 7), array(7, 3)], "matmul, 16 bits, more, few rows"),
        (
            jax_cudnn.matmul,
            [array(2, 5, 7, dtype=jnp.float32), array(2, 7, 3, dtype=jnp.float32)],
            "matmul, f32, alone, batched",
        ),
        (
            lambda a, b, c: jax_cudnn.matmul(a, b, residual=c, activation="relu"),
            [array(65, 7), array(7, 3), array(65, 3)],
            "matmul, 16 bits, relu, 1 more arrays",
        ),
        # Few channels become more: another convolution runs.
        (
            lambda x, w: conv(x, w, window_strides=(2, 2)),
            [array(2, 9, 9, 3), array(3, 3, 3, 8)],
            "",
        ),
        (
            silu_of_bias,
            [array(2, 9, 9, 9), array(3, 3, 9, 7)],
            "conv_fprop, 16 bits, more, 2 axes",
        ),
        (
            conv,
            [array(2, 9, 9, 9), array(1, 1, 9, 7)],
            "conv_fprop, 16 bits, alone, 2 axes, windows of 1",
        ),
        (
            lambda x, w: conv(x, w, feature_group_count=3),
            [array(2, 9, 9, 6), array(3, 3, 2, 12)],
            "conv_fprop, 16 bits, alone, 2 axes, groups",
        ),
        (
            lambda a, b: jax_cudnn.matmul(a, b),
            [array(5, 7, dtype=jnp.int8), array(7, 3, dtype=jnp.int8)],
            "",
        ),
        (jax_cudnn.rms_norm, [array(5, 7)], ""),
    ],
)
def test_kernels_have_classes(
    function: Callable[..., Any], args: list[Any], expected: str
) -> None:
    (part,) = parts_of(function, *args)
    assert measured.class_of(part) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("matmul, f32, more, 2 more arrays", "matmul, f32, more"),
        ("matmul, f32, more, 2 more arrays, few rows", "matmul, f32, more, few rows"),
        ("matmul, f32, more, batched", "matmul, f32, more, batched"),
        (
            "conv_fprop, f32, more, 2 axes, windows of 1",
            "conv_fprop, f32, more, 2 axes",
        ),
        (
            "conv_fprop, f32, more, 2 axes, groups",
            "conv_fprop, f32, more, 2 axes, groups",
        ),
    ],
)
def test_a_class_may_belong_to_another(name: str, expected: str) -> None:
    assert measured.general(name) == expected


def test_gradients_have_classes_of_their_own() -> None:
    def gradients(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(conv, x, w)[1](cotangent)

    shapes = array(2, 9, 9, 9), array(3, 3, 9, 7), array(2, 9, 9, 7)
    assert {measured.class_of(part) for part in parts_of(gradients, *shapes)} == {
        "conv_fprop, 16 bits, alone, 2 axes",
        "conv_dgrad, 16 bits, alone, 2 axes",
        "conv_wgrad, 16 bits, alone, 2 axes",
    }


def test_gradients_of_activations_have_classes_by_their_names() -> None:
    def classes(activation: str) -> set[str]:
        @jax_cudnn.fuse
        def mlp(x: jax.Array, up: jax.Array, bias: jax.Array) -> jax.Array:
            hidden: Any = {"activation": activation, "bias": bias}
            return jax_cudnn.matmul(jax_cudnn.matmul(x, up, **hidden), up.T)

        def loss(*operands: jax.Array) -> jax.Array:
            return mlp(*operands).astype(jnp.float32).sum()

        operands = array(128, 64), array(64, 256), array(256)
        parts = parts_of(jax.grad(loss, (0, 1, 2)), *operands)
        # Such a part sums the gradient of the bias. It belongs to the same class
        # without the sum, which is how it is judged.
        ways = [legalize(part, None).candidates for part in parts]
        inner = {measured.class_of(each[0].graph) for each in ways if each}
        found = {measured.class_of(part) for part in parts}
        gradients = {name for name in found if "gradient of" in name}
        assert gradients <= inner
        return gradients

    assert classes("gelu") == {"matmul, 16 bits, gradient of gelu_tanh, 1 more arrays"}
    assert classes("silu") == {"matmul, 16 bits, gradient of silu, 1 more arrays"}
    assert classes("relu") == {"matmul, 16 bits, gradient of relu, 1 more arrays"}


def test_sizes_are_those_of_the_product() -> None:
    (part,) = parts_of(jax_cudnn.matmul, array(5, 7), array(7, 3))
    sizes = measured.sizes_of(part)
    expected = {"rows": 5, "columns": 3, "depth": 7, "work": 105}
    assert sizes == pytest.approx(expected)
    assert list(sizes) == list(measured.FEATURES)


def test_a_rule_holds_within_its_bounds_and_what_was_measured() -> None:
    sizes = {"rows": 64.0, "columns": 64.0, "depth": 64.0, "work": 64.0**3}
    known = {name: (size / 2, size * 2) for name, size in sizes.items()}
    assert Rule(sizes=known, count=3).holds(sizes)
    assert not Rule(sizes=known).holds(sizes), "of a class that cuDNN runs"
    assert not Rule(sizes=known, count=3).holds({**sizes, "rows": 129.0})
    assert Rule(sizes=known, count=3, feature="depth", least=64.0).holds(sizes)
    assert not Rule(sizes=known, count=3, feature="depth", least=65.0).holds(sizes)
    assert not Rule(sizes=known, count=3, feature="depth", most=63.0).holds(sizes)


def test_the_file_is_read_whole() -> None:
    entries = json.loads(_DATA.read_text())["rules"]
    rules = measured.rules()
    assert {entry["class"] for entry in entries} == set(rules)
    for rule in rules.values():
        assert rule.feature in ("", *measured.FEATURES)
        assert (rule.count == 0) == (not rule.sizes)
        # What is given to XLA is faster there.
        assert rule.count == 0 or rule.ratio > 1


_H100 = Target(
    name="NVIDIA H100 80GB HBM3", sm_version=90, sm_count=132, cudnn_version=91900
)


def test_a_kernel_goes_first_where_it_was_measured_to_be_faster() -> None:
    def preference(m: int, target: Target | None, function: Any = gelu) -> str:
        (part,) = parts_of(function, array(m, 768), array(768, 3072))
        asked = measured.preference(part, target)
        ways = legalize(part, target).candidates
        assert {way.preference for way in ways} == {asked}
        return asked

    large, small = preference(32768, _H100), preference(4096, _H100)
    assert large == '{"first":[{"KERNEL_CFG":40}],"of_engine":4}'
    assert small == '{"first":[{"KERNEL_CFG":2}],"of_engine":4}'
    assert parse_request(large) == large
    # Few multiplications, a product alone, and what was not measured.
    assert preference(65, _H100) == ""
    assert preference(32768, _H100, jax_cudnn.matmul) == ""
    assert preference(32768, None) == ""
    assert preference(32768, _H100, gelu_of_f32) == ""
    assert preference(32768, replace(_H100, sm_version=100)) == ""
    assert preference(32768, replace(_H100, cudnn_version=92000)) == ""
    assert preference(32768, replace(_H100, cudnn_version=91901)) == large


class _Gpu:
    """A GPU that says which plan it was asked for."""

    is_here = True
    target = _H100

    def __init__(self) -> None:
        self.asked: list[str] = []

    def plan(self, graph_json: str, request: str = "") -> PlanInfo:
        del graph_json
        self.asked.append(request)
        raise UnsupportedError("no plan", reasons=("none",))


def test_a_call_that_says_which_plans_are_allowed_gets_no_other_order() -> None:
    (part,) = parts_of(gelu, array(32768, 768), array(768, 3072))
    plain, filtered = _Gpu(), _Gpu()
    decide_part(part, plain, Options())  # type: ignore[arg-type]
    assert plain.asked[0] == measured.preference(part, _H100) != ""
    plan = PlanOptions(deterministic=True)
    decide_part(part, filtered, Options(plan=plan))  # type: ignore[arg-type]
    assert set(filtered.asked) == {plan.to_request()}


def test_what_cudnn_runs_first_by_a_rule_is_its_own_choice_to_reports() -> None:
    assert why_of('{"first":[{"KERNEL_CFG":40}],"of_engine":4}') == "heuristic"
    assert why_of('{"engine":4,"knobs":{},"variant":0}') == "pinned"
    assert why_of(PlanOptions(deterministic=True).to_request()) == "requested"
    assert why_of("") == "heuristic"


def test_auto_leaves_a_plain_product_to_xla_and_cudnn_does_not() -> None:
    (part,) = parts_of(jax_cudnn.matmul, array(4096, 2048), array(2048, 1024))
    step = decide_part(part, None, Options())
    assert step.runs_on == "xla"
    assert any("measured kernels like this one" in each for each in step.reasons)
    step = decide_part(part, None, Options(implementation="cudnn"))
    assert step.runs_on == "cudnn"


def _silu_gated(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax_cudnn.gated_matmul(x, gate, up)


def _quick_gelu_gated(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax_cudnn.gated_matmul(
        x, gate, up, activation=lambda y: y * jax.nn.sigmoid(1.702 * y)
    )


def _scaled(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    scale = jnp.ones((x.shape[0], gate.shape[1]), jnp.float32)
    return jax_cudnn.matmul(x, gate, scale_out=scale) + x @ up


def _gradient_of_fused(x: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
    @jax_cudnn.fuse
    def mlp(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ gate) * (x @ up)) @ up.T

    def loss(*operands: jax.Array) -> jax.Array:
        return mlp(*operands).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))(x, gate, up)


@pytest.mark.parametrize("gated", [_silu_gated, _quick_gelu_gated])
def test_small_gated_products_are_xlas(gated: Callable[..., Any]) -> None:
    def why(function: Callable[..., Any], *sizes: int) -> set[str]:
        m, r, n = sizes
        parts = parts_of(function, array(m, r), array(r, n), array(r, n))
        ways = (way for part in parts for way in legalize(part, None).candidates)
        return {way.slower for way in ways if way.slower.startswith("a small gated")}

    assert why(gated, 256, 512, 1024)
    assert not why(gated, 8192, 512, 2048)
    assert not why(_scaled, 256, 512, 1024)
    assert not why(_gradient_of_fused, 32, 64, 128)


def test_a_fused_product_stays_cudnns() -> None:
    (part,) = parts_of(gelu, array(8192, 1024), array(1024, 4096))
    assert measured.slower(part) == ""
    assert all(way.slower == "" for way in legalize(part, None).candidates)


def test_sizes_far_from_what_was_measured_stay_cudnns() -> None:
    (part,) = parts_of(jax_cudnn.matmul, array(16, 24), array(24, 8))
    assert measured.slower(part) == ""
    assert math.prod(part.output_tensors[0].dims) == 128
