# SPDX-License-Identifier: Apache-2.0
"""Tests what programs for CUDA contain, lowered on a machine that needs no GPU."""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import LibraryError, UnsupportedError, native, sdpa
from jax_cudnn.choices import Trial
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, Target, from_json
from jax_cudnn.lowering import cuda, decide, decision, devices, scoped
from tests.attention.shared.oracle import SIZES, attention_graph, backward_graph
from tests.common.planner import made_plan
from tests.conftest import Draw
from tests.lowering.cuda_text import calls_in, check_call, text_of

_HOPPER = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)
_Messages = Callable[[], list[str]]
_ORDINAL = 3
_WORKSPACE = 4321
_ALIGNED = {"d": 16, "e": 24}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower as on a machine without a GPU, also where there is one.

    Whatever JAX this is, calls are lowered as for one that repeats none.
    """
    monkeypatch.setattr(cuda, "_REPEATS_STACKED_CALLS", False)
    decision._decide.cache_clear()
    cuda._say_once.cache_clear()
    decision._say_stale_once.cache_clear()
    monkeypatch.setattr(devices, "local_target", lambda: None)


@dataclass
class FakeGpu:
    """A GPU whose planner answers as a test says; remembers what it was asked."""

    target: Target = _HOPPER
    answer: Callable[[Graph], int] = lambda _: _WORKSPACE
    asked: list[tuple[Graph, int]] = field(default_factory=list)

    def plan(self, text: str, *, request: str, device: int) -> native.PlanInfo:
        graph = from_json(text)
        self.asked.append((graph, device))
        return dataclasses.replace(
            made_plan(request), workspace_bytes=self.answer(graph)
        )


@pytest.fixture
def gpu(_no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Lower as on a machine with a GPU, whose plans take 4321 bytes."""
    fake = FakeGpu()
    monkeypatch.setattr(devices, "local_target", lambda: (_ORDINAL, fake.target))
    monkeypatch.setattr(native, "plan", fake.plan)
    return fake


def _operands(draw: Draw, dtype: Any = jnp.bfloat16, **sizes: int) -> list[jax.Array]:
    return [
        draw(axes, dtype, **{**_ALIGNED, **sizes}) for axes in ("bshd", "btkd", "btke")
    ]


def _loss(*operands: Any, **options: Any) -> jax.Array:
    return jnp.sum(sdpa(*operands, **options).astype(jnp.float32))


_by_cudnn = functools.partial(sdpa, implementation="cudnn")


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> _Messages:
    """Return a function that lists what was said, which is said at INFO."""
    caplog.set_level(logging.INFO, "jax_cudnn")

    def listed() -> list[str]:
        records = [r for r in caplog.records if r.name == "jax_cudnn"]
        assert all(r.levelno == logging.INFO for r in records)
        return [r.getMessage() for r in records]

    return listed


# --- without a GPU --------------------------------------------------------------------


def test_attention_is_one_call_and_nothing_else(draw: Draw) -> None:
    text = text_of(functools.partial(sdpa, is_causal=True), *_operands(draw))
    (call,) = calls_in(text)
    check_call(call)
    assert set(call.graph.inputs) == {"query", "key", "value"}
    assert call.graph.outputs == ("output",)
    assert call.graph.tensor("query").dims == (2, 6, 5, 16)
    assert call.graph.tensor("output").order == (0, 2, 1, 3)
    # Neither a copy nor a transposition goes with it.
    assert re.findall(r"stablehlo\.(\w+)", text) == ["custom_call"]
    by_role = dict(zip(call.graph.inputs, call.operands, strict=True))
    assert by_role == {"query": "%arg0", "key": "%arg1", "value": "%arg2"}


def test_a_residual_is_a_second_result_in_f32(draw: Draw) -> None:
    function = functools.partial(sdpa, return_residual=True)
    (call,) = calls_in(text_of(function, *_operands(draw)))
    check_call(call)
    assert call.result_types == ["tensor<2x5x6x24xbf16>", "tensor<2x6x5x1xf32>"]


