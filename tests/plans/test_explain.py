# SPDX-License-Identifier: Apache-2.0
"""Tests what `plans.explain` says of refusals, and which changes it tries.

cuDNN's answers are made up here; tests/plans/gpuless/test_explain.py asks the real
cuDNN.
"""

import argparse
import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import LibraryError, choices, offline, plans
from jax_cudnn.cli import explain as command
from jax_cudnn.cli import main
from jax_cudnn.cli.calls import argument
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, from_json, is_anchor
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import devices, traced_graphs
from jax_cudnn.plans import PlanOptions
from jax_cudnn.plans.changes import changes_of
from tests.plans.planning import CANDIDATE, FakeProcess, fake_process, refusal

_S = jax.ShapeDtypeStruct


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcess]:
    monkeypatch.setattr(devices, "local_target", lambda: None)
    with fake_process(monkeypatch) as made:
        yield made


def _graph(question: dict[str, Any]) -> Graph:
    return from_json(question["graph"])


def _refuse(fake: FakeProcess, condition: Any, *reasons: str) -> None:
    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if condition(question):
            return refusal(*reasons)
        return {"candidates": [CANDIDATE]}

    fake.answer = answer


def _dtypes(question: dict[str, Any]) -> set[str]:
    return {tensor.dtype for tensor in _graph(question).input_tensors}


def _matmul(dtype: Any, **options: Any) -> tuple[Any, ...]:
    function = functools.partial(jax_cudnn.matmul, **options)
    return function, _S((24, 16), dtype), _S((16, 40), dtype)


# --- what runs ------------------------------------------------------------------------


def test_what_runs_has_its_plan_and_workspace(fake: FakeProcess) -> None:
    told = plans.explain(*_matmul(jnp.bfloat16), device="H200")
    assert (told.device, told.cudnn_version) == ("NVIDIA H200", "9.19.0")
    (call,) = told.calls
    assert (call.op, call.implementation, call.count) == ("matmul", "cudnn", 1)
    assert (call.plan, call.workspace_bytes) == ("eng2", 4321)
    assert not call.attempts
    assert not told.refused
    lines = str(told).splitlines()
    assert lines[0] == "cuDNN 9.19.0 on NVIDIA H200"
    assert lines[2] == "matmul(bf16[1,24,16], bf16[1,16,40])"
    assert lines[3] == "  runs in cuDNN: eng2, workspace 4,321 B"
    assert lines[4].startswith("Asked of the small cuDNN")
    assert lines[5].startswith("Planned without the GPU")
    assert len(fake.asked) == 1


def test_what_is_done_around_the_kernel_is_told(fake: FakeProcess) -> None:
    del fake
    odd = _S((24, 13), jnp.bfloat16), _S((13, 40), jnp.bfloat16)
    (call,) = plans.explain(jax_cudnn.matmul, *odd, device="H200").calls
    assert any("padded" in note for note in call.notes)


def test_an_activation_that_is_not_in_the_kernel_is_told(fake: FakeProcess) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation=jnp.log1p)

    operands = _matmul(jnp.bfloat16)[1:]
    (call,) = plans.explain(function, *operands, device="H200").calls
    assert (call.op, call.implementation) == ("matmul", "cudnn")
    told = "the activation log1p follows the kernel as JAX code: it uses 'log1p'"
    assert call.notes[-1].startswith(told)
    _refuse(fake, lambda question: True, "no engine")
    (call,) = plans.explain(function, *operands, device="A100 40GB").calls
    assert call.implementation == "xla"
    assert call.notes[-1].startswith(told)


def test_what_is_not_meant_for_cudnn_is_xlas_and_not_refused(fake: FakeProcess) -> None:
    def function(x: jax.Array, w: jax.Array, empty: jax.Array) -> Any:
        product = functools.partial(jax_cudnn.matmul, activation="gelu")
        asked = jax_cudnn.matmul(x, w, implementation="xla")
        tangent = jax.jvp(lambda x: product(x, w), (x,), (x,))
        gradient = jax.grad(lambda x: product(x, w).astype(jnp.float32).sum())(x)
        return asked, tangent, gradient, jax_cudnn.matmul(empty, w)

    operands = (*_matmul(jnp.bfloat16)[1:], _S((0, 16), jnp.bfloat16))
    told = plans.explain(function, *operands, device="H200")
    by_xla = [call for call in told.calls if call.implementation == "xla"]
    assert {note for call in by_xla for note in call.notes} == {
        'implementation="xla" was asked for',
        "forward mode and second order run the reference",
        "a tensor has no elements: nothing to launch",
        "elementwise work and sums around the contractions, which XLA fuses",
    }
    assert not told.refused
    assert "runs in XLA" in str(told)
    assert fake.asked


