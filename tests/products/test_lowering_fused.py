# SPDX-License-Identifier: Apache-2.0
"""Tests which kernels a CUDA program has for conv and matmul, and who chose them."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import UnsupportedError, choices, conv, matmul, native, plans
from jax_cudnn.choices import Choice, key_of
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, Target, from_json
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.lowering import cuda, decide, decision, devices, traced_graphs
from jax_cudnn.native import PlanInfo
from jax_cudnn.plans import PlanOptions
from tests.common.planner import made_plan

_H200 = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)
_PIN = '{"engine":4,"knobs":{},"variant":0}'
_BF16 = jnp.bfloat16


class Planner:
    """Stands for cuDNN's planner: refuses some kinds, remembers what it was asked."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.engine: int | None = None
        self.asked: list[tuple[Graph, str]] = []

    def plan(self, text: str, *, request: str = "", device: int) -> PlanInfo:
        assert device == 0
        graph = from_json(text)
        self.asked.append((graph, request))
        for node in graph.nodes:
            if node.kind in self.refused:
                raise UnsupportedError("no plan", [f"no engine for {node.kind}"], "")
        made = made_plan(request)
        return made if self.engine is None else replace(made, engine=self.engine)


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planner]:
    """Lower as on a machine with an H200, with no choices but the test's own."""
    fake = Planner()
    table = choices.ChoiceTable()
    decision._decide.cache_clear()
    cuda._say_once.cache_clear()
    decision._say_stale_once.cache_clear()
    monkeypatch.setattr(devices, "local_target", lambda: (0, _H200))
    monkeypatch.setattr(native, "plan", fake.plan)
    monkeypatch.setattr(choices, "table", lambda: table)
    yield fake
    decision._decide.cache_clear()


def _layer(x: Any, w: Any, bias: Any, **options: Any) -> jax.Array:
    return conv(
        x,
        w,
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        bias=bias,
        activation="silu",
        **options,
    )


def _operands(dtype: Any = _BF16) -> tuple[jax.Array, ...]:
    return (
        jnp.ones((2, 9, 7, 8), dtype),
        jnp.ones((3, 3, 8, 16), dtype),
        jnp.ones(16, dtype),
    )


def _calls(function: Callable[..., Any], *args: Any) -> list[tuple[list[str], str]]:
    """Return for each custom call of the lowered text its nodes and its request."""
    fresh = jax.jit(lambda *args: function(*args))
    text = fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    text_of = r'"((?:[^"\\]|\\.)*)"'
    pattern = rf"graph = {text_of}, op = {text_of}, request = {text_of}"
    found = re.findall(pattern, text)
    assert len(found) == text.count("custom_call @jax_cudnn")
    return [
        (
            [
                getattr(node.attributes, "mode", node.kind)
                for node in from_json(graph.replace(r"\22", '"')).nodes
            ],
            request.replace(r"\22", '"'),
        )
        for graph, _, request in found
    ]


def _gradient(*operands: Any, **options: Any) -> Any:
    def total(*operands: Any) -> jax.Array:
        return _layer(*operands, **options).astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2))(*operands)


def _part(kind: str) -> Graph:
    """Return the part of the gradient that has that node."""
    for traced in traced_graphs(_gradient, *_operands()):
        for part in traced.parts:
            if any(node.kind == kind for node in part.nodes):
                return part
    raise AssertionError(kind)


def _choose(part: Graph, **fields: Any) -> None:
    choice = Choice(op="test", operands="", **fields)
    choices.table().add({key_of(part, _H200): choice})


# --- who runs what --------------------------------------------------------------------


def test_a_layer_is_one_kernel_and_its_gradient_two_more() -> None:
    assert [nodes for nodes, _ in _calls(_layer, *_operands())] == [
        ["conv_fprop", "add", "silu"]
    ]
    assert [nodes for nodes, _ in _calls(_gradient, *_operands())] == [
        ["conv_fprop", "add", "silu", "identity"],
        ["conv_wgrad"],
        ["conv_dgrad"],
    ]


def test_a_part_without_a_plan_is_xlas_alone(planner: Planner) -> None:
    planner.refused = {"conv_wgrad"}
    found = [nodes[0] for nodes, _ in _calls(_gradient, *_operands())]
    assert found == ["conv_fprop", "conv_dgrad"]
    report = plans.inspect(_gradient, *_operands())
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
        return _gradient(*operands, implementation="cudnn")

    with pytest.raises(UnsupportedError, match=r"cuDNN cannot run conv_wgrad\("):
        _calls(gradient, *_operands())


