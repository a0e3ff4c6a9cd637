# SPDX-License-Identifier: Apache-2.0
"""Tests products that no graph has: complex ones, integers, ranks, symbolic sizes."""

import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jax_cudnn import UnsupportedError, conv, dot_general, matmul, plans, sdpa
from jax_cudnn.ops.common import plain
from tests.lowering.drop_in import OPS, ROWS_BY_COLUMNS, Function

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _complex(shape: tuple[int, ...], seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", OPS)
def test_complex_operands_have_values_and_gradients(op: str) -> None:
    ours, _, call = OPS[op]
    a, b = _complex((3, 3), 3), _complex((3, 3), 4)

    def run(a: Any, b: Any) -> jax.Array:
        return call(ours, a, b, bias=2.0, activation="tanh")

    first, second = np.asarray(a), np.asarray(b)
    sums = (first * second).sum() if op == "conv" else first @ second
    got = run(a, b)
    np.testing.assert_allclose(got, np.tanh(sums + 2).reshape(got.shape), rtol=1e-12)
    cotangent = _complex(got.shape, 5)
    (grad, _) = jax.vjp(run, a, b)[1](cotangent)
    inner = np.asarray(cotangent) * (1 - np.tanh(sums + 2) ** 2).reshape(got.shape)
    want = inner.sum() * second if op == "conv" else inner @ second.T
    np.testing.assert_allclose(grad, want, rtol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", OPS)
def test_integers_wrap_around_as_lax_s_do(op: str) -> None:
    ours, theirs, call = OPS[op]
    for dtype in (jnp.int8, jnp.uint8, jnp.int32):
        x = jnp.full((3, 3), jnp.iinfo(dtype).max, dtype)
        got = call(ours, x, x)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, call(theirs, x, x))


def test_an_epilogue_of_integers_is_exact_and_one_of_floats_is_in_f32() -> None:
    big = jnp.asarray([[2**25 + 1]], jnp.int32)
    one, more = jnp.ones((1, 1), jnp.int32), jnp.asarray([3], jnp.int32)
    assert int(matmul(big, one, bias=more)[0, 0]) == 2**25 + 4
    halved = matmul(one * 5, one, scale_b=0.5, preferred_element_type=jnp.float32)
    assert float(halved[0, 0]) == 2.5
    rows = jnp.asarray([[1], [3]], jnp.int32)
    scaled = matmul(rows, one, scale_a=rows.astype(jnp.float32) / 2, activation="relu",
                    preferred_element_type=jnp.float32)  # fmt: skip
    np.testing.assert_array_equal(scaled, [[0.5], [4.5]])
    with pytest.raises(TypeError, match=r"^matmul: bias is complex64\[1,1\], but the"):
        matmul(one, one, bias=jnp.ones(1, jnp.complex64))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rank", [0, 4])
def test_convolutions_of_any_number_of_axes(rank: int) -> None:
    rng = np.random.default_rng(6)
    x, w = rng.normal(size=(2, 3, *[2] * rank)), rng.normal(size=(4, 3, *[2] * rank))
    bias, scale = rng.normal(size=4), rng.normal(size=4)

    def run(*operands: Any) -> jax.Array:
        x, w, bias, scale = operands
        return conv(x, w, bias=bias, scale=scale, activation="silu")

    y = scale * np.tensordot(x, w, [range(1, x.ndim)] * 2) + bias
    want = (y / (1 + np.exp(-y))).reshape(2, 4, *[1] * rank)
    operands = tuple(map(jnp.asarray, (x, w, bias, scale)))
    np.testing.assert_allclose(run(*operands), want, rtol=1e-12)
    slope = (1 + y * (1 - 1 / (1 + np.exp(-y)))) / (1 + np.exp(-y))
    grad = jax.grad(lambda *xs: run(*xs).sum(), 1)(*operands)
    want = np.tensordot(slope * scale, x, [[0], [0]])
    np.testing.assert_allclose(grad, want, rtol=1e-10)


def test_cudnn_is_refused_and_auto_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain._say_once.cache_clear()
    caplog.set_level(logging.INFO, "jax_cudnn")
    x = jnp.ones((3, 3), jnp.int32)
    message = (
        "{}: {} is i32[3,3] and {} is i32[3,3], and the result i32. Graphs have "
        "operands of bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8, u8 and results of "
        "bf16, f16, f32, f64, f8_e4m3fn and f8_e5m2, or the integers that sums of i8 "
        'or u8 are. Pass implementation="auto" or "xla" to run XLA\'s code.'
    )
    for op, names in (("matmul", "ab"), ("dot_general", ("lhs", "rhs"))):
        ours, _, call = OPS[op]
        text = re.escape(message.format(op, *names))
        with pytest.raises(UnsupportedError, match=f"^{text}$"):
            call(ours, x, x, implementation="cudnn")
    with pytest.raises(UnsupportedError, match=r"^conv: lhs is f32\[3,3\] and rhs .* "
                       "have one to three spatial axes"):  # fmt: skip
        conv(jnp.ones((3, 3)), jnp.ones((3, 3)), implementation="cudnn")
    with pytest.raises(UnsupportedError, match="must both be i8, both u8, or both fl"):
        dot_general(
            *(x.astype(jnp.int8), x.astype(jnp.uint8), ROWS_BY_COLUMNS),
            implementation="cudnn",
        )
    assert not caplog.records
    for _ in range(2):
        matmul(x, x)
        matmul(x, x, implementation="xla")
    (record,) = caplog.records
    assert record.getMessage().startswith("matmul runs with XLA: a is i32[3,3] and b ")


def test_inspect_lists_no_call_that_is_plain_jax() -> None:
    def run(x: jax.Array) -> jax.Array:
        whole = matmul(x, x)
        return matmul(whole.astype(jnp.float32), jnp.ones((3, 3)))

    report = plans.inspect(run, jax.ShapeDtypeStruct((3, 3), jnp.int32))
    assert [call.op for call in report.calls] == ["matmul"]


def _attention(x: jax.Array, **options: Any) -> jax.Array:
    # (batch, 5, 6) as two heads of three.
    heads = x.reshape(*x.shape[:2], 2, 3)
    return sdpa(heads, heads, heads, is_causal=True, **options)


def _symbolic_conv(x: jax.Array, **options: Any) -> jax.Array:
    numbers = ("NWC", "WIO", "NWC")
    w = jnp.cos(jnp.arange(2.0 * 6 * 4)).reshape(2, 6, 4)
    terms = {"bias": jnp.arange(4.0), "activation": "gelu", "scale": jnp.arange(4.0)}
    return conv(x, w, padding="SAME", dimension_numbers=numbers, **terms, **options)


def _symbolic_matmul(x: jax.Array, **options: Any) -> jax.Array:
    w = jnp.cos(jnp.arange(24.0)).reshape(6, 4)
    scales = {"scale_b": jnp.arange(4.0), "scale_a": jnp.cos(jnp.arange(6.0))}
    return matmul(x, w, **scales, bias=jnp.arange(4.0), scale_out=0.5, **options)


def _symbolic_dot(x: jax.Array, **options: Any) -> jax.Array:
    w = jnp.cos(jnp.arange(24.0)).reshape(4, 6)
    numbers = (((2,), (1,)), ((), ()))
    return dot_general(x, w, numbers, bias=jnp.arange(4.0), activation="silu",
                       **options)  # fmt: skip


_SYMBOLIC = [_attention, _symbolic_conv, _symbolic_matmul, _symbolic_dot]


@pytest.mark.parametrize("call", _SYMBOLIC)
@pytest.mark.parametrize("implementation", ["xla", "auto"])
def test_programs_with_a_symbolic_batch_run_xla_s_code(
    call: Function, implementation: str
) -> None:
    (n,) = export.symbolic_shape("n")
    x = jnp.asarray(
        np.asarray(np.random.default_rng(7).normal(size=(3, 5, 6)), jnp.float32)
    )

    def loss(x: jax.Array) -> Any:
        return jax.value_and_grad(
            lambda x: jnp.sum(jnp.sin(call(x, implementation=implementation)))
        )(x)

    like = jax.ShapeDtypeStruct((n, 5, 6), jnp.float32)
    exported = export.export(jax.jit(loss), platforms=("cpu", "cuda"))(like)
    assert "jax_cudnn.graph" not in exported.mlir_module()
    got, want = export.deserialize(exported.serialize()).call(x), loss(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), got, want)


def test_a_symbolic_length_of_a_convolution() -> None:
    (n,) = export.symbolic_shape("n", constraints=["n >= 2"])
    like = jax.ShapeDtypeStruct((2, n, 6), jnp.float32)
    exported = export.export(jax.jit(_symbolic_conv))(like)
    x = jnp.ones((2, 7, 6))
    np.testing.assert_allclose(exported.call(x), _symbolic_conv(x), 1e-5)
