# SPDX-License-Identifier: Apache-2.0
"""Does `plans.inspect` see every call, and answer where things are missing?"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import LibraryError, plans
from jax_cudnn.lowering import cuda

_X = jax.ShapeDtypeStruct((2, 5, 3, 8), jnp.bfloat16)


def _loss(x: jax.Array, implementation: str = "auto") -> jax.Array:
    output = jax_cudnn.sdpa(x, x, x, implementation=implementation)
    return jnp.sum(output.astype(jnp.float32))


def test_a_gradient_is_a_forward_and_a_backward_call() -> None:
    report = plans.inspect(jax.grad(_loss), _X)
    assert [(call.op, call.count) for call in report.calls] == [
        ("sdpa", 1),
        ("sdpa_backward", 1),
    ]
    assert report.calls[0].shapes == ", ".join(["bf16[2,5,3,8]"] * 3)
    assert "XLA only (no CUDA device)" in str(report)
    assert "sdpa, sdpa_backward: this machine has no CUDA device" in str(report)


def test_calls_in_loops_and_forward_mode_are_found() -> None:
    def loop(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax_cudnn.sdpa(carry, carry, carry), None

        return jax.lax.scan(body, x, None, length=3)[0]

    report = plans.inspect(lambda x: jax.jvp(loop, (x,), (x,)), _X)
    assert [call.op for call in report.calls] == ["sdpa", "sdpa:derivative"]


def test_jitted_functions_keep_their_static_arguments() -> None:
    jitted = jax.jit(_loss, static_argnames="implementation")
    (call,) = plans.inspect(jitted, _X, implementation="xla").calls
    assert call.implementation == "xla"
    (call,) = plans.inspect(functools.partial(_loss, implementation="xla"), _X).calls
    assert call.implementation == "xla"


def test_a_missing_library_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise LibraryError("libcudnn.so.9 is not there")

    monkeypatch.setattr(cuda, "local_target", missing)
    monkeypatch.setattr(plans.inspection, "local_target", missing)
    for implementation in ("auto", "cudnn"):
        report = plans.inspect(
            functools.partial(_loss, implementation=implementation), _X
        )
        assert report.calls[0].reasons == ("libcudnn.so.9 is not there",)
        assert "a GPU that cannot be used: libcudnn.so.9 is not there" in str(report)