@pytest.mark.parametrize("repeats", [False, True])
def test_results_lie_behind_a_barrier_for_the_xla_that_repeats_calls(
    repeats: bool, monkeypatch: pytest.MonkeyPatch, draw: Draw
) -> None:
    monkeypatch.setattr(cuda, "_REPEATS_STACKED_CALLS", repeats)
    text = text_of(sdpa, *_operands(draw))
    assert ("optimization_barrier" in text) == repeats


def test_a_gradient_is_two_calls(draw: Draw) -> None:
    text = text_of(jax.grad(_loss, argnums=(0, 1, 2)), *_operands(draw, jnp.float16))
    forward, backward = calls_in(text)
    check_call(forward)
    check_call(backward)
    assert (forward.op, backward.op) == ("sdpa", "sdpa_backward")
    # What the second one reads of the first is what the first one made.
    by_role = dict(zip(backward.graph.inputs, backward.operands, strict=True))
    assert by_role["output"] == "%0#0"
    assert by_role["stats"] == "%0#1"


def test_a_jitted_call_inside_a_program_is_named_in_profiles(draw: Draw) -> None:
    fresh = jax.jit(lambda *x: jax.grad(_loss)(*x))
    lowered = fresh.trace(*_operands(draw)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text(debug_info=True)
    assert "cudnn_sdpa/" in text
    assert "cudnn_sdpa_backward/" in text


@pytest.mark.parametrize("implementation", ["auto", "cudnn"])
def test_auto_and_cudnn_make_the_same_program(implementation: Any, draw: Draw) -> None:
    operands = _operands(draw)
    function = functools.partial(sdpa, implementation=implementation)
    assert text_of(function, *operands) == text_of(sdpa, *operands)


def test_xla_makes_no_call(draw: Draw, messages: _Messages) -> None:
    function = functools.partial(_loss, implementation="xla")
    assert not calls_in(text_of(jax.grad(function), *_operands(draw)))
    assert not messages()


def test_other_platforms_make_no_call(draw: Draw) -> None:
    function = functools.partial(_loss, implementation="cudnn")
    for platform in ("cpu", "tpu", "rocm"):
        text = text_of(jax.grad(function), *_operands(draw), platform=platform)
        assert "jax_cudnn" not in text


def test_forward_mode_calls_cudnn_for_the_value_only(draw: Draw) -> None:
    text = text_of(lambda *x: jax.jvp(sdpa, x, x), *_operands(draw))
    (call,) = calls_in(text)
    assert call.op == "sdpa"
    assert "stablehlo.dot_general" in text


def test_vmap_makes_one_call_with_a_larger_batch(draw: Draw) -> None:
    operands = [jnp.stack([x] * 7) for x in _operands(draw)]
    forward, backward = calls_in(text_of(jax.vmap(jax.grad(_loss)), *operands))
    check_call(forward)
    check_call(backward)
    assert forward.graph.tensor("query").dims == (14, 6, 5, 16)


@pytest.mark.parametrize("axis", ["b", "s", "t", "e"])
def test_empty_tensors_never_reach_cudnn(
    axis: str, draw: Draw, messages: _Messages
) -> None:
    function = functools.partial(_loss, implementation="cudnn")
    text = text_of(jax.grad(function), *_operands(draw, **{axis: 0}))
    assert not calls_in(text)
    assert not messages()


# --- what is added around the call ----------------------------------------------------


def test_head_size_77_is_padded_to_80_and_cut_again(draw: Draw) -> None:
    text = text_of(jax.value_and_grad(_loss), *_operands(draw, d=77, e=77))
    forward, backward = calls_in(text)
    check_call(forward)
    check_call(backward)
    assert forward.result_types[0] == "tensor<2x5x6x80xbf16>"
    assert backward.graph.tensor("grad_query").dims == (2, 6, 5, 80)
    assert "stablehlo.pad" in text
    assert "stablehlo.slice" in text
    assert "-> (tensor<f32> {jax.result_info" in text
    assert "tensor<2x5x6x77xbf16> {jax.result_info" in text


def test_a_mask_becomes_a_bias(draw: Draw) -> None:
    mask = draw("b1st") > 0
    (call,) = calls_in(text_of(functools.partial(sdpa, mask=mask), *_operands(draw)))
    check_call(call)
    assert set(call.graph.inputs) == {"query", "key", "value", "bias"}
    bias = call.graph.tensor("bias")
    assert (bias.dims, bias.dtype) == ((2, 1, 5, 7), "bf16")


@pytest.mark.parametrize("bias", ["b1st", "1hst"])
def test_a_gradient_with_a_bias_is_lowered_inside_shard_map(
    bias: str, draw: Draw
) -> None:
    # Its array work has loops, which are strict about what varies between devices.
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:1], ("x",))
    rows, everywhere = jax.P("x"), jax.P()
    function = jax.shard_map(
        functools.partial(sdpa, implementation="cudnn"),
        mesh=mesh,
        in_specs=(*(rows,) * 3, rows if bias[0] == "b" else everywhere),
        out_specs=rows,
    )
    operands = [*_operands(draw), draw(bias, jnp.bfloat16)]

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(function(*operands).astype(jnp.float32))

    text = text_of(jax.grad(loss, argnums=(0, 1, 2, 3)), *operands)
    forward, backward = calls_in(text)
    check_call(forward)
    check_call(backward)
    assert "stablehlo.while" in text


