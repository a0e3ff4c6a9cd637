# SPDX-License-Identifier: Apache-2.0
"""Tests which plan runs a conv or matmul: a measured one, an allowed one, the first."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, choices, matmul, native
from jax_cudnn.choices import Choice, key_of
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.lowering import decide, decision, devices, traced_graphs
from jax_cudnn.native import PlanInfo
from jax_cudnn.plans import PlanOptions
from tests.common.planner import made_plan
from tests.products.shared.lowered import (
    BF16,
    H200,
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


_PIN = '{"engine":4,"knobs":{},"variant":0}'


def _part(kind: str) -> Graph:
    """Return the part of the gradient that has that node."""
    for traced in traced_graphs(gradient_of, *operands_of()):
        for part in traced.parts:
            if any(node.kind == kind for node in part.nodes):
                return part
    raise AssertionError(kind)


def _choose(part: Graph, **fields: Any) -> None:
    choice = Choice(op="test", operands="", **fields)
    choices.table().add({key_of(part, H200): choice})


def test_a_measured_plan_is_pinned(planner: Planner) -> None:
    _choose(_part("conv_dgrad"), implementation="cudnn", plan=_PIN)
    pinned = {
        nodes[0]: request for nodes, request in calls_of(gradient_of, *operands_of())
    }
    assert pinned == {"conv_fprop": "", "conv_wgrad": "", "conv_dgrad": _PIN}
    assert any(request == _PIN for _, request in planner.asked)


def test_a_measured_plan_is_for_the_graph_that_was_rewritten_as_it_was() -> None:
    operands = (jnp.ones((5, 24), BF16), jnp.ones((24, 16), jnp.int8))

    def layer(x: Any, w: Any) -> jax.Array:
        return matmul(x, w, activation="relu")

    ((graph, options, _),) = traced_graphs(layer, *operands)
    ways = [way.graph for way in legalize(graph, H200).candidates]
    assert len(ways) > 2
    for way in ways:
        rewritten = choices.digest_of(way)
        _choose(graph, implementation="cudnn", plan=_PIN, rewritten=rewritten)
        (step,) = decide(graph, options).steps
        assert step.rewrite is not None
        assert (step.rewrite.graph, step.request, step.why) == (way, _PIN, "tuned")


def test_where_xla_was_faster_auto_takes_it_and_cudnn_does_not() -> None:
    (graph, options, _), *_ = traced_graphs(conv_layer, *operands_of())
    _choose(graph, implementation="xla", plan=_PIN, cudnn_us=30.26, xla_us=20.5)
    decision = decide(graph, options)
    assert not decision.steps
    assert decision.reasons == (
        "XLA was measured to be faster: 20.5 µs, cuDNN 30.3 µs",
    )
    ((_, request),) = calls_of(
        lambda *xs: conv_layer(*xs, implementation="cudnn"), *operands_of()
    )
    assert request == _PIN


def test_a_choice_added_later_is_seen() -> None:
    (graph, options, _), *_ = traced_graphs(conv_layer, *operands_of())
    (before,) = decide(graph, options).steps
    assert before.request == ""
    _choose(graph, implementation="cudnn", plan=_PIN)
    (after,) = decide(graph, options).steps
    assert after.request == _PIN


def test_auto_leaves_8_bit_weights_to_xla_unless_cudnn_was_measured() -> None:
    operands = (jnp.ones((4, 32), BF16), jnp.ones((32, 16), jnp.int8))

    def layer(x: Any, w: Any, **options: Any) -> jax.Array:
        return matmul(x, w, scale_b=jnp.ones(16), activation="relu", **options)

    ((graph, options, _),) = traced_graphs(layer, *operands)
    decision = decide(graph, options)
    assert not decision.steps
    assert len(decision.reasons) == 1, "the same for every way of rewriting"
    assert "XLA converts them within the product" in decision.reasons[0]
    ((nodes, _),) = calls_of(lambda *xs: layer(*xs, implementation="cudnn"), *operands)
    assert nodes == ["identity", "matmul", "mul", "relu"]
    _choose(graph, implementation="cudnn", plan=_PIN)
    ((_, request),) = calls_of(layer, *operands)
    assert request == _PIN
    unsigned = operands[1].astype(jnp.uint8)
    ((graph, options, _),) = traced_graphs(layer, operands[0], unsigned)
    assert decide(graph, options).steps, "XLA has no such code for u8"
    wide = operands[0].astype(jnp.float32)
    ((graph, options, _),) = traced_graphs(layer, wide, operands[1])
    assert decide(graph, options).steps, "beside f32 it was not measured"


_STRICT = PlanOptions(refused_notes=("RUNTIME_COMPILATION",), workspace_limit_bytes=99)


def test_the_compiled_program_asks_for_what_the_options_allow(planner: Planner) -> None:
    def layer(*xs: Any) -> jax.Array:
        return conv_layer(*xs, plan=_STRICT)

    assert {request for _, request in calls_of(layer, *operands_of())} == {
        _STRICT.to_request()
    }
    assert {request for _, request in planner.asked} == {_STRICT.to_request()}
    (graph, options, _), *_ = traced_graphs(layer, *operands_of())
    assert [step.why for step in decide(graph, options).steps] == ["requested"]
    (graph, options, _), *_ = traced_graphs(conv_layer, *operands_of())
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
        lambda *xs: conv_layer(*xs, plan=plan), *operands_of()
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
    (graph, options, _), *_ = traced_graphs(conv_layer, *operands_of())
    _choose(graph, implementation="xla", xla_us=3.0)
    planner.refused = {"conv_fprop"}
    decision = decide(graph, options)
    assert decision.why is None
    assert decision.reasons == ("no engine for conv_fprop",)


def test_nothing_is_tuned_where_there_is_no_contraction() -> None:
    decision = decide(_part("reduction"), Options())
    assert (decision.steps, decision.why, decision.reasons) == ((), None, ())


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
    (graph, _, _), *_ = traced_graphs(conv_layer, *operands_of())
    _choose(graph, implementation="cudnn", **fields)
    for _ in range(2):
        assert [request for _, request in calls_of(conv_layer, *operands_of())] == [""]
    messages = [r.getMessage() for r in caplog.records]
    (message,) = (each for each in messages if "stale" in each)
    assert f"): the measured choice is stale and ignored: {why}" in message


@pytest.mark.parametrize("is_here", [True, False])
def test_a_place_in_the_list_of_a_gpu_names_no_plan_for_one_elsewhere(
    is_here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place = '{"engine":45,"nth":1,"variant":0}'
    (graph, options, _), *_ = traced_graphs(conv_layer, *operands_of())
    (part,) = partition(graph)
    gpu: Any = SimpleNamespace(
        target=H200,
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

    gpu: Any = SimpleNamespace(target=H200, is_here=is_here, plan=plan)
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

    gpu: Any = SimpleNamespace(target=H200, is_here=True, plan=plan)
    allowed = PlanOptions(denied_engines=(native.CUBLASLT_ENGINE,))
    traced = traced_graphs(lambda *x: _gelu(*x, plan=allowed), *_gelu_operands())
    ((graph, options, _),) = traced
    (part,) = partition(graph)
    decision.decide_part(part, gpu, replace(options, implementation="cudnn"))
    assert asked == [allowed.to_request()]


def test_sums_without_a_contraction_go_to_cudnn_where_that_was_measured() -> None:
    part = _part("reduction")
    assert [nodes[0] for nodes, _ in calls_of(gradient_of, *operands_of())] == [
        "conv_fprop",
        "conv_wgrad",
        "conv_dgrad",
    ]
    _choose(part, implementation="cudnn", plan=_PIN)
    calls = calls_of(gradient_of, *operands_of())
    assert (["silu_grad", "identity", "add"], _PIN) in calls


def test_a_choice_for_another_gpu_or_cudnn_is_not_looked_at() -> None:
    (graph, options, _), *_ = traced_graphs(conv_layer, *operands_of())
    other = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=92000)
    choice = Choice(op="", operands="", implementation="xla")
    choices.table().add({key_of(graph, other): choice})
    assert decide(graph, options).steps


def test_options_without_a_gpu_decide_nothing_by_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (graph, _, _), *_ = traced_graphs(conv_layer, *operands_of())
    _choose(graph, implementation="xla")
    monkeypatch.setattr(devices, "local_target", lambda: None)
    (step,) = decide(graph, Options()).steps
    assert step.plan is None
    assert step.rewrite is not None