def test_xla_is_never_asked_about_plans(planner: Planner) -> None:
    assert not _calls(lambda *xs: _layer(*xs, implementation="xla"), *_operands())
    assert not planner.asked


def test_full_precision_of_f32_is_xlas(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jax_cudnn")
    operands = _operands(jnp.float32)
    assert len(_calls(_layer, *operands)) == 1
    assert not _calls(lambda *xs: _layer(*xs, precision="highest"), *operands)
    assert "TF32, less than the precision 'highest'" in caplog.text
    with jax.default_matmul_precision("float32"):
        assert not _calls(_layer, *operands)
    # Products of bf16 are exact in f32 whatever is asked for.
    assert len(_calls(lambda *xs: _layer(*xs, precision="highest"), *_operands())) == 1


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
    for name, dtype in (("bf16", _BF16), ("f32", jnp.float32)):
        a, b = jnp.ones((4, 8), dtype), jnp.ones((8, 16), dtype)

        def product(a: Any, b: Any) -> jax.Array:
            return matmul(a, b, precision=precision)

        if _calls(product, a, b):
            found.add(name)
        # A convolution has no algorithm to lax either.
        is_preset = getattr(precision, "name", precision) in _ALGORITHM.__members__
        layer = _calls(lambda *xs: _layer(*xs, precision=precision), *_operands(dtype))
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
    x, w = jnp.ones((2, 9, 7, 16), _BF16), jnp.ones((3, 3, 1, 16), _BF16)
    (call,) = plans.inspect(_depthwise, x, w).calls
    assert len(_calls(_depthwise, x, w)) == (engine == 5)
    if engine == 5:
        assert call.implementation == "cudnn"
        return
    assert call.implementation == "xla"
    assert any("first plan is of engine 2" in reason for reason in call.reasons)
    # Who asks for cuDNN, or for certain plans, gets them.
    for asked in ({"implementation": "cudnn"}, {"plan": PlanOptions(engines=(2,))}):
        assert _calls(lambda x, w, asked=asked: _depthwise(x, w, **asked), x, w)


def test_xla_rounds_sums_of_16_bits_on_a_gpu(planner: Planner) -> None:
    planner.refused = {"matmul"}
    x = jnp.ones((4, 8), _BF16)

    def text(platform: str) -> str:
        def layer(x: Any) -> jax.Array:
            return matmul(x, x.T, activation="relu")

        traced = jax.jit(layer).trace(x)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert re.search(r"dot_general.*-> tensor<[14x]+xbf16>", text("cuda"))
    assert re.search(r"dot_general.*-> tensor<[14x]+xf32>", text("cpu"))


def test_xla_rounds_sums_over_8_bit_weights_as_well(planner: Planner) -> None:
    planner.refused = {"matmul"}
    x, scale = jnp.ones((4, 8), _BF16), jnp.ones(8, jnp.float32)

    def text(dtype: Any) -> str:
        w = jnp.ones((8, 8), dtype)
        traced = jax.jit(lambda x, w: matmul(x, w, scale_b=scale)).trace(x, w)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    for dtype in (jnp.int8, jnp.float8_e5m2):
        assert re.search(r"dot_general.*-> tensor<[148x]+xbf16>", text(dtype)), dtype


def test_xla_rounds_no_cotangent_to_f8() -> None:
    f8 = jnp.float8_e4m3fn
    operands = (jnp.ones((4, 8), f8), jnp.ones((8, 16), f8), jnp.ones((4, 16), _BF16))

    def gradients(a: Any, b: Any, cotangent: Any) -> Any:
        def product(a: Any, b: Any) -> jax.Array:
            return matmul(a, b, preferred_element_type=_BF16, implementation="xla")

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
    x, w, _ = _operands(dtype)

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


@pytest.mark.parametrize("preferred", [None, _BF16, jnp.float32])
def test_xla_convolves_no_f8(preferred: Any, planner: Planner) -> None:
    planner.refused = {"conv_fprop", "conv_dgrad", "conv_wgrad"}

    def gradients(x: Any, w: Any) -> Any:
        def run(x: Any, w: Any) -> jax.Array:
            return conv(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"),
                        preferred_element_type=preferred)  # fmt: skip

        value, pullback = jax.vjp(run, x, w)
        return pullback(value)

    x, w, _ = _operands(jnp.float8_e4m3fn)
    found = _convolutions(gradients, x, w)
    assert len(found) == 3
    assert "f8E4M3FN" not in str([pair[:2] for pair in found])


# --- choices --------------------------------------------------------------------------


def test_a_measured_plan_is_pinned(planner: Planner) -> None:
    _choose(_part("conv_dgrad"), implementation="cudnn", plan=_PIN)
    pinned = {nodes[0]: request for nodes, request in _calls(_gradient, *_operands())}
    assert pinned == {"conv_fprop": "", "conv_wgrad": "", "conv_dgrad": _PIN}
    assert any(request == _PIN for _, request in planner.asked)


def test_a_measured_plan_is_for_the_graph_that_was_rewritten_as_it_was() -> None:
    operands = (jnp.ones((5, 24), _BF16), jnp.ones((24, 16), jnp.int8))

    def layer(x: Any, w: Any) -> jax.Array:
        return matmul(x, w, activation="relu")

    ((graph, options, _),) = traced_graphs(layer, *operands)
    ways = [way.graph for way in legalize(graph, _H200).candidates]
    assert len(ways) > 2
    for way in ways:
        rewritten = choices.digest_of(way)
        _choose(graph, implementation="cudnn", plan=_PIN, rewritten=rewritten)
        (step,) = decide(graph, options).steps
        assert step.rewrite is not None
        assert (step.rewrite.graph, step.request, step.why) == (way, _PIN, "tuned")


def test_where_xla_was_faster_auto_takes_it_and_cudnn_does_not() -> None:
    (graph, options, _), *_ = traced_graphs(_layer, *_operands())
    _choose(graph, implementation="xla", plan=_PIN, cudnn_us=30.26, xla_us=20.5)
    decision = decide(graph, options)
    assert not decision.steps
    assert decision.reasons == (
        "XLA was measured to be faster: 20.5 µs, cuDNN 30.3 µs",
    )
    ((_, request),) = _calls(
        lambda *xs: _layer(*xs, implementation="cudnn"), *_operands()
    )
    assert request == _PIN


def test_a_choice_added_later_is_seen() -> None:
    (graph, options, _), *_ = traced_graphs(_layer, *_operands())
    (before,) = decide(graph, options).steps
    assert before.request == ""
    _choose(graph, implementation="cudnn", plan=_PIN)
    (after,) = decide(graph, options).steps
    assert after.request == _PIN


def test_auto_leaves_8_bit_weights_to_xla_unless_cudnn_was_measured() -> None:
    operands = (jnp.ones((4, 32), _BF16), jnp.ones((32, 16), jnp.int8))

    def layer(x: Any, w: Any, **options: Any) -> jax.Array:
        return matmul(x, w, scale_b=jnp.ones(16), activation="relu", **options)

    ((graph, options, _),) = traced_graphs(layer, *operands)
    decision = decide(graph, options)
    assert not decision.steps
    assert len(decision.reasons) == 1, "the same for every way of rewriting"
    assert "XLA converts them within the product" in decision.reasons[0]
    ((nodes, _),) = _calls(lambda *xs: layer(*xs, implementation="cudnn"), *operands)
    assert nodes == ["identity", "matmul", "mul", "relu"]
    _choose(graph, implementation="cudnn", plan=_PIN)
    ((_, request),) = _calls(layer, *operands)
    assert request == _PIN
    unsigned = operands[1].astype(jnp.uint8)
    ((graph, options, _),) = traced_graphs(layer, operands[0], unsigned)
    assert decide(graph, options).steps, "XLA has no such code for u8"
    wide = operands[0].astype(jnp.float32)
    ((graph, options, _),) = traced_graphs(layer, wide, operands[1])
    assert decide(graph, options).steps, "beside f32 it was not measured"


# --- options --------------------------------------------------------------------------

_STRICT = PlanOptions(refused_notes=("RUNTIME_COMPILATION",), workspace_limit_bytes=99)


def test_the_compiled_program_asks_for_what_the_options_allow(planner: Planner) -> None:
    def layer(*xs: Any) -> jax.Array:
        return _layer(*xs, plan=_STRICT)

    assert {request for _, request in _calls(layer, *_operands())} == {
        _STRICT.to_request()
    }
    assert {request for _, request in planner.asked} == {_STRICT.to_request()}
    (graph, options, _), *_ = traced_graphs(layer, *_operands())
    assert [step.why for step in decide(graph, options).steps] == ["requested"]
    (graph, options, _), *_ = traced_graphs(_layer, *_operands())
    assert [step.why for step in decide(graph, options).steps] == ["heuristic"]


@pytest.mark.parametrize(
    ("refusal", "limit", "expected"),
    [
        ("", None, "tuned"),
        ("it is a JIT engine", None, "requested"),
        ("", 4095, "requested"),  # the planner's plans take 4096 bytes
        ("", 4096, "tuned"),
    ],
)
def test_a_measured_plan_is_taken_where_the_options_allow_it(
    monkeypatch: pytest.MonkeyPatch, refusal: str, limit: int | None, expected: str
) -> None:
    def candidates(text: str, *, request: str, device: int) -> list[SimpleNamespace]:
        assert request == plan.to_request()
        return [
            SimpleNamespace(request="another", refusal=""),
            SimpleNamespace(request=_PIN, refusal=refusal),
        ]

    monkeypatch.setattr(native, "candidates", candidates)
    plan = PlanOptions(deterministic=True, workspace_limit_bytes=limit)
    (graph, options, _), *_ = traced_graphs(
        lambda *xs: _layer(*xs, plan=plan), *_operands()
    )
    _choose(graph, implementation="cudnn", plan=_PIN)
    (step,) = decide(graph, options).steps
    assert step.why == expected
    assert step.request == (_PIN if expected == "tuned" else plan.to_request())


def test_sums_whose_measured_plan_is_not_allowed_stay_xlas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "candidates", lambda *_, **__: [])
    part = _part("reduction")
    _choose(part, implementation="cudnn", plan=_PIN)
    allowed = Options(plan=PlanOptions(refused_notes=("FFT",)))
    gpu = devices.gpu_for(allowed)
    assert decision.decide_part(part, gpu, allowed).rewrite is None
    assert decision.decide_part(part, gpu, Options()).why == "tuned"