def test_one_length_brings_the_other(draw: Draw) -> None:
    lengths = jnp.array([3, 6], jnp.int32)
    function = functools.partial(sdpa, key_value_seq_lengths=lengths)
    (call,) = calls_in(text_of(function, *_operands(draw)))
    check_call(call)
    assert {"query_lengths", "key_lengths"} <= set(call.graph.inputs)


# --- refusals -------------------------------------------------------------------------

_SUMMARY = "sdpa(query f32[2, 5, 6, 16], key f32[2, 7, 3, 16], value f32[2, 7, 3, 24])"
_IN_BF16 = _SUMMARY.replace("f32", "bf16")
_SLOW = (
    "cuDNN's f32 attention takes up to twice XLA's time (9.19 on an H200, 4 x 4096 "
    'tokens) and has no gradient; implementation="cudnn" uses it, in memory that does '
    "not grow with s*t"
)
_ADVICE = (
    'Pass implementation="xla" (or "auto") to compute it with XLA, or change the call '
    "as the reasons say."
)


def test_auto_runs_f32_with_xla_and_says_so_once(
    draw: Draw, messages: _Messages
) -> None:
    for _ in range(2):
        assert not calls_in(text_of(sdpa, *_operands(draw, jnp.float32)))
    assert messages() == [f"{_SUMMARY} runs with XLA: {_SLOW}"]


def test_a_program_that_is_only_timed_says_nothing(
    draw: Draw, messages: _Messages
) -> None:
    with scoped(trial=Trial({})):
        assert not calls_in(text_of(sdpa, *_operands(draw, jnp.float32)))
    assert messages() == []


def test_auto_says_so_again_for_another_shape(draw: Draw, messages: _Messages) -> None:
    for t in (7, 11):
        text_of(sdpa, *_operands(draw, jnp.float32, t=t))
    assert len(messages()) == 2


def test_cudnn_runs_f32_forward_and_refuses_its_gradient(draw: Draw) -> None:
    operands = _operands(draw, jnp.float32)
    (call,) = calls_in(text_of(_by_cudnn, *operands))
    check_call(call)
    assert call.graph.tensor("query").dtype == "f32"
    gradient = jax.grad(functools.partial(_loss, implementation="cudnn"))
    with pytest.raises(UnsupportedError) as caught:
        text_of(gradient, *operands)
    assert caught.value.reasons == (
        "query is f32; cuDNN's sdpa_backward takes bf16, f16",
    )


