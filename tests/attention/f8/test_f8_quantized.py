# SPDX-License-Identifier: Apache-2.0
"""Tests the gradient of attention that quantises its operands itself.

The truth is written from the formula in float64: dS = P (dO V^T - rowsum(O dO) + dL) at
the rounded operands, with the f8 output.
"""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_cudnn
from jax_cudnn import f8
from tests.attention.shared.f8 import gradients
from tests.attention.shared.f8 import wide as f32
from tests.attention.shared.oracle import SIZES, shape_of
from tests.common.devices import collectives, gradient, mesh_of, placed
from tests.common.evaluating import with_pullback

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SIZES = {**SIZES, "d": 16, "e": 24}


def _operands(dtype: Any, seed: int = 0, sizes: Any = _SIZES) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(np.asarray(rng.standard_normal(shape_of(axes, sizes)), dtype))
        for axes in ("bshd", "btkd", "btke")
    ]


def _stored(x: jax.Array, dtype: Any) -> f8.Quantized:
    return f8.quantize_current(x, dtype, power_of_2=True)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float16])
def test_the_result_is_that_of_f8_attention(wide: Any, dtype: Any) -> None:
    operands = _operands(wide)
    got, lse = f8.quantized_sdpa(
        *operands, dtype=dtype, is_causal=True, return_residual=True
    )
    q, k, v = (_stored(x, dtype) for x in operands)
    want, want_lse = f8.sdpa(
        q.values,
        k.values,
        v.values,
        query_scale=q.scale,
        key_scale=k.scale,
        value_scale=v.scale,
        is_causal=True,
        return_residual=True,
    )
    assert (got.dtype, lse.dtype) == (wide, jnp.float32)
    np.testing.assert_array_equal(got, f8.dequantize(want, v.scale, wide))
    np.testing.assert_array_equal(lse, want_lse)


def test_given_scales_are_rounded_up_to_powers_of_two() -> None:
    q, k, v = _operands(jnp.bfloat16)
    given: Any = {"query_scale": 0.3, "key_scale": 0.25, "value_scale": 0.0626}
    found = f8.quantized_sdpa(q, k, v, **given, output_scale=0.1)
    exact: Any = {"query_scale": 0.5, "key_scale": 0.25, "value_scale": 0.125}
    same = f8.quantized_sdpa(q, k, v, **exact, output_scale=0.125)
    np.testing.assert_array_equal(found, same)
    assert jnp.isnan(f8.quantized_sdpa(q, k, v, query_scale=0.0)).all()


@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradient_is_that_of_the_formula(is_causal: bool, wide: Any) -> None:
    operands = _operands(wide, seed=1)
    run = functools.partial(
        f8.quantized_sdpa, is_causal=is_causal, return_residual=True
    )
    rng = np.random.default_rng(2)
    pulls = tuple(
        jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype))
        for x in jax.eval_shape(run, *operands)
    )
    (output, _), found = with_pullback(run, operands, pulls)
    s, t = _SIZES["s"], _SIZES["t"]
    seen = np.arange(t) <= np.arange(s)[:, None] if is_causal else np.ones((s, t), bool)
    rounded = [
        f8.dequantize(*_stored(x, jnp.float8_e4m3fn), jnp.float32) for x in operands
    ]
    truths = gradients(rounded, output, *pulls, seen)
    for x, y in zip(found, truths, strict=True):
        assert x.dtype == wide
        error = np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()
        assert error <= 4 * float(jnp.finfo(wide).eps), error


@pytest.mark.parametrize(
    ("layout", "axes"), [("bhsd", (0, 2, 1, 3)), ("sbhd", (1, 0, 2, 3))]
)
def test_a_layout_moves_axes_and_nothing_else(layout: Any, axes: Any) -> None:
    operands = _operands(jnp.bfloat16, seed=5)
    moved = [jnp.transpose(x, axes) for x in operands]
    back = np.argsort(axes)
    run = functools.partial(f8.quantized_sdpa, is_causal=True, return_residual=True)
    pulls = jax.tree.map(jnp.cos, jax.jit(run)(*operands))
    want, wanted = with_pullback(run, operands, pulls)
    pulls = jnp.transpose(pulls[0], axes), pulls[1]
    got, found = with_pullback(functools.partial(run, layout=layout), moved, pulls)
    for x, y in zip((got[0], *found), (want[0], *wanted), strict=True):
        x, y = (np.asarray(each, np.float32) for each in (jnp.transpose(x, back), y))
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    one = [jnp.take(x, 1, layout.index("b")) for x in moved]
    alone, _ = run(*one, layout=layout)
    assert alone.shape == tuple(
        n for n, letter in zip(got[0].shape, layout, strict=True) if letter != "b"
    )


