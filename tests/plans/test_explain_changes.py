# SPDX-License-Identifier: Apache-2.0
"""Tests which changes `plans.explain` tries of a call that cuDNN refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, is_anchor
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.plans import PlanOptions
from jax_cudnn.plans.changes import changes_of
from tests.plans.planning import FakeProcess, dtypes_in, graph_in, matmul_call, refuse


def _change(fake: FakeProcess, call: tuple[Any, ...], device: str = "H200") -> str:
    calls = plans.explain(*call, device=device).calls
    (found,) = [each for each in calls if each.attempts]
    assert found.implementation != "cudnn"
    assert bool(found.change) == (found.change_plan is not None)
    del fake
    return found.change


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_operands_are_cast_to_16_bits(fake: FakeProcess, dtype: str) -> None:
    refuse(fake, lambda question: dtypes_in(question) != {dtype}, "dtype")
    words = _change(fake, matmul_call(jnp.float8_e4m3fn))
    assert words == f"cast the operands from f8_e4m3fn to {dtype}"


def test_one_option_is_left_out_if_that_is_enough(fake: FakeProcess) -> None:
    options = PlanOptions(engines=(7,), deterministic=True, workspace_limit_bytes=9)

    def is_refused(question: dict[str, Any]) -> bool:
        return '"deterministic":true' in question["request"]

    refuse(fake, is_refused, "not deterministic")
    call = matmul_call(jnp.bfloat16, plan=options)
    assert _change(fake, call) == "leave out deterministic=True"
    refuse(fake, lambda question: bool(question["request"]), "none is allowed")
    assert _change(fake, matmul_call(jnp.float16, plan=options)) == (
        "leave out workspace_limit_bytes, deterministic, engines"
    )


def test_an_option_that_allows_more_is_not_left_out(fake: FakeProcess) -> None:
    note = "REDUCED_PRECISION_REDUCTION"
    options = PlanOptions(reduced_precision_reduction=True, required_notes=(note,))

    def is_refused(question: dict[str, Any]) -> bool:
        return f'"required_notes":["{note}"]' in question["request"]

    refuse(fake, is_refused, "none has it")
    words = _change(fake, matmul_call(jnp.bfloat16, plan=options))
    assert words == f"leave out required_notes=('{note}',)"


def test_the_workspace_that_would_do_is_named(fake: FakeProcess) -> None:
    def is_refused(question: dict[str, Any]) -> bool:
        return '"workspace_limit_bytes":9}' in question["request"]

    refuse(fake, is_refused, "too much")
    options = PlanOptions(engines=(2,), workspace_limit_bytes=9)
    words = _change(fake, matmul_call(jnp.bfloat16, plan=options))
    assert words == "raise workspace_limit_bytes to 4321"


def test_less_precision_is_allowed(fake: FakeProcess) -> None:
    with jax.default_matmul_precision("highest"):
        words = _change(fake, matmul_call(jnp.float32))
    assert words == 'allow TF32: jax.default_matmul_precision("tensorfloat32")'


def test_f32_attention_is_cast_or_asked_for_by_name(fake: FakeProcess) -> None:
    x = jax.ShapeDtypeStruct((2, 5, 3, 8), jnp.float32)
    assert _change(fake, (jax_cudnn.sdpa, x, x, x)).endswith("from f32 to bf16")
    refuse(fake, lambda question: dtypes_in(question) != {"f32"}, "only f32")
    y = jax.ShapeDtypeStruct((2, 7, 3, 8), jnp.float32)
    words = _change(fake, (jax_cudnn.sdpa, y, y, y))
    assert words == 'pass implementation="cudnn"'


def test_the_gradient_of_the_bias_is_done_without(fake: FakeProcess) -> None:
    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(jax_cudnn.sdpa(x, x, x, bias=bias).astype(jnp.float32))

    (part, options), *_ = [
        (graph, options)
        for graph, options, _ in traced_graphs(
            jax.grad(loss, (0, 1)),
            jax.ShapeDtypeStruct((2, 5, 3, 8), jnp.bfloat16),
            jax.ShapeDtypeStruct((2, 3, 5, 5), jnp.bfloat16),
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
        graph = graph_in(question)
        by_name = {t.name: t.dims for t in graph.tensors}
        return graph.nodes[0].kind == "conv_wgrad" and by_name["grad_w"][1] != 136

    refuse(fake, is_refused, "odd groups")
    operands = (
        jax.ShapeDtypeStruct((2, 5, 11, 390), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, 3, 130, 405), jnp.bfloat16),
    )
    words = _change(fake, (jax.grad(loss, 1), *operands))
    assert words == (
        "pad channels in per group from 130 to 136 and channels out per group from 135 "
        "to 136"
    )


def test_newer_gpus_are_named(fake: FakeProcess) -> None:
    def is_refused(question: dict[str, Any]) -> bool:
        return question["target"]["sm_version"] not in allowed

    refuse(fake, is_refused, "too old")
    allowed = {90, 100}
    assert _change(fake, matmul_call(jnp.bfloat16), "A100") == (
        "run it on sm_90 (H100, GH200, H200), sm_100 (B200, GB200)"
    )
    allowed = {89, 90, 100, 120}
    words = _change(fake, matmul_call(jnp.float16), "A100")
    assert words == "run it on sm_89 (L4, RTX 4090, L40S) and newer"
    allowed = {80}
    assert _change(fake, matmul_call(jnp.float16, activation="relu"), "L4") == ""


def test_a_change_and_a_newer_gpu_together(fake: FakeProcess) -> None:
    def is_refused(question: dict[str, Any]) -> bool:
        return question["target"]["sm_version"] < 100 or dtypes_in(question) != {"bf16"}

    refuse(fake, is_refused, "no")
    words = _change(fake, matmul_call(jnp.float32), "A100")
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
    function, *operands = matmul_call(dtype, **keywords)
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
        operands = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        return _products(function, *operands)[0]

    m, r, n = (-(-size // multiple) * multiple for size in (23, 11, 37))
    rounded = [v for v in changes_of(part(23, 11, 37), Options()) if "pad" in v.words]
    assert part(m, r, n) in [v.part for v in rounded]
    words = f"pad rows from 23 to {m} and columns from 37 to {n} and contraction from"
    assert f"{words} 11 to {r}" in [v.words for v in rounded]