def test_a_function_without_calls_has_nothing_to_explain(fake: FakeProcess) -> None:
    del fake
    told = plans.explain(jnp.sin, _S((3,), jnp.float32), device="H200")
    assert not told.calls
    assert "no cuDNN calls" in str(told)


# --- what does not, and why -----------------------------------------------------------


def test_every_way_of_rewriting_has_its_own_reasons(fake: FakeProcess) -> None:
    def answer(question: dict[str, Any]) -> dict[str, Any]:
        is_fused = len(_graph(question).nodes) > 1
        return refusal("no fused engine", "odd") if is_fused else refusal("no engine")

    fake.answer = answer
    call = _matmul(jnp.bfloat16, activation="gelu")
    told = plans.explain(*call, device="H200")
    (refused,) = told.refused
    assert [attempt.reasons for attempt in refused.attempts] == [
        ("no fused engine", "odd"),
        ("no engine",),
    ]
    assert refused.attempts[0].way == "as one kernel"
    assert "computed by XLA" in refused.attempts[1].way
    assert (refused.implementation, refused.change) == ("xla", "")
    text = str(told)
    assert "  refused (as one kernel):\n    - no fused engine\n    - odd\n" in text
    assert "what would work: none of the changes that were tried" in text
    by_name = _matmul(jnp.bfloat16, activation="gelu", implementation="cudnn")
    (refused,) = plans.explain(*by_name, device="H200").refused
    assert refused.implementation == "none"


def test_ways_before_the_one_that_runs_are_told(fake: FakeProcess) -> None:
    _refuse(fake, lambda question: len(_graph(question).nodes) > 1, "no fused engine")
    call = _matmul(jnp.bfloat16, activation="gelu")
    told = plans.explain(*call, device="H200")
    (call,) = told.calls
    assert call.implementation == "cudnn"
    assert [attempt.reasons for attempt in call.attempts] == [("no fused engine",)]
    assert not told.refused
    assert not call.change


def test_a_crash_is_a_reason(fake: FakeProcess) -> None:
    fake.answer = lambda _: {"crash": "SIGSEGV", "message": ""}
    (call,) = plans.explain(*_matmul(jnp.bfloat16), device="H200").refused
    assert call.attempts[0].reasons == ("cuDNN crashed while it planned: SIGSEGV",)


def test_what_was_measured_to_be_slower_is_told(fake: FakeProcess) -> None:
    call = _matmul(jnp.bfloat16)
    (graph, _, _), *_ = traced_graphs(*call)
    key = choices.key_of(graph, offline.find("H200").target(91900))
    slow = {"implementation": "xla", "cudnn_us": 9.5, "xla_us": 3.25}
    choices.table().add({key: choices.Choice(op="", operands="", **slow)})
    told = plans.explain(*call, device="H200")
    (left,) = told.calls
    (attempt,) = left.attempts
    assert (attempt.way, attempt.is_refusal) == ("by measurement", False)
    assert "XLA was measured to be faster: 3.2 µs, cuDNN 9.5 µs" in attempt.reasons[0]
    assert left.change == 'pass implementation="cudnn"'
    assert left.change_plan == "eng2"
    assert len(fake.asked) == 1
    assert not told.refused
    assert (
        "  runs in XLA\n"
        "  left to XLA (by measurement):\n"
        "    - XLA was measured to be faster: 3.2 µs, cuDNN 9.5 µs\n"
        '  what would run it in cuDNN: pass implementation="cudnn" (then eng2)\n'
    ) in str(told)


