# SPDX-License-Identifier: Apache-2.0
"""Tests convolutions as XLA computes them where its own form is far slower.

Depthwise ones of few taps are sums of shifted products. For the gradient of a filter
with holes, or of images with zeros between their elements, XLA has a convolution by a
window as large as the image. It multiplies by the zeros in holes where the two ends of
an axis are padded otherwise, and by those between elements where the filter is not
flipped. Neither is left to it.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn

pytestmark = [pytest.mark.once]

_NWC = ("NWC", "WIO", "NWC")
# --- holes, and zeros between elements ------------------------------------------------

# x, w and what is passed on, by name.
_CASES = {
    "causal": ((2, 23, 3), (2, 3, 4), {"padding": [(5, 0)], "rhs_dilation": (5,)}),
    "cut": ((2, 23, 3), (3, 3, 2), {"padding": [(-2, 3)], "rhs_dilation": (4,)}),
    "steps": (
        (2, 24, 4),
        (3, 2, 6),
        {
            "padding": [(1, 6)],
            "rhs_dilation": (3,),
            "window_strides": (2,),
            "feature_group_count": 2,
        },
    ),
    "transposed, holes": (
        (2, 11, 3),
        (2, 3, 2),
        {"padding": [(1, 4)], "rhs_dilation": (2,), "lhs_dilation": (3,)},
    ),
    "transposed, cut": (
        (2, 5, 4, 6),
        (3, 2, 3, 4),
        {
            "padding": [(2, -1), (0, 3)],
            "lhs_dilation": (2, 3),
            "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
            "feature_group_count": 2,
        },
    ),
    "transposed along one axis": (
        (2, 4, 5, 3),
        (6, 4, 2, 3),
        {
            "padding": [(1, 1), (2, 0)],
            "lhs_dilation": (2, 1),
            "dimension_numbers": ("NCHW", "OIHW", "NCHW"),
        },
    ),
    "channels first": (
        (2, 4, 9, 8),
        (8, 1, 3, 2),
        {
            "padding": [(2, 2), (1, 0)],
            "rhs_dilation": (2, 3),
            "dimension_numbers": ("NCHW", "OIHW", "NCHW"),
            "feature_group_count": 4,
        },
    ),
    "one axis with holes": (
        (1, 6, 5, 7, 2),
        (2, 1, 3, 2, 3),
        {
            "padding": [(1, 0), (0, 0), (4, 1)],
            "rhs_dilation": (1, 4, 2),
            "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"),
        },
    ),
}


def _options(case):
    options = dict(_CASES[case][2])
    options.setdefault("window_strides", (1,) * (len(_CASES[case][0]) - 2))
    return {"dimension_numbers": _NWC, **options}


def _drawn(case):
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in _CASES[case][:2]]


def _with_gradients(convolution, x, w):
    result, pullback = jax.vjp(convolution, x, w)
    return result, *pullback(jnp.sin(jnp.arange(result.size, dtype=result.dtype))
                             .reshape(result.shape))  # fmt: skip


def _both(case):
    options = _options(case)
    ours = functools.partial(jax_cudnn.conv, implementation="xla", **options)
    return ours, functools.partial(jax.lax.conv_general_dilated, **options)


@pytest.mark.parametrize("case", _CASES)
def test_results_and_gradients_are_those_of_jax(case):
    with jax.enable_x64(True):
        found, want = (
            jax.jit(functools.partial(_with_gradients, each))(*_drawn(case))
            for each in _both(case)
        )
        for got, truth in zip(found, want, strict=True):
            assert got.dtype == truth.dtype == jnp.float64
            np.testing.assert_allclose(got, truth, rtol=1e-10, atol=1e-10)


def test_what_a_tap_does_not_meet_does_not_reach_its_gradient():
    ours, theirs = _both("causal")
    x, w = _drawn("causal")
    x = x.at[0, -1, 0].set(jnp.nan).at[1, -2, 1].set(jnp.inf)
    found, want = (_with_gradients(each, x, w)[2] for each in (ours, theirs))
    np.testing.assert_array_equal(jnp.isfinite(found), jnp.isfinite(want))
    assert jnp.isfinite(found).any()
    assert not jnp.isfinite(found).all()


@pytest.mark.parametrize("case", ["causal", "cut", "channels first"])
def test_no_window_is_as_large_as_the_image(case):
    ours, theirs = (_text(each, case) for each in _both(case))
    longest = max(_taps(ours))
    assert longest <= 3 < max(_taps(theirs))


def _text(convolution, case):
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in _CASES[case][:2]]
    program = jax.jit(functools.partial(_with_gradients, convolution))
    return program.lower(*shapes).as_text()


def _taps(text):
    """Yield the sides of the filters of a program's convolutions."""
    pattern = r"stablehlo.convolution.*x\[(.*?)\]->.* : \(tensor<.*?>, tensor<(.*?)>"
    found = re.findall(pattern, text)
    assert found
    for letters, type_ in found:
        for letter, size in zip(letters.split(", "), type_.split("x"), strict=False):
            if letter.isdigit():
                yield int(size)


@pytest.mark.parametrize("case", ["causal", "cut"])
def test_holes_come_with_equal_padding(case):
    ours, _ = _both(case)
    found = re.findall(r"pad = \[\[(-?\d+), (-?\d+)\]\]", _text(ours, case))
    assert len(found) == 2
    assert all(low == high for low, high in found), found


@pytest.mark.parametrize("case", ["transposed, cut", "transposed along one axis"])
def test_no_zeros_are_put_between_elements_for_a_filters_gradient(case):
    x, w = (jax.ShapeDtypeStruct(x, jnp.float32) for x in _CASES[case][:2])

    def text(convolution):
        y = jax.eval_shape(convolution, x, w)
        gradient = jax.jit(lambda x, w, y: jax.vjp(convolution, x, w)[1](y)[1])
        return gradient.lower(x, w, y).as_text()

    ours, theirs = (
        set(re.findall(r"lhs_dilate = \[(.*?)\]", text(each))) for each in _both(case)
    )
    assert ours == {"1, 1"}
    assert theirs - ours


def test_a_transposed_convolution_has_a_flipped_filter():
    ours, _ = _both("transposed, cut")
    text = _text(ours, "transposed, cut")
    flipped = re.search(r"(%\w+) = stablehlo.optimization_barrier", text)
    assert flipped
    assert re.search(rf"stablehlo.reverse {re.escape(flipped[1])}, dims", text)


# --- sums of shifted products ---------------------------------------------------------

_LAYOUTS = {
    "NWC": (("NWC", "WIO", "NWC"), (2, 13, 4), (3, 1, 4)),
    "NCW": (("NCW", "OIW", "NCW"), (2, 4, 12), (4, 1, 5)),
}
_PADDINGS = ("SAME", "VALID", ((1, 3),), ((2, -1),))
_SUMS = [
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
                    for case in _SUMS
                ]
            )
            for function in (_ours, _of_jax)
        )
        assert "convolution" not in ours.lower(x, w).as_text()
        for case, found, want in zip(_SUMS, ours(x, w), theirs(x, w), strict=True):
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
