# SPDX-License-Identifier: Apache-2.0
"""Tests `jax_cudnn.conv` against lax's convolution with an epilogue.

The other side of each comparison is `jax.lax.conv_general_dilated` with its epilogue in
jax.numpy, in float64.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

from jax_cudnn import conv
from tests.common.examples import examples
from tests.conftest import Draw
from tests.products.shared.fused import (
    assert_close,
    assert_same,
    gradients,
    graphs,
    loss,
    nodes,
)
from tests.products.shared.plain_conv import ACTIVATIONS, plain

pytestmark = pytest.mark.sampled

_NHWC = ("NHWC", "HWIO", "NHWC")


# --- values and gradients on drawn problems -------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A convolution: shapes of its operands and its options."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    extra: tuple[tuple[str, tuple[int, ...]], ...]
    options: tuple[tuple[str, Any], ...]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rank = draw(st.sampled_from([1, 2, 2, 3]))
    letters = "XYZ"[:rank]
    lhs, rhs, out = (
        "".join(draw(st.permutations(base + letters))) for base in ("NC", "OI", "NC")
    )
    groups, batch_groups = draw(
        st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 1), (1, 2)])
    )

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    n, c, o = (draw(st.integers(1, 3)) for _ in range(3))
    n, o = n * batch_groups, o * batch_groups * groups
    space, window = sizes(2, 7 - rank), sizes(1, 3)
    by_letter = dict(zip(letters, space, strict=True))
    strides, holes = sizes(1, 3), sizes(1, 2)
    padding: Any = draw(st.sampled_from(["SAME", "SAME_LOWER", "VALID", None, None]))
    spread = (1,) * rank
    if padding is None:
        spread = sizes(1, 3)
        padding = tuple(zip(sizes(-2, 3), sizes(-2, 3), strict=True))
        # lax refuses padding that cuts more than there is. Its axes are those of rhs.
        own = [by_letter[letter] for letter in rhs if letter in letters]
        assume(
            all(
                (own[i] - 1) * spread[i] + 1 + sum(padding[i]) >= 0 for i in range(rank)
            )
        )
    windows = dict(zip(letters, window, strict=True))
    x = tuple({"N": n, "C": c * groups, **by_letter}[letter] for letter in lhs)
    w = tuple({"O": o, "I": c, **windows}[letter] for letter in rhs)
    options = {
        "window_strides": strides,
        "padding": padding,
        "lhs_dilation": spread,
        "rhs_dilation": holes,
        "dimension_numbers": (lhs, rhs, out),
        "feature_group_count": groups,
        "batch_group_count": batch_groups,
    }
    shape = jax.eval_shape(
        functools.partial(lax.conv_general_dilated, **options),
        jax.ShapeDtypeStruct(x, jnp.float32),
        jax.ShapeDtypeStruct(w, jnp.float32),
    ).shape
    # XLA has no gradient of a convolution whose window finds no place.
    assume(0 not in shape)
    some = tuple(size if draw(st.booleans()) else 1 for size in shape)
    extra = {
        "bias": draw(st.sampled_from([None, (o,), (), some])),
        "residual": draw(st.sampled_from([None, shape, some, some[1:]])),
        "scale": draw(st.sampled_from([None, (o,), ()])),
    }
    options["activation"] = draw(st.sampled_from([None, *ACTIVATIONS]))
    return Problem(
        x,
        w,
        tuple((k, v) for k, v in extra.items() if v is not None),
        tuple(options.items()),
    )


@pytest.mark.usefixtures("x64")
@examples(24)
@given(problems())
def test_value_and_gradients_are_lax_s(problem: Problem) -> None:
    rng = np.random.default_rng(5)
    names = [name for name, _ in problem.extra]
    shapes = (problem.x, problem.w, *(shape for _, shape in problem.extra))
    operands = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]

    def run(function: Any, *operands: jax.Array) -> Any:
        extra = dict(zip(names, operands[2:], strict=True))
        return function(*operands[:2], **extra, **dict(problem.options))

    assert_same(*(functools.partial(run, f) for f in (conv, plain)), operands)


def test_defaults_are_those_of_a_plain_convolution(draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((7, 5, 3, 2), jnp.float32)
    assert_close(conv(x, w), lax.conv(x, w, (1, 1), "VALID"), 1e-4)
    jaxprs = {
        str(jax.make_jaxpr(f)(x, w))
        for f in (conv, functools.partial(conv, implementation=None, padding="valid"))
    }
    assert len(jaxprs) == 1


@pytest.mark.usefixtures("x64")
def test_numbers_are_exact_in_the_dtype_of_the_sums(draw: Draw) -> None:
    x, w = draw("bshd", jnp.float64), jnp.ones((7, 5, 3, 2), jnp.float64)
    got = conv(x, w, scale=0.1, bias=0.7, residual=3)
    assert_close(got, plain(x, w) * 0.1 + 0.7 + 3)


def test_a_call_is_one_graph_with_one_contraction(draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((7, 5, 3, 2), jnp.float32)
    fused = functools.partial(conv, bias=jnp.ones(7), residual=1.0, scale=2.0)
    ((graph, _),) = graphs(functools.partial(fused, activation="gelu"), x, w)
    assert nodes(graph) == {
        "conv_fprop": 1,
        "constant": 1,
        "mul": 1,
        "add": 2,
        "gelu_tanh": 1,
    }
    assert [t.dtype for t in graph.tensors if t.name not in graph.inputs] == ["f32"] * 6
    assert graph.outputs == ("output",)


def test_channels_last_is_read_in_place(draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((3, 3, 11, 7), jnp.float32)
    ((graph, _),) = graphs(
        functools.partial(conv, dimension_numbers=_NHWC, bias=jnp.ones(7)), x, w
    )
    assert graph.tensor("x").dims == (2, 11, 5, 6)
    assert graph.tensor("x").order == (0, 2, 3, 1)
    assert graph.tensor("w").dims == (7, 11, 3, 3)
    assert graph.tensor("w").order == (2, 3, 1, 0)
    assert graph.tensor("bias").dims == (1, 7, 1, 1)
    assert graph.tensor("output").stored_shape == (2, 3, 4, 7)


# --- dtypes ---------------------------------------------------------------------------


def test_the_result_s_dtype_can_be_chosen(draw: Draw) -> None:
    x = draw("bshd", jnp.bfloat16)
    w = jnp.ones((7, 5, 3, 2), jnp.bfloat16)
    got = conv(x, w, preferred_element_type=jnp.float32, bias=jnp.ones(7))
    wide = (each.astype(jnp.float32) for each in (x, w))
    assert_close(got, conv(*wide, bias=jnp.ones(7)), 1e-6)
    got = conv(x, w, preferred_element_type=jnp.float8_e4m3fn, scale=0.01)
    assert got.dtype == jnp.float8_e4m3fn


def test_8_bit_integers_are_summed_exactly() -> None:
    rng = np.random.default_rng(3)
    for dtype, low, high in ((jnp.int8, -128, 128), (jnp.uint8, 0, 256)):
        x = rng.integers(low, high, (2, 3, 5, 7))
        w = rng.integers(low, high, (5, 3, 2, 3))
        exact = lax.conv(*(jnp.asarray(v, jnp.int32) for v in (x, w)), (1, 1), "SAME")
        run = functools.partial(
            conv, jnp.asarray(x, dtype), jnp.asarray(w, dtype), padding="SAME"
        )
        np.testing.assert_array_equal(run(preferred_element_type=jnp.int32), exact)
        scale = jnp.arange(1.0, 6.0, dtype=jnp.float32)
        got = run(
            preferred_element_type=jnp.bfloat16,
            scale=scale,
            bias=0.5,
            activation="relu",
        )
        want = jax.nn.relu(exact.astype(jnp.float32) * scale[:, None, None][None] + 0.5)
        np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=str)
def test_8_bit_floats_are_summed_in_f32(dtype: Any, draw: Draw) -> None:
    x, w = draw("bshd", dtype), jnp.ones((7, 5, 3, 2), dtype)
    got = conv(x, w, preferred_element_type=jnp.float32, scale=0.5)
    want = plain(x.astype(jnp.float32), w.astype(jnp.float32), scale=0.5)
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize(
    "precision", ["highest", lax.Precision.HIGHEST, ("highest",) * 2]
)
def test_precision_reaches_the_products(precision: Any, draw: Draw) -> None:
    x, w = draw("bshd"), jnp.ones((7, 5, 3, 2), jnp.float32)
    run = jax.jit(functools.partial(conv, precision=precision))
    assert "precision HIGHEST" in run.lower(x, w).as_text().replace(
        "#stablehlo<precision HIGHEST>", "precision HIGHEST"
    )


# --- empty and smallest ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((0, 3, 5, 4), (7, 3, 2, 3)),
        ((2, 0, 5, 4), (7, 0, 2, 3)),
        ((2, 3, 5, 4), (0, 3, 2, 3)),
        ((2, 3, 0, 4), (7, 3, 2, 3)),
        ((2, 3, 1, 4), (7, 3, 3, 3)),
        ((1, 1, 1, 1), (1, 1, 1, 1)),
    ],
    ids=["images", "channels", "out-channels", "space", "no-room", "ones"],
)
def test_empty_and_smallest_sizes(
    x: tuple[int, ...], w: tuple[int, ...], draw: Draw
) -> None:
    def run(function: Any, x: Any, w: Any, bias: Any) -> jax.Array:
        return function(x, w, bias=bias, activation="silu", residual=bias.sum())

    operands = jnp.ones(x), jnp.ones(w), jnp.ones(w[0])
    value, got = gradients(functools.partial(run, conv), (0, 1, 2))(*operands)
    assert_close(value, loss(functools.partial(run, plain), *operands), 1e-5)
    if conv(*operands[:2]).size:
        want = gradients(functools.partial(run, plain), (0, 1, 2))(*operands)
        assert_close((value, got), want, 1e-5)
    else:
        # XLA has no gradient of these; it is 0.
        assert_close(got, tuple(map(jnp.zeros_like, operands)), 0)
