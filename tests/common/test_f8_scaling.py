# SPDX-License-Identifier: Apache-2.0
"""Tests that scales make tensors fit into f8, whatever their numbers are."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_cudnn import f8
from tests.attention.shared.f8 import Dtype, rounded, wide

pytestmark = pytest.mark.once

_DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2]
_TINY = float(np.finfo(np.float32).tiny)


@given(
    amax=st.floats(2.0**-126, 2.0**127, width=32),
    margin=st.integers(-3, 5),
    dtype=st.sampled_from(_DTYPES),
    power_of_2=st.booleans(),
)
def test_the_largest_number_fits_with_its_margin(
    amax: float, margin: int, dtype: Any, power_of_2: bool
) -> None:
    scale = f8.scale_from_amax(amax, dtype, margin=margin, power_of_2=power_of_2)
    found, most = float(scale), Dtype.of(dtype).most
    assert scale.dtype == jnp.float32
    wanted = amax * 2.0**margin / most
    if not 2.0**-126 <= wanted <= 2.0**126:
        assert found in (_TINY, 2.0**126, 2.0**127)
    elif power_of_2:
        assert np.frexp(found)[0] == 0.5
        assert wanted * (1 - 2.0**-22) <= found < 2 * wanted * (1 + 2.0**-22)
    else:
        np.testing.assert_allclose(found, wanted, rtol=2.0**-22)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan])
def test_an_amax_that_says_nothing_keeps_the_scale(
    amax: float, power_of_2: bool
) -> None:
    assert float(f8.scale_from_amax(amax, power_of_2=power_of_2)) == 1
    known = f8.scale_from_amax(
        jnp.array([amax, 448.0]), power_of_2=power_of_2, previous=jnp.array([0.3, 5.0])
    )
    np.testing.assert_array_equal(known, wide([0.3, 1.0]))


def test_the_amax_is_the_largest_absolute_value() -> None:
    assert float(f8.amax(jnp.array([[1.0, -7.5], [2.0, 3.0]], jnp.bfloat16))) == 7.5
    assert float(f8.amax(jnp.zeros((0, 3)))) == 0
    assert np.isnan(f8.amax(jnp.array([1.0, np.nan, np.inf])))
    assert float(f8.amax(jnp.array([1.0, -np.inf]))) == np.inf
    assert f8.amax(jnp.array([3])).shape == ()
    assert f8.amax(jnp.arange(3)).dtype == jnp.float32


@given(
    numbers=st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20),
    scale=st.floats(0.125, 300, width=32),
    dtype=st.sampled_from(_DTYPES),
)
def test_numbers_are_rounded_and_saturate(
    numbers: list[float], scale: float, dtype: Any
) -> None:
    x = wide(numbers)
    stored = f8.quantize(x, scale, dtype)
    assert stored.dtype == dtype
    want = rounded(x / np.float32(scale), dtype)
    np.testing.assert_array_equal(np.float64(stored.astype(jnp.float32)), want)
    back = f8.dequantize(stored, scale)
    np.testing.assert_array_equal(back, wide(want) * np.float32(scale))


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("given_as", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_special_numbers(dtype: Any, given_as: Any) -> None:
    x = jnp.array(np.asarray([np.nan, np.inf, -np.inf, -0.0, 0.0], given_as))
    stored = np.asarray(f8.quantize(x, 1.0, dtype).astype(jnp.float32))
    most = Dtype.of(dtype).most
    np.testing.assert_array_equal(stored, wide([np.nan, most, -most, 0, 0]))
    assert list(np.signbit(stored[3:])) == [True, False]


@given(st.lists(st.floats(-3e4, 3e4, width=32), min_size=1, max_size=9))
def test_current_scaling_uses_the_whole_range(numbers: list[float]) -> None:
    for dtype in _DTYPES:
        for power_of_2 in (False, True):
            x = f8.quantize_current(wide(numbers), dtype, power_of_2=power_of_2)
            largest = float(f8.amax(wide(numbers)))
            if largest >= 2.0**-100:
                stored = float(f8.amax(x.values)) / Dtype.of(dtype).most
                assert stored > 0.45 if power_of_2 else stored == 1
            gap = np.abs(np.asarray(f8.dequantize(*x)) - wide(numbers))
            f = Dtype.of(dtype)
            bound = f.unit * 1.001 * np.abs(numbers) + f.tiny * 1.001 * float(x.scale)
            assert np.all(gap <= bound)


def test_zeros_and_what_is_not_finite_get_the_scale_1() -> None:
    for numbers in ([0.0, 0.0], [1.0, np.inf], [np.nan, 2.0], []):
        assert float(f8.quantize_current(jnp.array(numbers)).scale) == 1


def test_a_history_moves_by_one_step() -> None:
    history = jnp.zeros((3, 2))
    for step in range(1, 5):
        history = f8.update_history(history, jnp.array([step, 10.0 * step]))
    np.testing.assert_array_equal(history, [[4, 40], [3, 30], [2, 20]])
    scales = f8.scale_from_history(history, margin=1)
    np.testing.assert_allclose(scales, [8 / 448, 80 / 448], rtol=1e-6)


def test_a_history_leaves_out_what_is_not_finite() -> None:
    history = jnp.array([np.nan, 7.0, np.inf])
    assert float(f8.scale_from_history(history)) == 7 / 448
    nothing = jnp.array([np.nan, 0.0])
    assert float(f8.scale_from_history(nothing, previous=0.25)) == 0.25


def test_delayed_scaling_recovers_from_saturation() -> None:
    """In a scan: numbers that outgrow their history saturate, and fit a step later."""

    def step(carry: Any, x: jax.Array) -> Any:
        history, scale = carry
        stored = f8.quantize(x, scale)
        history = f8.update_history(history, f8.amax(x))
        scale = f8.scale_from_history(history, previous=scale)
        return (history, scale), f8.amax(stored)

    xs = jnp.array([[1.0], [1000.0], [1000.0]])
    _, largest = jax.lax.scan(step, (jnp.zeros(4), jnp.float32(1)), xs)
    np.testing.assert_array_equal(largest, [1, 448, 448])


def test_scales_apply_by_example() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    each = jax.jit(jax.vmap(f8.quantize_current))(x)
    for i in range(3):
        one = f8.quantize_current(x[i])
        np.testing.assert_array_equal(one.values, each.values[i])
        assert one.scale == each.scale[i]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: f8.quantize(jnp.ones(1), 1.0, jnp.bfloat16),
            TypeError,
            "f8.quantize: dtype=bfloat16 is not one of f8_e4m3fn, f8_e5m2. Pass "
            "jnp.float8_e4m3fn or jnp.float8_e5m2.",
        ),
        (
            lambda: f8.quantize_current(jnp.ones(1), "eight"),
            TypeError,
            "f8.scale_from_amax: dtype='eight' is not one of f8_e4m3fn, f8_e5m2.",
        ),
        (
            lambda: f8.quantize(jnp.array([True]), 1.0),
            TypeError,
            "f8.quantize: x is bool[1]. It must be an array of real numbers.",
        ),
        (
            lambda: f8.amax(1j),
            TypeError,
            "f8.amax: x is complex64[]. It must be an array of real numbers.",
        ),
        (
            lambda: f8.amax(None),  # type: ignore[arg-type]
            TypeError,
            "f8.amax: x is None. It must be an array of numbers.",
        ),
        (
            lambda: f8.scale_from_amax(1.0, margin=0.5),  # type: ignore[arg-type]
            TypeError,
            "f8.scale_from_amax: margin=0.5 is not an int from -64 to 64. Pass the "
            "number of powers of two to leave free.",
        ),
        (
            lambda: f8.scale_from_amax(1.0, margin=65),
            TypeError,
            "f8.scale_from_amax: margin=65 is not an int from -64 to 64.",
        ),
        (
            lambda: f8.scale_from_amax(1.0, power_of_2=1),  # type: ignore[arg-type]
            TypeError,
            "f8.scale_from_amax: power_of_2 is int. It must be True or False",
        ),
        (
            lambda: f8.update_history(jnp.zeros((2, 3)), 1.0),
            ValueError,
            "f8.update_history: history is f32[2,3] and amax f32[]. A history has "
            "the axes of amax, and one of at least 1 in front of them. Begin with "
            "jnp.zeros((n, *amax.shape)).",
        ),
        (
            lambda: f8.update_history(jnp.zeros((0,)), 1.0),
            ValueError,
            "f8.update_history: history is f32[0] and amax f32[].",
        ),
        (
            lambda: f8.scale_from_history(1.0),
            ValueError,
            "f8.scale_from_history: history is f32[]. It must have one axis in front, "
            "of the steps. See f8.update_history.",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()


def test_xla_may_not_leave_the_rounding_out() -> None:
    def there_and_back(x: jax.Array) -> jax.Array:
        return f8.dequantize(f8.quantize(x, 1.0), 1.0)

    text = jax.jit(there_and_back).lower(jnp.ones(3)).as_text()
    to_f8, barrier, back = (
        text.index(word)
        for word in ("-> tensor<3xf8", "optimization_barrier", "tensor<3xf8E4M3FN>) ->")
    )
    assert to_f8 < barrier < back
    x = jnp.array([1.1, -0.3])
    assert (jax.jit(there_and_back)(x) != x).all()
    gradient = jax.vmap(jax.grad(lambda x: there_and_back(x)))(x)
    assert gradient.shape == x.shape