@pytest.mark.usefixtures("x64")
def test_cudnn_refuses_f64_with_all_that_helps(draw: Draw) -> None:
    with pytest.raises(UnsupportedError) as caught:
        text_of(_by_cudnn, *_operands(draw, jnp.float64))
    reason = "query is f64; cuDNN's sdpa takes bf16, f16, f32"
    assert str(caught.value) == (
        f"cuDNN cannot run {_SUMMARY.replace('f32', 'f64')} here:\n  - {reason}\n"
        f"{_ADVICE}"
    )
    assert caught.value.reasons == (reason,)
    assert isinstance(caught.value, NotImplementedError)


# --- with a GPU -----------------------------------------------------------------------


def test_a_plan_gives_the_call_its_workspace(gpu: FakeGpu, draw: Draw) -> None:
    text = text_of(sdpa, *_operands(draw))
    (call,) = calls_in(text)
    check_call(call, _WORKSPACE)
    assert gpu.asked == [(call.graph, _ORDINAL)]
    # The workspace is nobody's result.
    (signature,) = re.findall(r"func public @main\(.*\) -> (.*) \{\n", text)
    assert "ui8" not in signature
    assert "tensor<2x5x6x24xbf16>" in signature


def test_a_plan_without_workspace_has_an_empty_one(gpu: FakeGpu, draw: Draw) -> None:
    gpu.answer = lambda _: 0
    (call,) = calls_in(text_of(sdpa, *_operands(draw)))
    check_call(call, 0)


def test_each_graph_of_a_gradient_has_its_own_workspace(
    gpu: FakeGpu, draw: Draw
) -> None:
    gpu.answer = lambda graph: 10 * len(graph.inputs)
    forward, backward = calls_in(text_of(jax.grad(_loss), *_operands(draw)))
    check_call(forward, 30)
    check_call(backward, 60)


def test_a_graph_is_planned_once(gpu: FakeGpu, draw: Draw) -> None:
    for _ in range(2):
        text_of(sdpa, *_operands(draw))
    assert len(gpu.asked) == 1


def _refuse(*reasons: str) -> Callable[[Graph], int]:
    def answer(graph: Graph) -> int:
        raise UnsupportedError("cuDNN has no plan", reasons)

    return answer


@pytest.mark.parametrize(
    ("given", "expected"),
    [(("engine 8: too wide", "engine 9: too old"), None), ((), ("cuDNN has no plan",))],
)
def test_auto_falls_back_where_cudnn_has_no_plan(
    given: tuple[str, ...],
    expected: tuple[str, ...] | None,
    gpu: FakeGpu,
    draw: Draw,
    messages: _Messages,
) -> None:
    gpu.answer = _refuse(*given)
    assert not calls_in(text_of(sdpa, *_operands(draw)))
    (message,) = messages()
    reasons = "; ".join(expected or given)
    assert message == f"{_IN_BF16} runs with XLA: {reasons}"


def test_cudnn_raises_with_cudnns_own_reasons(gpu: FakeGpu, draw: Draw) -> None:
    gpu.answer = _refuse("engine 8: too wide")
    with pytest.raises(UnsupportedError) as caught:
        text_of(_by_cudnn, *_operands(draw))
    assert str(caught.value).startswith(
        f"cuDNN cannot run {_IN_BF16} here:\n  - engine 8: too wide"
    )


def test_limits_of_the_gpu_are_refused_without_asking_cudnn(
    gpu: FakeGpu, draw: Draw
) -> None:
    gpu.target = dataclasses.replace(_HOPPER, name="Tesla T4", sm_version=75)
    with pytest.raises(UnsupportedError) as caught:
        text_of(_by_cudnn, *_operands(draw))
    assert caught.value.reasons == (
        "Tesla T4 is sm_75; cuDNN's attention needs sm_80 (Ampere) or newer",
    )
    assert not gpu.asked


def _refuse_bias_gradient(graph: Graph) -> int:
    if "grad_bias" in graph.outputs:
        raise UnsupportedError("cuDNN has no plan", ["no dbias engine"])
    return _WORKSPACE


