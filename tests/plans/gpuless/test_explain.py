# SPDX-License-Identifier: Apache-2.0
"""Tests that `plans.explain` finds cuDNN's refusals, and changes that cuDNN takes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.plans import ExplainedCall, PlanOptions

_S = jax.ShapeDtypeStruct


def _attention_gradient(**options: Any) -> Callable[..., Any]:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax_cudnn.sdpa(x, x, x, **options).astype(jnp.float32))

    return jax.grad(loss)


def _by_op(device: str, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    told = plans.explain(function, *args, device=device)
    assert told.cudnn_version == "9.27.0"
    return {call.op: call for call in told.calls}


def _check(call: ExplainedCall, *reasons: str, change: str) -> None:
    """Assert that it is refused for these reasons, and what would work."""
    assert call.is_refused
    _check_reasons(call, *reasons, change=change)


def _check_reasons(call: ExplainedCall, *reasons: str, change: str) -> None:
    given = [reason for attempt in call.attempts for reason in attempt.reasons]
    for reason in reasons:
        assert any(reason in each for each in given), given
    assert call.change == change
    assert call.change_plan is not None
    assert call.change_plan.startswith("eng")


def test_the_gradient_of_f32_attention_needs_16_bits() -> None:
    calls = _by_op("H200", _attention_gradient(), _S((2, 129, 4, 64), jnp.float32))
    cast = "cast the operands from f32 to bf16"
    assert not calls["sdpa"].is_refused
    _check_reasons(calls["sdpa"], "up to twice XLA's time", change=cast)
    _check(calls["sdpa_backward"], "takes bf16, f16", change=cast)


def test_the_gradient_of_large_heads_needs_hopper() -> None:
    x = _S((2, 129, 4, 192), jnp.bfloat16)
    calls = _by_op("A100", _attention_gradient(), x)
    assert calls["sdpa"].implementation == "cudnn"
    newer = "run it on sm_90 (H100, GH200, H200)"
    hidden = "hidden_dim should be less than or equal to 128"
    _check(calls["sdpa_backward"], hidden, change=newer)
    assert _by_op("H100", _attention_gradient(), x)["sdpa_backward"].plan is not None


def test_turing_is_told_why_not() -> None:
    x = _S((2, 129, 4, 64), jnp.float16)
    calls = _by_op("T4", _attention_gradient(implementation="cudnn"), x)
    for call in calls.values():
        assert call.implementation == "none"
        _check(
            call,
            "Tesla T4 is sm_75; cuDNN's attention needs sm_80 (Ampere) or newer",
            change="run it on sm_80 (A30, A100) and newer",
        )


_PADDED = "pad head size of query and key from 192 to 256 and head size of value from"


# What the gradient takes of query's and value's head sizes, by cuDNN 9.27.
@pytest.mark.parametrize(
    ("device", "d", "e", "change"),
    [
        ("B200", 192, 192, _PADDED),
        ("B200", 192, 128, None),
        ("B200", 256, 256, None),
        ("L4", 136, 136, "run it on sm_90 (H100, GH200, H200)"),
    ],
)
def test_head_sizes_of_the_gradient(
    device: str, d: int, e: int, change: str | None
) -> None:
    def loss(q: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jax_cudnn.sdpa(q, q, v).astype(jnp.float32))

    operands = (_S((2, 256, 4, size), jnp.bfloat16) for size in (d, e))
    calls = _by_op(device, jax.grad(loss, (0, 1)), *operands)
    assert calls["sdpa"].implementation == "cudnn"
    backward = calls["sdpa_backward"]
    assert backward.implementation == ("cudnn" if change is None else "xla")
    assert backward.change.startswith(change or "")
    assert bool(backward.change) == (change is not None)


@pytest.mark.parametrize("device", ["H200", "A100"])
def test_small_groups_are_merged_where_cudnn_has_no_engine(device: str) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax_cudnn.conv(
            *(x, w, (1, 1), "SAME"),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=6,
        )
        return jnp.sum(y.astype(jnp.float32))

    operands = _S((2, 15, 17, 24), jnp.bfloat16), _S((3, 3, 4, 24), jnp.bfloat16)
    calls = _by_op(device, jax.grad(loss, (0, 1)), *operands)
    for kind in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert calls[kind].implementation == "cudnn"
        assert "6 groups are merged into 1" in calls[kind].notes


def test_f8_needs_ada_or_16_bits() -> None:
    operands = _S((32, 64), jnp.float8_e4m3fn), _S((64, 48), jnp.float8_e4m3fn)
    function = functools.partial(
        jax_cudnn.matmul, preferred_element_type=jnp.bfloat16, activation="relu"
    )
    (call,) = _by_op("RTX 3090", function, *operands).values()
    cast = "cast the operands from f8_e4m3fn to bf16"
    _check(call, "sm_86 has no f8 tensor cores; sm_89 has", change=cast)
    (call,) = _by_op("RTX 4090", function, *operands).values()
    assert call.implementation == "cudnn"


def test_options_that_allow_no_plan_are_named() -> None:
    x = _S((2, 129, 4, 64), jnp.bfloat16)
    options = PlanOptions(workspace_limit_bytes=7)
    call = _by_op("H200", _attention_gradient(plan=options), x)["sdpa_backward"]
    _check(
        call,
        "bytes of workspace, more than the limit of 7",
        change="raise workspace_limit_bytes to 268576",
    )
    enough = PlanOptions(workspace_limit_bytes=268576)
    call = _by_op("H200", _attention_gradient(plan=enough), x)["sdpa_backward"]
    assert call.workspace_bytes == 268576
    matmul = functools.partial(
        jax_cudnn.matmul, plan=PlanOptions(required_notes=("FFT",))
    )
    (call,) = _by_op("L4", matmul, *[_S((64, 64), jnp.bfloat16)] * 2).values()
    change = "leave out required_notes=('FFT',)"
    _check(call, "lacks the note FFT, which is required", change=change)


# Queries and keys whose sizes are rounded up, to 64 and to 128 on an H200.
@pytest.mark.parametrize(
    ("device", "s", "t", "k", "law"),
    [
        ("H200", 1024, 1024, 8, 2 * 16 * 1024 * 1024),
        ("H200", 1030, 900, 8, 2 * 16 * 1088 * 1024),
        # And the gradients of keys and values for each query head.
        ("H200", 1024, 1024, 2, 2 * 16 * 1024 * 1024 + 2 * 16 * 1024 * (128 + 64)),
        ("A100", 1030, 900, 8, 2 * 16 * 1088 * 960),
        ("B200", 1030, 900, 8, 0),
    ],
)
def test_a_deterministic_gradient_says_its_memory_before_it_runs(
    device: str, s: int, t: int, k: int, law: int
) -> None:
    """docs/attention.md has the law."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jax_cudnn.sdpa(q, k, v).astype(jnp.float32))

    sizes = ((2, s, 8, 128), (2, t, k, 128), (2, t, k, 64))
    operands = [_S(size, jnp.bfloat16) for size in sizes]
    gradient = jax.grad(loss, (0, 1, 2))
    found = {}
    for deterministic in (False, True):
        with plans.using(PlanOptions(deterministic=deterministic)):
            call = _by_op(device, gradient, *operands)["sdpa_backward"]
        with plans.using(PlanOptions(deterministic=deterministic), device=device):
            (_, inspected) = plans.inspect(gradient, *operands).calls
        assert call.workspace_bytes == inspected.workspace_bytes
        assert f"{call.workspace_bytes}" in str(inspected).replace(",", "")
        found[deterministic] = call.workspace_bytes
    # A number for each query and head besides, and what cuDNN aligns.
    rows = 4 * 16 * s
    assert law + rows <= found[True] <= law + rows + 256
    assert (found[True] > found[False]) == (device != "B200")


def test_the_small_cudnn_is_told_from_the_full_one() -> None:
    operands = [_S((64, 64), jnp.bfloat16)] * 2
    told = plans.explain(jax_cudnn.matmul, *operands, device="H200")
    assert "Asked of the small cuDNN" in told.notes[0]
