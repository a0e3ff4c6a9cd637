# SPDX-License-Identifier: Apache-2.0
"""Tests what `plans.explain` says of refusals, and which changes it tries.

cuDNN's answers are made up here; tests/plans/gpuless/test_explain.py asks the real
cuDNN.
"""

import argparse
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import LibraryError, choices, offline, plans
from jax_cudnn.cli import explain as command
from jax_cudnn.cli import main
from jax_cudnn.cli.calls import argument
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.plans import PlanOptions
from tests.plans.planning import (
    CANDIDATE,
    FakeProcess,
    dtypes_in,
    graph_in,
    matmul_call,
    refusal,
    refuse,
)

# --- what runs ------------------------------------------------------------------------


def test_what_runs_has_its_plan_and_workspace(fake: FakeProcess) -> None:
    told = plans.explain(*matmul_call(jnp.bfloat16), device="H200")
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
    odd = (
        jax.ShapeDtypeStruct((24, 13), jnp.bfloat16),
        jax.ShapeDtypeStruct((13, 40), jnp.bfloat16),
    )
    (call,) = plans.explain(jax_cudnn.matmul, *odd, device="H200").calls
    assert any("padded" in note for note in call.notes)


def test_an_activation_that_is_not_in_the_kernel_is_told(fake: FakeProcess) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(x, w, activation=jnp.log1p)

    operands = matmul_call(jnp.bfloat16)[1:]
    (call,) = plans.explain(function, *operands, device="H200").calls
    assert (call.op, call.implementation) == ("matmul", "cudnn")
    told = "the activation log1p follows the kernel as JAX code: it uses 'log1p'"
    assert call.notes[-1].startswith(told)
    refuse(fake, lambda question: True, "no engine")
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

    operands = (
        *matmul_call(jnp.bfloat16)[1:],
        jax.ShapeDtypeStruct((0, 16), jnp.bfloat16),
    )
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
    told = plans.explain(
        jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32), device="H200"
    )
    assert not told.calls
    assert "no cuDNN calls" in str(told)


# --- what does not, and why -----------------------------------------------------------


def test_every_way_of_rewriting_has_its_own_reasons(fake: FakeProcess) -> None:
    def answer(question: dict[str, Any]) -> dict[str, Any]:
        is_fused = len(graph_in(question).nodes) > 1
        return refusal("no fused engine", "odd") if is_fused else refusal("no engine")

    fake.answer = answer
    call = matmul_call(jnp.bfloat16, activation="gelu")
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
    by_name = matmul_call(jnp.bfloat16, activation="gelu", implementation="cudnn")
    (refused,) = plans.explain(*by_name, device="H200").refused
    assert refused.implementation == "none"


def test_ways_before_the_one_that_runs_are_told(fake: FakeProcess) -> None:
    refuse(fake, lambda question: len(graph_in(question).nodes) > 1, "no fused engine")
    call = matmul_call(jnp.bfloat16, activation="gelu")
    told = plans.explain(*call, device="H200")
    (call,) = told.calls
    assert call.implementation == "cudnn"
    assert [attempt.reasons for attempt in call.attempts] == [("no fused engine",)]
    assert not told.refused
    assert not call.change


def test_a_crash_is_a_reason(fake: FakeProcess) -> None:
    fake.answer = lambda _: {"crash": "SIGSEGV", "message": ""}
    (call,) = plans.explain(*matmul_call(jnp.bfloat16), device="H200").refused
    assert call.attempts[0].reasons == ("cuDNN crashed while it planned: SIGSEGV",)


def test_what_was_measured_to_be_slower_is_told(fake: FakeProcess) -> None:
    call = matmul_call(jnp.bfloat16)
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
    x, factor = (
        jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((2048,), jnp.bfloat16),
    )
    engines = {"layer_norm": 5, "layer_norm_backward": 1}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        (node,) = graph_in(question).nodes
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

_F32 = jax.ShapeDtypeStruct((2, 5, 3, 8), jnp.float32)
_IMAGE = jax.ShapeDtypeStruct((2, 9, 7, 16), jnp.bfloat16)


def _depthwise(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jax_cudnn.conv(
        *(x, w, (1, 1), "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=16,
        **options,
    )


# Calls that "auto" leaves to XLA, though cuDNN plans them by name.
_LEFT = {
    "a norm": (jax_cudnn.layer_norm, jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)),
    "a pool": (functools.partial(jax_cudnn.max_pool, window_shape=(2, 2)), _IMAGE),
    "f32 attention": (jax_cudnn.sdpa, *[_F32] * 3),
    "a depthwise convolution": (
        _depthwise,
        _IMAGE,
        jax.ShapeDtypeStruct((3, 3, 1, 16), jnp.bfloat16),
    ),
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
    refuse(fake, lambda question: True, "no engine")
    by_name = functools.partial(function, implementation="cudnn")
    (call,) = plans.explain(by_name, *operands, device="A100").refused
    assert call.implementation == "none"
    assert "refused" in str(plans.explain(by_name, *operands, device="A100"))


def test_a_precision_that_cudnn_lacks_is_xlas_unless_asked_for_by_name(
    fake: FakeProcess,
) -> None:
    del fake
    told = plans.explain(*matmul_call(jnp.float32, precision="highest"), device="H200")
    (call,) = told.calls
    assert (call.implementation, call.is_refused) == ("xla", False)
    assert "  left to XLA (by the precision asked for):\n" in str(told)
    by_name = matmul_call(jnp.float32, precision="highest", implementation="cudnn")
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
    refuse(fake, lambda question: True, "no engine")
    status, told = run("matmul", "bf16[24,16]", "bf16[16,40]")
    assert (status, "refused" in told) == (1, True)


# --- the GPU --------------------------------------------------------------------------


def test_a_scope_names_the_gpu_and_an_argument_goes_before_it(
    fake: FakeProcess,
) -> None:
    with plans.using(device="A100"):
        assert (
            plans.explain(*matmul_call(jnp.bfloat16)).device == "NVIDIA A100-SXM4-80GB"
        )
        told = plans.explain(*matmul_call(jnp.bfloat16), device="rtx 4090")
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
        plans.explain(*matmul_call(jnp.bfloat16))
    with pytest.raises(ValueError, match="device='H2000' is not a GPU"):
        plans.explain(*matmul_call(jnp.bfloat16), device="H2000")
    fake.missing = "no libcudnn"
    with pytest.raises(LibraryError, match="gpuless"):
        plans.explain(*matmul_call(jnp.bfloat16), device="H200")


# --- as data and on the command line --------------------------------------------------


def test_an_explanation_is_plain_data(fake: FakeProcess) -> None:
    refuse(fake, lambda question: dtypes_in(question) != {"bf16"}, "dtype")
    told = plans.explain(*matmul_call(jnp.float32), device="H200")
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
    assert _array("f32[]") == jax.ShapeDtypeStruct((), jnp.float32)
    for name in ("bf16", "bfloat16"):
        assert _array(f"{name}[4,8]") == jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
    assert _array("half[3]") == jax.ShapeDtypeStruct((3,), jnp.float16)
    assert _array("float8_e5m2[3]") == jax.ShapeDtypeStruct((3,), jnp.float8_e5m2)
    assert _array("uint8[3]") == jax.ShapeDtypeStruct((3,), jnp.uint8)
    assert _array(" f8_e4m3fn[2, 3,5] ") == jax.ShapeDtypeStruct(
        (2, 3, 5), jnp.float8_e4m3fn
    )