def test_forward_mode_is_that_of_sdpa_at_the_rounded_operands() -> None:
    operands = _operands(jnp.bfloat16, seed=3)
    rounded = [
        f8.dequantize(*_stored(x, jnp.float8_e4m3fn), jnp.bfloat16) for x in operands
    ]
    tangents = _operands(jnp.bfloat16, seed=4)
    run = functools.partial(f8.quantized_sdpa, return_residual=True)
    plain = functools.partial(jax_cudnn.sdpa, return_residual=True)
    got = jax.jvp(run, operands, tangents)[1]
    want = jax.jvp(plain, rounded, tangents)[1]
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    second = jax.jvp(jax.grad(lambda *x: jnp.sum(run(*x)[1])), operands, tangents)[1]
    other = jax.jvp(jax.grad(lambda *x: jnp.sum(plain(*x)[1])), rounded, tangents)[1]
    error = np.abs(f32(second) - f32(other)).max()
    assert np.abs(f32(other)).max() > 0
    assert error <= 0.05 * np.abs(f32(other)).max()


def test_gradients_pass_through_rounding_and_saturation() -> None:
    q, k, v = _operands(jnp.bfloat16, seed=5)
    # All values saturate at 448 * 2**-12: outputs no longer depend on them.
    found = jax.grad(
        lambda v: jnp.sum(f8.quantized_sdpa(q, k, v, value_scale=2.0**-12), dtype=float)
    )(v)
    want = jax.grad(lambda v: jnp.sum(jax_cudnn.sdpa(q, k, v), dtype=float))(v)
    np.testing.assert_allclose(f32(found), f32(want), rtol=0.1, atol=0.02)
    scale = jax.grad(
        lambda x: jnp.sum(f8.quantized_sdpa(q, k, v, key_scale=x), dtype=float)
    )(0.01)
    assert float(scale) == 0


def test_random_operands_and_cotangents_may_be_examples_of_a_vmap() -> None:
    operands = _operands(jnp.bfloat16, seed=6)
    cotangent = jnp.asarray(
        np.asarray(
            np.random.default_rng(7).standard_normal(shape_of("bshe", _SIZES)),
            jnp.bfloat16,
        )
    )
    given = [*operands, cotangent]

    @jax.jit
    def run(q: Any, k: Any, v: Any, ct: Any) -> Any:
        output, back = jax.vjp(f8.quantized_sdpa, q, k, v)
        return output, back(ct)

    for chosen in itertools.product([False, True], repeat=4):
        if sum(chosen) not in (1, 3):
            continue
        stacked = [
            jnp.stack([x, x[::-1], -x]) if batched else x
            for x, batched in zip(given, chosen, strict=True)
        ]
        axes = tuple(0 if batched else None for batched in chosen)
        got = jax.jit(jax.vmap(run, in_axes=axes))(*stacked)
        for i in range(3):
            one = [
                x[i] if batched else x
                for x, batched in zip(stacked, chosen, strict=True)
            ]
            for x, y in zip(
                jax.tree.leaves(got), jax.tree.leaves(run(*one)), strict=True
            ):
                x, y = f32(x[i]), f32(y)
                assert np.abs(x - y).max() <= 0.08 * np.abs(y).max()


def test_reverse_mode_is_one_f8_kernel_and_one_gradient_kernel() -> None:
    operands = _operands(jnp.bfloat16)

    def loss(*x: Any) -> Any:
        return jnp.sum(f8.quantized_sdpa(*x).astype(jnp.float32))

    report = jax_cudnn.plans.inspect(jax.grad(loss, argnums=(0, 1, 2)), *operands)
    assert [call.op for call in report.calls] == ["sdpa_f8", "sdpa_backward"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_stay_sharded(kind: AxisType) -> None:
    sizes = {"b": 4, "s": 8, "t": 8, "h": 8, "k": 4, "d": 16, "e": 16}
    operands = _operands(jnp.bfloat16, sizes=sizes)
    scales = {"query_scale": 2.0**-6, "key_scale": 2.0**-6, "value_scale": 2.0**-6}
    run = functools.partial(f8.quantized_sdpa, **scales)
    sharded = placed(mesh_of(kind, x=4, y=2), operands, [("x", None, "y")] * 3)
    functions: tuple[Any, ...] = (run, gradient(run))
    for function in functions:
        got, want = (jax.jit(function)(*given) for given in (sharded, operands))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            x, y = f32(x), f32(y)
            assert np.abs(x - y).max() <= 0.08 * np.abs(y).max()
        assert collectives(function, *sharded) == {}


_Q = jnp.zeros((2, 5, 6, 16), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"query": _Q.astype(jnp.float32)},
            "f8.quantized_sdpa: query is f32[2,5,6,16]. Supported dtypes are bf16, "
            "f16, in which the gradient is computed. Convert query, key and value to "
            "one of them; for operands in f8 call f8.sdpa.",
        ),
        (
            {"key": _Q.astype(jnp.float16)},
            "f8.quantized_sdpa: key is f16[2,5,6,16] but query is bf16[2,5,6,16]. All "
            "three must have one dtype. Convert key to bf16.",
        ),
        (
            {"dtype": jnp.bfloat16},
            "f8.quantized_sdpa: dtype=bfloat16 is not one of f8_e4m3fn, f8_e5m2.",
        ),
        (
            {"key_scale": jnp.ones((1, 2))},
            "f8.quantized_sdpa: key_scale is f32[1,2]. It must be one number",
        ),
        ({"is_causal": 1}, "f8.quantized_sdpa: is_causal is int."),
        ({"scale": "1"}, "f8.quantized_sdpa: scale is str."),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"query": _Q, "key": _Q, "value": _Q, **change}
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        f8.quantized_sdpa(**given)
