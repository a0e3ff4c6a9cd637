# SPDX-License-Identifier: Apache-2.0
"""Tests depthwise convolutions as XLA computes them: sums of shifted products."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn

pytestmark = [pytest.mark.once]

_LAYOUTS = {
    "NWC": (("NWC", "WIO", "NWC"), (2, 13, 4), (3, 1, 4)),
    "NCW": (("NCW", "OIW", "NCW"), (2, 4, 12), (4, 1, 5)),
}
_PADDINGS = ("SAME", "VALID", ((1, 3),), ((2, -1),))
_CASES = [
    {"window_strides": strides, "padding": padding, "rhs_dilation": dilation}
    | ({} if isinstance(padding, str) else {"lhs_dilation": inner})
    for strides, padding, inner, dilation in itertools.product(
        ((1,), (3,)), _PADDINGS, ((1,), (2,)), ((1,), (3,))
    )
    if not isinstance(padding, str) or inner == (1,)
]


def _ours(numbers, case, x, w):
    groups = w.shape[numbers[1].index("O")]
    options = {"dimension_numbers": numbers, "feature_group_count": groups}
    return jax_cudnn.conv(x, w, implementation="xla", **options, **case)


def _of_jax(numbers, case, x, w):
    groups = w.shape[numbers[1].index("O")]
    options = {"dimension_numbers": numbers, "feature_group_count": groups}
    return jax.lax.conv_general_dilated(x, w, precision="highest", **options, **case)


def _with_gradients(function, x, w):
    result, pullback = jax.vjp(function, x, w)
    return result, *pullback(jnp.sin(jnp.arange(result.size, dtype=result.dtype))
                             .reshape(result.shape))  # fmt: skip


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_sums_and_gradients_are_those_of_jax(layout):
    numbers, *shapes = _LAYOUTS[layout]
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        x, w = (jnp.asarray(rng.standard_normal(shape)) for shape in shapes)
        ours, theirs = (
            jax.jit(
                lambda x, w, function=function: [
                    _with_gradients(functools.partial(function, numbers, case), x, w)
                    for case in _CASES
                ]
            )
            for function in (_ours, _of_jax)
        )
        assert "convolution" not in ours.lower(x, w).as_text()
        for case, found, want in zip(_CASES, ours(x, w), theirs(x, w), strict=True):
            for got, truth in zip(found, want, strict=True):
                assert got.dtype == truth.dtype == jnp.float64
                np.testing.assert_allclose(
                    got, truth, rtol=1e-10, atol=1e-10, err_msg=f"{case}"
                )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_narrow_numbers_are_wide(dtype):
    case = {"window_strides": (1,), "padding": "SAME"}
    numbers = ("NWC", "WIO", "NWC")
    # Of 4096 and six ones, a narrow sum would lose the ones.
    x = jnp.ones((1, 512, 2), dtype).at[:, 0].set(4096)
    w = jnp.ones((7, 1, 2), dtype)
    run = functools.partial(_ours, numbers, case)
    result, _, grad_w = jax.jit(functools.partial(_with_ones, run))(x, w)
    assert result.dtype == grad_w.dtype == dtype
    np.testing.assert_array_equal(result[0, 3], jnp.full(2, 4096 + 6, dtype))
    np.testing.assert_array_equal(grad_w[3, 0], jnp.full(2, 4096 + 511, dtype))


def _with_ones(function, x, w):
    result, pullback = jax.vjp(function, x, w)
    return result, *pullback(jnp.ones_like(result))


@pytest.mark.parametrize(
    ("shapes", "groups"),
    [
        pytest.param(((1, 40, 4), (9, 1, 4)), 4, id="many taps"),
        pytest.param(((1, 40, 4, 4), (3, 2, 1, 4)), 4, id="two axes"),
        pytest.param(((1, 40, 4), (3, 1, 8)), 4, id="two filters for a channel"),
        pytest.param(((1, 40, 1), (3, 1, 1)), 1, id="one channel"),
    ],
)
def test_others_stay_convolutions(shapes, groups):
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def run(x, w):
        numbers = ("NWC", "WIO", "NWC") if x.ndim == 3 else ("NHWC", "HWIO", "NHWC")
        options = {"dimension_numbers": numbers, "implementation": "xla"}
        strides = (1,) * (x.ndim - 2)
        return jax_cudnn.conv(
            x, w, strides, "SAME", feature_group_count=groups, **options
        )

    text = jax.jit(functools.partial(_with_ones, run)).lower(*operands).as_text()
    assert text.count("stablehlo.convolution") == 3