def test_a_choice_without_a_plan_hides_no_reason(planner: Planner) -> None:
    (graph, options, _), *_ = traced_graphs(_layer, *_operands())
    _choose(graph, implementation="xla", xla_us=3.0)
    planner.refused = {"conv_fprop"}
    decision = decide(graph, options)
    assert decision.why is None
    assert decision.reasons == ("no engine for conv_fprop",)


def test_nothing_is_tuned_where_there_is_no_contraction() -> None:
    decision = decide(_part("reduction"), Options())
    assert (decision.steps, decision.why, decision.reasons) == ((), None, ())


# --- stale choices --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"plan": _PIN, "rewritten": "gone"},
            "this release rewrites the graph otherwise",
        ),
        ({"plan": "torn"}, "no such engine"),
        (
            {"plan": _PIN.replace("4", "25")},
            "its plan has the note REDUCED_PRECISION_REDUCTION, which is refused",
        ),
    ],
)
def test_a_stale_choice_is_ignored_and_said_once(
    fields: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    planner: Planner,
) -> None:
    def plan(text: str, *, request: str = "", device: int) -> PlanInfo:
        if request == "torn":
            raise UnsupportedError("no such engine", [], "")
        found = planner.plan(text, request=request, device=device)
        notes = ("REDUCED_PRECISION_REDUCTION",) if found.engine == 25 else ()
        return replace(found, numeric_notes=notes)

    monkeypatch.setattr(native, "plan", plan)
    caplog.set_level(logging.INFO, "jax_cudnn")
    (graph, _, _), *_ = traced_graphs(_layer, *_operands())
    _choose(graph, implementation="cudnn", **fields)
    for _ in range(2):
        assert [request for _, request in _calls(_layer, *_operands())] == [""]
    messages = [r.getMessage() for r in caplog.records]
    (message,) = (each for each in messages if "stale" in each)
    assert f"): the measured choice is stale and ignored: {why}" in message