def test_a_first_plan_of_a_slow_engine_leaves_a_norm_to_xla(fake: FakeProcess) -> None:
    x, factor = _S((8192, 2048), jnp.bfloat16), _S((2048,), jnp.bfloat16)
    engines = {"layer_norm": 5, "layer_norm_backward": 1}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        (node,) = _graph(question).nodes
        return {"candidates": [{**CANDIDATE, "engine": engines[node.kind]}]}

    fake.answer = answer

    def runs(implementation: str, **options: Any) -> list[Any]:
        def loss(*xs: Any) -> Any:
            y = jax_cudnn.layer_norm(*xs, implementation=implementation, **options)
            return y.astype(jnp.float32).sum()

        gradient = jax.grad(loss, (0, 1, 2))
        told = plans.explain(gradient, x, factor, factor, device="H200")
        assert len(told.calls) == 2
        return list(told.calls)

    forward, backward = runs("auto")
    assert (forward.implementation, backward.implementation) == ("cudnn", "xla")
    (attempt,) = backward.attempts
    assert "of engine 1, which XLA's code is faster than" in attempt.reasons[0]
    assert [call.implementation for call in runs("cudnn")] == ["cudnn"] * 2
    chosen = PlanOptions(engines=(1, 5))
    assert [call.implementation for call in runs("auto", plan=chosen)] == ["cudnn"] * 2


# --- what is left to XLA on purpose ---------------------------------------------------

_F32 = _S((2, 5, 3, 8), jnp.float32)
_IMAGE = _S((2, 9, 7, 16), jnp.bfloat16)


