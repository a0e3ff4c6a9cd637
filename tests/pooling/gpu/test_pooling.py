# SPDX-License-Identifier: Apache-2.0
"""Tests cuDNN's pooling against NumPy in float64: NaN, ties and padding too."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import avg_pool, max_pool, plans
from tests.pooling.windows import pooled

pytestmark = pytest.mark.gpu

# Space, channels, window, strides, padding and layout.
_CASES: dict[str, tuple[Any, ...]] = {
    "line": ((37,), 5, (3,), (2,), "SAME", None),
    "halves": ((12, 18), 8, (2, 2), (2, 2), "VALID", None),
    "stem": ((23, 18), 16, (3, 3), (2, 2), "SAME", None),
    "first": ((13, 10), 3, (3, 2), (2, 1), "SAME", "NCHW"),
    "uneven": ((9, 14), 7, (4, 3), (1, 2), [(3, 1), (0, 2)], None),
    "cut": ((11, 9), 4, (3, 2), (1, 2), [(-1, 2), (1, -2)], None),
    "gaps": ((11, 9), 4, (2, 1), (3, 2), "VALID", None),
    "whole": ((7, 6), 33, (7, 6), None, "VALID", None),
    "volume": ((7, 5, 6), 6, (2, 3, 2), (1, 2, 2), "SAME", None),
}
_KINDS = {
    "max": max_pool,
    "avg": avg_pool,
    "avg_exclude": functools.partial(avg_pool, count_include_pad=False),
}


def _numbers(name: str, dtype: Any) -> jax.Array:
    space, channels, *_ = _CASES[name]
    rng = np.random.default_rng(len(name))
    return jnp.asarray(rng.standard_normal((3, *space, channels)), dtype)


def _run(kind: str, name: str, x: jax.Array, implementation: Any = "cudnn") -> Any:
    """Pool x, given with channels last, in the layout of the case."""
    *_, window, strides, padding, layout = _CASES[name]

    def function(x: jax.Array) -> jax.Array:
        if layout is not None:
            x = jnp.moveaxis(x, -1, 1)
        y = _KINDS[kind](
            x,
            window,
            strides,
            padding,
            dimension_numbers=layout,
            implementation=implementation,
        )
        return y if layout is None else jnp.moveaxis(y, 1, -1)

    return function(x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", _CASES)
def test_results_and_gradients_match_float64(name: str, kind: str, dtype: Any) -> None:
    x = _numbers(name, dtype)
    run = jax.jit(functools.partial(_run, kind, name))
    output, back = jax.vjp(run, x)
    weights = np.random.default_rng(1).standard_normal(output.shape)
    cotangent = jnp.asarray(weights, dtype)
    (grad,) = jax.jit(back)(cotangent)
    _, _, *args, _ = _CASES[name]
    want = pooled(x, kind, *args, cotangent=cotangent)
    most = pooled(x, kind, *args, cotangent=jnp.abs(cotangent)).grad
    # One rounding of a sum in f32; XLA sums the gradient of a maximum in the dtype.
    unit = float(jnp.finfo(dtype).eps) / 2
    extra = 64 * 2.0**-24
    error = np.abs(np.asarray(output, np.float64) - want.output)
    assert np.all(error <= unit * np.abs(want.output) + extra)
    if kind == "max":
        assert np.all(error == 0)
    roundings = int(np.prod(args[0])) if kind == "max" else 1
    error = np.abs(np.asarray(grad, np.float64) - want.grad)
    assert np.all(error <= roundings * unit * most + extra)


@pytest.mark.parametrize("kind", _KINDS)
def test_cudnn_ran(kind: str) -> None:
    x = _numbers("stem", jnp.bfloat16)

    def loss(x: jax.Array) -> jax.Array:
        return _run(kind, "stem", x).astype(jnp.float32).sum()

    ran = {
        call.op: call.implementation for call in plans.inspect(jax.grad(loss), x).calls
    }
    if kind == "max":
        assert ran == {"max_pool": "cudnn"}
    else:
        assert ran == {"avg_pool": "cudnn", "avg_pool_backward": "cudnn"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("kind", _KINDS)
def test_nan_and_infinities_stay_in_their_windows(kind: str, dtype: Any) -> None:
    x = np.array(_numbers("stem", jnp.float32))
    x[0, 2, 1, 3], x[1, 6, 0, 2], x[2, 3, 2, 0] = np.nan, np.inf, -np.inf
    x[1, 10:14, 10:14, 1] = -np.inf
    x = jnp.asarray(x, dtype)
    _, _, *args, _ = _CASES["stem"]
    want = pooled(x, kind, *args).output
    got = np.asarray(jax.jit(functools.partial(_run, kind, "stem"))(x), np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, want, rtol=unit, atol=1e-5)


def test_padding_is_below_all_negative_numbers() -> None:
    x = -1e30 - jnp.abs(_numbers("uneven", jnp.float32))
    _, _, *args, _ = _CASES["uneven"]
    got = jax.jit(functools.partial(_run, "max", "uneven"))(x)
    np.testing.assert_array_equal(got, pooled(x, "max", *args).output)


def test_the_first_of_equal_elements_gets_the_gradient() -> None:
    """The gradient of cuDNN's maxima is XLA's, with lax's rule for ties."""
    x = jnp.round(_numbers("stem", jnp.float32))
    output, back = jax.vjp(functools.partial(_run, "max", "stem"), x)
    cotangent = jnp.cos(jnp.arange(output.size, dtype="f4")).reshape(output.shape)
    _, _, *args, _ = _CASES["stem"]
    want = pooled(x, "max", *args, cotangent=cotangent).grad
    np.testing.assert_allclose(back(cotangent)[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", _KINDS)
def test_runs_repeat_in_every_bit(kind: str) -> None:
    x = _numbers("stem", jnp.bfloat16)

    def results(x: jax.Array) -> Any:
        return jax.value_and_grad(
            lambda x: _run(kind, "stem", x).astype(jnp.float32).sum()
        )(x)

    run = jax.jit(results)
    first, second = run(x), run(x)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_auto_is_xla_until_tuned_and_right_after() -> None:
    x = jnp.ones((4, 32, 32, 64), jnp.bfloat16)

    def pool(x: jax.Array) -> jax.Array:
        return avg_pool(x, (2, 2), (2, 2))

    assert [call.implementation for call in plans.inspect(pool, x).calls] == ["xla"]
    plans.autotune(pool, x, progress=False)
    np.testing.assert_array_equal(jax.jit(pool)(x), np.ones((4, 16, 16, 64)))