@pytest.mark.parametrize("is_here", [True, False])
def test_a_place_in_the_list_of_a_gpu_names_no_plan_for_one_elsewhere(
    is_here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place = '{"engine":45,"nth":1,"variant":0}'
    (graph, options, _), *_ = traced_graphs(_layer, *_operands())
    (part,) = partition(graph)
    gpu: Any = SimpleNamespace(
        target=_H200,
        is_here=is_here,
        plan=lambda _, request: made_plan(request or place),
    )
    # cuDNN's first plan has no other name, either.
    assert decision.decide_part(part, gpu, options).request == ""
    _choose(part, implementation="cudnn", plan=place)
    caplog.set_level(logging.INFO, "jax_cudnn")
    step = decision.decide_part(part, gpu, options)
    assert step.why == ("tuned" if is_here else "heuristic")
    assert step.request == (place if is_here else "")
    assert ("pinned by its place" in caplog.text) == (not is_here)


def _gelu(a: Any, b: Any, bias: Any, plan: PlanOptions | None = None) -> Any:
    return matmul(a, b, bias=bias, activation="gelu", plan=plan)


def _gelu_operands() -> list[jax.ShapeDtypeStruct]:
    shapes = (512, 256), (256, 1024), (1024,)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


@pytest.mark.parametrize(
    ("has", "is_here", "engine"),
    [
        (("TILE", "{}"), True, 1000),  # the plan that a row of a table names
        (("{}",), True, 1000),  # cuBLASLt's first
        ((), True, None),  # XLA: cuDNN's plan is slower
        (("TILE", "{}"), False, None),
    ],
)
def test_cublaslt_runs_a_gelu_where_it_can(
    has: tuple[str, ...], is_here: bool, engine: int | None
) -> None:
    asked: list[str] = []

    def plan(_: str, request: str) -> PlanInfo:
        asked.append(request)
        wanted = json.loads(request)["preferred"][0]["wanted"] if request else []
        for pin in wanted:
            if any(word in pin.get("knobs", {"{}": 0}) for word in has):
                return made_plan(json.dumps({"knobs": {}, **pin}))
        return made_plan(_PIN)  # cuDNN's

    gpu: Any = SimpleNamespace(target=_H200, is_here=is_here, plan=plan)
    ((graph, options, _),) = traced_graphs(_gelu, *_gelu_operands())
    (part,) = partition(graph)
    step = decision.decide_part(part, gpu, options)
    assert (step.plan.engine if step.plan else None) == engine
    # One plan is built: that which the program asks for. Elsewhere, cuBLASLt's other
    # plans and cuDNN's may run.
    assert len(asked) == is_here
    if engine is not None:
        assert native.is_cublaslts(step.request)
        assert [step.request] == asked
        first, second = json.loads(step.request)["preferred"][0]["wanted"]
        assert first["knobs"]
        assert "knobs" not in second
        assert step.why == "heuristic"
    elif is_here:
        assert any("no kernel" in str(each.reasons) for each in step.attempts)


def test_options_are_asked_of_cudnn_and_cublaslt_alike() -> None:
    asked: list[str] = []

    def plan(_: str, request: str) -> PlanInfo:
        asked.append(request)
        return made_plan(_PIN)

    gpu: Any = SimpleNamespace(target=_H200, is_here=True, plan=plan)
    allowed = PlanOptions(denied_engines=(native.CUBLASLT_ENGINE,))
    traced = traced_graphs(lambda *x: _gelu(*x, plan=allowed), *_gelu_operands())
    ((graph, options, _),) = traced
    (part,) = partition(graph)
    decision.decide_part(part, gpu, replace(options, implementation="cudnn"))
    assert asked == [allowed.to_request()]


def test_sums_without_a_contraction_go_to_cudnn_where_that_was_measured() -> None:
    part = _part("reduction")
    assert [nodes[0] for nodes, _ in _calls(_gradient, *_operands())] == [
        "conv_fprop",
        "conv_wgrad",
        "conv_dgrad",
    ]
    _choose(part, implementation="cudnn", plan=_PIN)
    calls = _calls(_gradient, *_operands())
    assert (["silu_grad", "identity", "add"], _PIN) in calls


def test_a_choice_for_another_gpu_or_cudnn_is_not_looked_at() -> None:
    (graph, options, _), *_ = traced_graphs(_layer, *_operands())
    other = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=92000)
    choice = Choice(op="", operands="", implementation="xla")
    choices.table().add({key_of(graph, other): choice})
    assert decide(graph, options).steps


def test_options_without_a_gpu_decide_nothing_by_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (graph, _, _), *_ = traced_graphs(_layer, *_operands())
    _choose(graph, implementation="xla")
    monkeypatch.setattr(devices, "local_target", lambda: None)
    (step,) = decide(graph, Options()).steps
    assert step.plan is None
    assert step.rewrite is not None


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