@pytest.mark.parametrize("implementation", ["auto", "cudnn"])
@pytest.mark.usefixtures("without_rules")
def test_a_bias_gradient_without_plan_leaves_the_rest_to_cudnn(
    implementation: Any, gpu: FakeGpu, draw: Draw
) -> None:
    gpu.answer = _refuse_bias_gradient
    operands = (*_operands(draw), draw("1hst", jnp.bfloat16))
    loss = functools.partial(_loss, implementation=implementation)
    text = text_of(jax.grad(loss, argnums=(0, 3)), *operands)
    forward, backward = calls_in(text)
    check_call(forward, _WORKSPACE)
    check_call(backward, _WORKSPACE)
    assert set(backward.graph.outputs) == {"grad_query", "grad_key", "grad_value"}
    assert "bias" in backward.graph.inputs
    assert "stablehlo.dot_general" in text
    asked = ["grad_bias" in graph.outputs for graph, _ in gpu.asked]
    assert asked == [False, True, False]


@pytest.mark.usefixtures("without_rules")
def test_a_bias_gradient_with_a_plan_is_cudnns(gpu: FakeGpu, draw: Draw) -> None:
    operands = (*_operands(draw), draw("1hst", jnp.bfloat16))
    text = text_of(jax.grad(_loss, argnums=3), *operands)
    _, backward = calls_in(text)
    assert "grad_bias" in backward.graph.outputs
    # Those of the loop for rows far from 0; dbias by the reference has two more.
    assert text.count("stablehlo.dot_general") == 5


@pytest.mark.usefixtures("without_rules")
def test_without_a_gpu_the_first_candidate_is_called(draw: Draw) -> None:
    operands = (*_operands(draw), draw("1hst", jnp.bfloat16))
    _, backward = calls_in(text_of(jax.grad(_loss, argnums=3), *operands))
    check_call(backward)
    assert "grad_bias" in backward.graph.outputs


def _no_library(graph: Graph) -> int:
    raise LibraryError("libcudnn.so.9 is missing")


def test_a_missing_library_leaves_auto_to_xla_and_is_an_error_of_cudnn(
    gpu: FakeGpu, draw: Draw, messages: _Messages
) -> None:
    gpu.answer = _no_library
    assert not calls_in(text_of(sdpa, *_operands(draw)))
    (message,) = messages()
    assert message.endswith(" runs with XLA: libcudnn.so.9 is missing")
    with pytest.raises(LibraryError, match=r"^libcudnn\.so\.9 is missing$"):
        text_of(_by_cudnn, *_operands(draw))


def test_a_gpu_that_cannot_be_described_counts_as_a_missing_library(
    draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise LibraryError("the driver is too old")

    monkeypatch.setattr(devices, "local_target", broken)
    assert not calls_in(text_of(sdpa, *_operands(draw)))
    with pytest.raises(LibraryError, match=r"^the driver is too old$"):
        text_of(_by_cudnn, *_operands(draw))


# --- decisions ------------------------------------------------------------------------


def test_decisions_give_their_reasons(gpu: FakeGpu) -> None:
    graph = attention_graph(dtype="bf16")
    by_xla = decide(graph, Options(implementation="xla"))
    assert not by_xla.steps
    assert by_xla.reasons == ('implementation="xla" was asked for',)
    empty = attention_graph(dtype="bf16", sizes={**SIZES, "t": 0})
    assert decide(empty, Options()).reasons == (
        "a tensor has no elements: nothing to launch",
    )
    assert not gpu.asked
    by_cudnn = decide(graph, Options())
    (step,) = by_cudnn.steps
    assert step.rewrite is not None
    assert step.plan is not None
    assert step.plan.workspace_bytes == _WORKSPACE


@pytest.mark.usefixtures("without_rules")
def test_a_decision_keeps_the_reasons_of_candidates_before_it(gpu: FakeGpu) -> None:
    gpu.answer = _refuse_bias_gradient
    forward = attention_graph(dtype="bf16", bias="1hst", with_stats=True)
    decision = decide(backward_graph(forward), Options())
    assert decision.reasons == ("no dbias engine",)
    (step,) = decision.steps
    assert step.rewrite is not None
    assert len(step.rewrite.notes) == 1