def _depthwise(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jax_cudnn.conv(
        *(x, w, (1, 1), "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=16,
        **options,
    )


# Calls that "auto" leaves to XLA, though cuDNN plans them by name.
_LEFT = {
    "a norm": (jax_cudnn.layer_norm, _S((32, 64), jnp.bfloat16)),
    "a pool": (functools.partial(jax_cudnn.max_pool, window_shape=(2, 2)), _IMAGE),
    "f32 attention": (jax_cudnn.sdpa, *[_F32] * 3),
    "a depthwise convolution": (_depthwise, _IMAGE, _S((3, 3, 1, 16), jnp.bfloat16)),
}


@pytest.mark.parametrize("name", _LEFT)
def test_what_is_left_to_xla_on_purpose_is_not_refused(
    fake: FakeProcess, name: str
) -> None:
    function, *operands = _LEFT[name]
    told = plans.explain(function, *operands, device="H200")
    (call,) = told.calls
    assert (call.implementation, call.is_refused) == ("xla", False)
    assert not any(attempt.is_refusal for attempt in call.attempts)
    assert call.change_plan == "eng2"
    for absent in ("refused", "what would work"):
        assert absent not in str(told)
    # By name, it is refused where cuDNN cannot.
    _refuse(fake, lambda question: True, "no engine")
    by_name = functools.partial(function, implementation="cudnn")
    (call,) = plans.explain(by_name, *operands, device="A100").refused
    assert call.implementation == "none"
    assert "refused" in str(plans.explain(by_name, *operands, device="A100"))


def test_a_precision_that_cudnn_lacks_is_xlas_unless_asked_for_by_name(
    fake: FakeProcess,
) -> None:
    del fake
    told = plans.explain(*_matmul(jnp.float32, precision="highest"), device="H200")
    (call,) = told.calls
    assert (call.implementation, call.is_refused) == ("xla", False)
    assert "  left to XLA (by the precision asked for):\n" in str(told)
    by_name = _matmul(jnp.float32, precision="highest", implementation="cudnn")
    told = plans.explain(*by_name, device="H200")
    (call,) = told.refused
    assert call.implementation == "none"
    assert "  refused (by the precision asked for):\n" in str(told)


def test_the_command_ends_with_1_for_what_is_refused_alone(
    fake: FakeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(function: str, *operands: str) -> tuple[int, str]:
        text = ["explain", f"jax_cudnn:{function}", "--device", "H200", "--args"]
        return main([*text, *operands]), capsys.readouterr().out

    status, told = run("layer_norm", "bf16[32,64]")
    assert (status, "refused" in told) == (0, False)
    _refuse(fake, lambda question: True, "no engine")
    status, told = run("matmul", "bf16[24,16]", "bf16[16,40]")
    assert (status, "refused" in told) == (1, True)


# --- what would work ------------------------------------------------------------------


def _change(fake: FakeProcess, call: tuple[Any, ...], device: str = "H200") -> str:
    calls = plans.explain(*call, device=device).calls
    (found,) = [each for each in calls if each.attempts]
    assert found.implementation != "cudnn"
    assert bool(found.change) == (found.change_plan is not None)
    del fake
    return found.change


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_operands_are_cast_to_16_bits(fake: FakeProcess, dtype: str) -> None:
    _refuse(fake, lambda question: _dtypes(question) != {dtype}, "dtype")
    words = _change(fake, _matmul(jnp.float8_e4m3fn))
    assert words == f"cast the operands from f8_e4m3fn to {dtype}"


def test_one_option_is_left_out_if_that_is_enough(fake: FakeProcess) -> None:
    options = PlanOptions(engines=(7,), deterministic=True, workspace_limit_bytes=9)

    def is_refused(question: dict[str, Any]) -> bool:
        return '"deterministic":true' in question["request"]

    _refuse(fake, is_refused, "not deterministic")
    call = _matmul(jnp.bfloat16, plan=options)
    assert _change(fake, call) == "leave out deterministic=True"
    _refuse(fake, lambda question: bool(question["request"]), "none is allowed")
    assert _change(fake, _matmul(jnp.float16, plan=options)) == (
        "leave out workspace_limit_bytes, deterministic, engines"
    )


def test_an_option_that_allows_more_is_not_left_out(fake: FakeProcess) -> None:
    note = "REDUCED_PRECISION_REDUCTION"
    options = PlanOptions(reduced_precision_reduction=True, required_notes=(note,))

    def is_refused(question: dict[str, Any]) -> bool:
        return f'"required_notes":["{note}"]' in question["request"]

    _refuse(fake, is_refused, "none has it")
    words = _change(fake, _matmul(jnp.bfloat16, plan=options))
    assert words == f"leave out required_notes=('{note}',)"


def test_the_workspace_that_would_do_is_named(fake: FakeProcess) -> None:
    def is_refused(question: dict[str, Any]) -> bool:
        return '"workspace_limit_bytes":9}' in question["request"]

    _refuse(fake, is_refused, "too much")
    options = PlanOptions(engines=(2,), workspace_limit_bytes=9)
    words = _change(fake, _matmul(jnp.bfloat16, plan=options))
    assert words == "raise workspace_limit_bytes to 4321"


def test_less_precision_is_allowed(fake: FakeProcess) -> None:
    with jax.default_matmul_precision("highest"):
        words = _change(fake, _matmul(jnp.float32))
    assert words == 'allow TF32: jax.default_matmul_precision("tensorfloat32")'


def test_f32_attention_is_cast_or_asked_for_by_name(fake: FakeProcess) -> None:
    x = _S((2, 5, 3, 8), jnp.float32)
    assert _change(fake, (jax_cudnn.sdpa, x, x, x)).endswith("from f32 to bf16")
    _refuse(fake, lambda question: _dtypes(question) != {"f32"}, "only f32")
    y = _S((2, 7, 3, 8), jnp.float32)
    words = _change(fake, (jax_cudnn.sdpa, y, y, y))
    assert words == 'pass implementation="cudnn"'


def test_the_gradient_of_the_bias_is_done_without(fake: FakeProcess) -> None:
    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(jax_cudnn.sdpa(x, x, x, bias=bias).astype(jnp.float32))

    (part, options), *_ = [
        (graph, options)
        for graph, options, _ in traced_graphs(
            jax.grad(loss, (0, 1)),
            _S((2, 5, 3, 8), jnp.bfloat16),
            _S((2, 3, 5, 5), jnp.bfloat16),
        )
        if graph.nodes[0].kind == "sdpa_backward"
    ]
    (found,) = [v for v in changes_of(part, options) if "bias" in v.words]
    assert found.words == "do without the gradient of the bias (jax.lax.stop_gradient)"
    assert set(part.outputs) - set(found.part.outputs) == {"grad_bias"}
    assert found.part.inputs == part.inputs
    del fake


def test_channels_of_groups_are_rounded_up(fake: FakeProcess) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax_cudnn.conv(
            *(x, w, (1, 1), "SAME"),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=3,
        )
        return jnp.sum(y.astype(jnp.float32))

    def is_refused(question: dict[str, Any]) -> bool:
        graph = _graph(question)
        by_name = {t.name: t.dims for t in graph.tensors}
        return graph.nodes[0].kind == "conv_wgrad" and by_name["grad_w"][1] != 136

    _refuse(fake, is_refused, "odd groups")
    operands = _S((2, 5, 11, 390), jnp.bfloat16), _S((3, 3, 130, 405), jnp.bfloat16)
    words = _change(fake, (jax.grad(loss, 1), *operands))
    assert words == (
        "pad channels in per group from 130 to 136 and channels out per group from 135 "
        "to 136"
    )


def test_newer_gpus_are_named(fake: FakeProcess) -> None:
    def is_refused(question: dict[str, Any]) -> bool:
        return question["target"]["sm_version"] not in allowed

    _refuse(fake, is_refused, "too old")
    allowed = {90, 100}
    assert _change(fake, _matmul(jnp.bfloat16), "A100") == (
        "run it on sm_90 (H100, GH200, H200), sm_100 (B200, GB200)"
    )
    allowed = {89, 90, 100, 120}
    words = _change(fake, _matmul(jnp.float16), "A100")
    assert words == "run it on sm_89 (L4, RTX 4090, L40S) and newer"
    allowed = {80}
    assert _change(fake, _matmul(jnp.float16, activation="relu"), "L4") == ""


def test_a_change_and_a_newer_gpu_together(fake: FakeProcess) -> None:
    def is_refused(question: dict[str, Any]) -> bool:
        return question["target"]["sm_version"] < 100 or _dtypes(question) != {"bf16"}

    _refuse(fake, is_refused, "no")
    words = _change(fake, _matmul(jnp.float32), "A100")
    cast, run = words.split(" and run it on ")
    assert cast == "cast the operands from f32 to bf16"
    assert run == "sm_100 (B200, GB200) and newer"


_CASTS = {
    "f64": (jnp.float64, {}),
    "f32": (jnp.float32, {"activation": "gelu"}),
    "i8": (jnp.int8, {"preferred_element_type": jnp.int32}),
    "f8": (jnp.float8_e5m2, {"preferred_element_type": jnp.float32}),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", _CASTS)
def test_a_cast_graph_is_what_cast_operands_give(name: str) -> None:
    dtype, keywords = _CASTS[name]
    function, *operands = _matmul(dtype, **keywords)
    (part,) = _products(function, *operands)
    (cast, *_) = [v for v in changes_of(part, Options()) if "to bf16" in v.words]
    assert {t.dtype for t in cast.part.input_tensors} == {"bf16"}
    virtual = {t.name for t in cast.part.tensors} - {*part.inputs, *part.outputs}
    assert {cast.part.tensor(each).dtype for each in virtual} <= {"f32"}


def _products(function: Any, *operands: Any) -> list[Graph]:
    return [
        part
        for graph, _, _ in traced_graphs(function, *operands)
        for part in partition(graph)
        if any(map(is_anchor, part.nodes))
    ]


@pytest.mark.parametrize("multiple", [8, 16])
def test_a_rounded_graph_is_the_graph_of_rounded_operands(multiple: int) -> None:
    def function(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(a, b, bias=bias, activation="gelu")

    def part(m: int, r: int, n: int) -> Graph:
        shapes = (m, r), (r, n), (n,)
        operands = (_S(shape, jnp.bfloat16) for shape in shapes)
        return _products(function, *operands)[0]

    m, r, n = (-(-size // multiple) * multiple for size in (23, 11, 37))
    rounded = [v for v in changes_of(part(23, 11, 37), Options()) if "pad" in v.words]
    assert part(m, r, n) in [v.part for v in rounded]
    words = f"pad rows from 23 to {m} and columns from 37 to {n} and contraction from"
    assert f"{words} 11 to {r}" in [v.words for v in rounded]


# --- the GPU --------------------------------------------------------------------------


def test_a_scope_names_the_gpu_and_an_argument_goes_before_it(
    fake: FakeProcess,
) -> None:
    with plans.using(device="A100"):
        assert plans.explain(*_matmul(jnp.bfloat16)).device == "NVIDIA A100-SXM4-80GB"
        told = plans.explain(*_matmul(jnp.bfloat16), device="rtx 4090")
    assert told.device == "NVIDIA GeForce RTX 4090"
    assert len(fake.asked) == 2


def test_what_is_traced_already_is_explained_for_the_gpu_that_is_named(
    fake: FakeProcess,
) -> None:
    x = jnp.ones((8, 8), jnp.bfloat16)
    traced = jax.jit(lambda x: jax_cudnn.matmul(x, x)).trace(x)
    told = plans.explain(traced, device="A100")
    assert told.device == "NVIDIA A100-SXM4-80GB"
    assert [call.op for call in told.calls] == ["matmul"]
    with pytest.raises(TypeError, match="Traced takes no further arguments; 1 were"):
        plans.explain(traced, x, device="A100")


def test_without_a_gpu_one_is_to_be_named(fake: FakeProcess) -> None:
    with pytest.raises(ValueError, match=r"JAX sees no NVIDIA GPU here.*L4,"):
        plans.explain(*_matmul(jnp.bfloat16))
    with pytest.raises(ValueError, match="device='H2000' is not a GPU"):
        plans.explain(*_matmul(jnp.bfloat16), device="H2000")
    fake.missing = "no libcudnn"
    with pytest.raises(LibraryError, match="gpuless"):
        plans.explain(*_matmul(jnp.bfloat16), device="H200")


# --- as data and on the command line --------------------------------------------------


def test_an_explanation_is_plain_data(fake: FakeProcess) -> None:
    _refuse(fake, lambda question: _dtypes(question) != {"bf16"}, "dtype")
    told = plans.explain(*_matmul(jnp.float32), device="H200")
    data = told.to_json()
    assert json.loads(json.dumps(data)) == data
    assert (data["schema"], data["device"]) == (1, "NVIDIA H200")
    (call,) = data["calls"]
    attempt = {"way": "as one kernel", "reasons": ["dtype"], "is_refusal": True}
    assert call["attempts"] == [attempt]
    assert call["change"] == "cast the operands from f32 to bf16"


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    parsed = parser.parse_args(["explain", *arguments])
    return parsed.run(parsed)


_OPERANDS = ("--args", "bf16[24,16]", "bf16[16,40]")


def test_the_command_prints_text_or_data(
    fake: FakeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("jax_cudnn:matmul", "--device", "H200", *_OPERANDS)
    assert _run(*asked) == 0
    assert "runs in cuDNN: eng2" in capsys.readouterr().out
    assert _run(*asked, "--gradient", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [call["op"] for call in data["calls"]].count("matmul") == 3
    fake.answer = lambda _: refusal("no engine")
    assert _run("jax_cudnn:matmul", "--device", "L4", *_OPERANDS) == 1
    assert "- no engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jax_cudnn.matmul",), "'jax_cudnn.matmul' is not MODULE:FUNCTION"),
        (("jax_cudnn:mul",), "'jax_cudnn:mul' is not there"),
        (("no_such_module:f",), "No module named 'no_such_module'"),
        (("jax_cudnn:__version__",), "is not a function"),
        (("jax_cudnn:matmul", "--args", "bf17[3]"), "'bf17[3]' is not a dtype with"),
        (("jax_cudnn:matmul", "--args", "bf16[3;4]"), "Dtypes are bool, u8"),
        (("jax_cudnn:matmul", "--args", "f17[3]"), "longer names of these, such as bf"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _run(*arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def _array(text: str) -> Any:
    name, value = argument(text)
    assert not name
    return value


def test_operands_are_written_as_jax_prints_them() -> None:
    assert _array("f32[]") == _S((), jnp.float32)
    for name in ("bf16", "bfloat16"):
        assert _array(f"{name}[4,8]") == _S((4, 8), jnp.bfloat16)
    assert _array("half[3]") == _S((3,), jnp.float16)
    assert _array("float8_e5m2[3]") == _S((3,), jnp.float8_e5m2)
    assert _array("uint8[3]") == _S((3,), jnp.uint8)
    assert _array(" f8_e4m3fn[2, 3,5] ") == _S((2, 3, 5), jnp.float8_e4m3fn)
