# SPDX-License-Identifier: Apache-2.0
"""Tests which contractions "auto" leaves to XLA: classes, sizes, those like them."""

import functools
import json
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
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_program
from jax_cudnn.lowering.decision import decide_part
from jax_cudnn.native import PlanInfo
from jax_cudnn.plans.inspection import why_of
from jax_cudnn.policy import evidence, ranked
from jax_cudnn.policy.nearest import Measured
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.tables import tables_for
from tests.native.readers import parse_request
from tests.products.test_nearest_kernels import kernel

pytestmark = pytest.mark.once

_TABLES = tables_for(None)


def _slower(part: Graph) -> str:
    """Say why "auto" leaves a contraction to XLA, if kernels like it were slower."""
    kernel = kernels.kernel_of(part, _TABLES)
    verdict = evidence.verdict_on(kernel, _TABLES) if kernel is not None else None
    if kernel is None or verdict is None or verdict.is_faster:
        return ""
    return evidence.described(kernel, verdict)


_DATA = Path(jax_cudnn.__file__).parent / "data/policy/sm90-cudnn9.19.json"


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
        # XLA runs it as it runs others, and not as relu.
        (
            lambda a, b: jax_cudnn.matmul(a, b, activation="leaky_relu"),
            [array(65, 7), array(7, 3)],
            "matmul, 16 bits, more",
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
    assert kernels.class_of(part, _TABLES) == expected


@pytest.mark.parametrize(
    ("groups", "channels", "outer", "expected"),
    [
        (3, 2, 12, "padded"),
        (3, 16, 48, ""),
        (8, 4, 32, "one group"),
        (16, 4, 64, "merged"),
        (4, 24, 96, "one group"),
    ],
)
def test_convolutions_in_groups_have_classes_by_how_they_run(
    groups: int, channels: int, outer: int, expected: str
) -> None:
    run = functools.partial(conv, feature_group_count=groups)
    x, w = array(2, 9, 9, groups * channels), array(3, 3, channels, outer)
    (part,) = parts_of(run, x, w)
    words = ["conv_fprop, 16 bits, alone, 2 axes, groups", *filter(None, [expected])]
    assert kernels.class_of(part, _TABLES) == ", ".join(words)


def test_gradients_have_classes_of_their_own() -> None:
    def gradients(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> Any:
        return jax.vjp(conv, x, w)[1](cotangent)

    shapes = array(2, 9, 9, 9), array(3, 3, 9, 7), array(2, 9, 9, 7)
    assert {
        kernels.class_of(part, _TABLES) for part in parts_of(gradients, *shapes)
    } == {
        "conv_fprop, 16 bits, alone, 2 axes",
        "conv_dgrad, 16 bits, alone, 2 axes",
        "conv_wgrad, 16 bits, alone, 2 axes",
    }


def test_gradients_of_activations_have_classes_by_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: set[str] = set()
    monkeypatch.setattr(
        kernels,
        "kernel_of",
        lambda graph, table: judged.add(kernels.class_of(graph, table)),
    )

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
        for part in parts:
            ranked(part, None)
        found = {kernels.class_of(part, _TABLES) for part in parts}
        gradients = {name for name in found if "gradient of" in name}
        assert gradients <= judged
        return gradients

    name = "matmul, 16 bits, gradient of leaky_relu, 1 more arrays"
    assert classes("leaky_relu") == {name}
    assert classes("gelu") == {"matmul, 16 bits, gradient of gelu_tanh, 1 more arrays"}
    assert classes("silu") == {"matmul, 16 bits, gradient of silu, 1 more arrays"}
    assert classes("relu") == {"matmul, 16 bits, gradient of relu, 1 more arrays"}


def test_sizes_are_those_of_the_product() -> None:
    (part,) = parts_of(jax_cudnn.matmul, array(5, 7), array(7, 3))
    like = kernels.kernel_of(part, _TABLES)
    assert like is not None
    assert like.name == kernels.class_of(part, _TABLES)
    assert (like.rows, like.columns, like.depth) == pytest.approx((5, 3, 7))
    assert like.work == pytest.approx(105)


def test_products_in_a_batch_are_like_one_of_all_their_rows() -> None:
    for shapes in (((3, 65, 7), (3, 7, 4)), ((1, 65, 7), (3, 7, 4))):
        (part,) = parts_of(jax_cudnn.matmul, *(array(*shape) for shape in shapes))
        like = kernels.kernel_of(part, _TABLES)
        assert like is not None
        assert like.name == "matmul, 16 bits, alone, batched"
        assert (like.rows, like.columns, like.depth) == (195, 4, 7)
    (part,) = parts_of(jax_cudnn.matmul, array(8, 1024, 1024), array(8, 1024, 1024))
    assert "(matmul, 16 bits, alone, batched)" in _slower(part)


@pytest.mark.parametrize("sizes", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_nothing_is_said_of_empty_arrays(sizes: tuple[int, int, int]) -> None:
    m, r, n = sizes
    for dtype in (jnp.bfloat16, jnp.float32):
        args = array(m, r, dtype=dtype), array(r, n, dtype=dtype)
        (part,) = parts_of(gelu, *args)
        assert kernels.kernel_of(part, _TABLES) is None
        assert _slower(part) == kernels.preference(part, _H100, _TABLES) == ""
        legalize(part, _H100)


def test_what_is_far_from_all_that_was_measured_stays_cudnns() -> None:
    known = Measured([(kernel("matmul, f32, alone"), 2.0)] * 3)
    # By its sizes alone, however its class differs.
    assert known.verdict(kernel(rows=64 * 20)) is not None
    assert known.verdict(kernel(rows=64 * 21)) is None
    (part,) = parts_of(jax_cudnn.matmul, array(5, 24), array(24, 8))
    assert _slower(part) == ""
    assert decide_part(part, None, Options()).runs_on == "cudnn"


def test_the_file_is_read_whole_and_its_kernels_are_known_by_the_others() -> None:
    entries = json.loads(_DATA.read_text())["kernels"]
    for name, rows, columns, depth, ratio, *_ in entries:
        assert name.startswith(
            ("conv_fprop, ", "conv_dgrad, ", "conv_wgrad, ", "matmul, ")
        )
        assert min(rows, columns, depth, ratio) > 0
    assert len(entries) > 1000
    ours = [(kernel(*each[:4]), each[4]) for each in entries]
    for i in range(0, len(ours), 97):
        others = Measured([*ours[:i], *ours[i + 1 :]])
        assert others.verdict(ours[i][0]) is not None
    every = evidence.kernels(_TABLES.about("kernels"))
    plain, fused = (
        every.verdict(kernel(f"matmul, 16 bits, {tail}", 4096, 4096, 4096))
        for tail in ("alone", "more")
    )
    assert plain is not None
    assert not plain.is_faster
    assert fused is not None
    assert fused.ratio < plain.ratio


_H100 = Target(
    name="NVIDIA H100 80GB HBM3", sm_version=90, sm_count=132, cudnn_version=91900
)


def test_a_kernel_goes_first_where_it_was_measured_to_be_faster() -> None:
    def preference(m: int, target: Target | None, function: Any = gelu) -> str:
        (part,) = parts_of(function, array(m, 768), array(768, 3072))
        asked = kernels.preference(part, target, _TABLES)
        ways = ranked(part, target)
        assert {way.preference for way in ways} == {asked}
        return asked

    large, small = preference(32768, _H100), preference(4096, _H100)

    def asked(config: int) -> str:
        wanted = f'{{"engine":4,"knobs":{{"KERNEL_CFG":{config}}}}}'
        return f'{{"preferred":[{{"first_engine":4,"wanted":[{wanted}]}}]}}'

    assert large == asked(40)
    assert small == asked(2)
    assert parse_request(large) == large
    # Few multiplications, a product alone, and what was not measured.
    assert preference(65, _H100) == ""
    assert preference(32768, _H100, jax_cudnn.matmul) == ""
    assert preference(32768, None) == ""
    assert preference(32768, _H100, gelu_of_f32) == ""
    assert preference(32768, replace(_H100, sm_version=100)) == ""
    assert preference(32768, replace(_H100, cudnn_version=91901)) == large
    # Its kernels are the same up to 9.28.
    assert preference(32768, replace(_H100, cudnn_version=92801)) == large
    assert preference(32768, replace(_H100, cudnn_version=92900)) == ""


def wanted_before(part: Graph, target: Target = _H100) -> dict[int, Any]:
    """Return what goes before the first plan of an engine."""
    asked = kernels.preference(part, target, _TABLES)
    assert parse_request(asked) == asked
    preferred = json.loads(asked)["preferred"] if asked else []
    return {each["first_engine"]: each["wanted"] for each in preferred}


def test_kernels_go_first_in_their_order_for_convolutions_with_something_around() -> (
    None
):
    def wanted(function: Callable[..., Any]) -> dict[int, Any]:
        (part,) = parts_of(function, array(2, 28, 28, 64), array(3, 3, 64, 96))
        return wanted_before(part)

    (known,) = (
        each["knobs"]
        for each in json.loads(_DATA.read_text())["preferred"]
        if each["kind"] == "conv_fprop" and each["bits"] == "16 bits"
    )
    assert wanted(silu_of_bias)[4] == [{"engine": 4, "knobs": x} for x in known]
    assert len(known) > 1
    assert 4 not in wanted(conv)


@pytest.mark.parametrize(
    ("window", "channels", "groups", "outer", "is_like"),
    [
        (3, 32, 1, 32, True),
        (1, 32, 1, 32, False),  # Windows of 1 are another matter.
        (3, 16, 1, 32, False),  # Fewer channels were not measured.
        (3, 32, 1, 24, False),
        (3, 32, 4, 128, False),
    ],
)
def test_an_engine_goes_before_another_where_it_was_measured_to_be_faster(
    window: int, channels: int, groups: int, outer: int, is_like: bool
) -> None:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return conv(x, w, feature_group_count=groups, activation="silu")

    x, w = array(2, 28, 28, channels * groups), array(window, window, channels, outer)
    (part,) = parts_of(layer, x, w)
    found = wanted_before(part)
    assert found.get(7) == ([{"engine": 4}] if is_like else None)
    assert (28 in found) == is_like
    assert not wanted_before(part, replace(_H100, cudnn_version=92000))
    assert not wanted_before(part, replace(_H100, sm_version=100))


def test_engines_that_go_before_others_are_of_the_same_kind() -> None:
    rules = json.loads(_DATA.read_text())["engines"]
    assert {each["kind"] for each in rules} == {
        "conv_fprop",
        "conv_dgrad",
        "conv_wgrad",
    }
    x, w = array(4, 28, 28, 96), array(3, 3, 96, 96)

    def gradients(x: jax.Array, w: jax.Array) -> Any:
        y, pullback = jax.vjp(conv, x, w)
        return pullback(y)

    parts = [
        part for part in parts_of(gradients, x, w) if kernels.class_of(part, _TABLES)
    ]
    assert len(parts) == 3
    for part in parts:
        kind, bits = kernels.kind_and_bits(kernels.class_of(part, _TABLES))
        assert wanted_before(part) == {
            each["first"]: [{"engine": engine} for engine in each["before"]]
            for each in rules
            if (each["kind"], each["bits"]) == (kind, bits)
            and not (each["windows_of_1"] or each["groups"])
        }


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
    silu = functools.partial(jax_cudnn.matmul, activation="silu")
    (part,) = parts_of(silu, array(32768, 768), array(768, 3072))
    plain, filtered = _Gpu(), _Gpu()
    decide_part(part, plain, Options())  # type: ignore[arg-type]
    assert plain.asked[0] == kernels.preference(part, _H100, _TABLES) != ""
    plan = PlanOptions(deterministic=True)
    decide_part(part, filtered, Options(plan=plan))  # type: ignore[arg-type]
    assert set(filtered.asked) == {plan.to_request()}


def test_what_cudnn_runs_first_by_a_rule_is_its_own_choice_to_reports() -> None:
    preference = '{"preferred":[{"first_engine":7,"wanted":[{"engine":4}]}]}'
    assert parse_request(preference) == preference
    assert why_of(preference) == "heuristic"
    assert why_of('{"engine":4,"knobs":{},"variant":0}') == "pinned"
    assert why_of(PlanOptions(deterministic=True).to_request()) == "requested"
    assert why_of("") == "heuristic"


def test_auto_leaves_a_plain_product_to_xla_and_cudnn_does_not() -> None:
    (part,) = parts_of(jax_cudnn.matmul, array(4096, 2048), array(2048, 1024))
    step = decide_part(part, None, Options())
    assert step.runs_on == "xla"
    assert any("most like this one" in each for each in step.reasons)
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
        ways = (way for part in parts for way in ranked(part, None))
        return {way.slower for way in ways if way.slower.startswith("a small gated")}

    assert why(gated, 256, 512, 1024)
    assert not why(gated, 8192, 512, 2048)
    assert not why(_scaled, 256, 512, 1024)
    assert not why(_gradient_of_fused, 32, 64, 128)


def test_products_with_one_column_are_xlas() -> None:
    def why(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> set[str]:
        (part,) = parts_of(gelu, *(array(*shape, dtype=dtype) for shape in shapes))
        ways = ranked(part, None)
        return {each.slower for each in ways if each.slower.startswith("a product")}

    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert why((65536, 32), (32, 1), dtype=dtype)
        assert why((3, 64, 32), (3, 32, 1), dtype=dtype)
    assert not why((65536, 32), (32, 2))
    assert not why((1, 512), (512, 512))
    assert not why((4096, 1), (1, 64))


def test_what_is_only_converted_has_nothing_around_it() -> None:
    def converted(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(a, b.astype(jnp.bfloat16))

    args = array(8192, 768), array(768, 3072, dtype=jnp.int8)
    for part in parts_of(jax_cudnn.fuse(converted), *args):
        assert kernels.preference(part, _H100, _TABLES) == ""


def test_a_fused_product_stays_cudnns() -> None:
    (part,) = parts_of(gelu, array(8192, 1024), array(1024, 4096))
    assert _slower(part) == ""
    assert all(way.slower == "" for way in ranked(part, None))
