# SPDX-License-Identifier: Apache-2.0
"""Tests the jax.numpy attention and its gradients against its docstring.

It is compared with loops over rows in NumPy (tests/attention/shared/oracle.py), with
`jax.nn.dot_product_attention` where both mean the same, and with finite differences.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from jax_cudnn import sdpa
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.graph.attention.sdpa import SDPA
from tests.attention.shared.oracle import (
    BROADCASTS,
    SIZES,
    by_role,
    forward_graphs,
    numpy_attention,
    numpy_gradients,
    numpy_sdpa,
    options_of,
    shape_of,
    to_logical,
)
from tests.common.drawn_operands import draw_operands
from tests.common.evaluating import evaluate
from tests.common.examples import examples
from tests.conftest import Draw

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def _evaluate(graph: Graph, operands: Any) -> dict[str, np.ndarray]:
    results = jax.jit(functools.partial(evaluate, graph))(
        [jnp.asarray(x) for x in operands]
    )
    return {
        tensor.name: to_logical(tensor, x)
        for tensor, x in zip(graph.output_tensors, results, strict=True)
    }


# --- against NumPy --------------------------------------------------------------------


@given(forward_graphs(dtypes=("f64",)), st.integers(0, 2**32 - 1))
def test_forward_graphs_give_numpys_answer(graph: Graph, seed: int) -> None:
    operands = draw_operands(graph, seed)
    with jax.enable_x64(True):
        got = _evaluate(graph, operands)
    want = numpy_attention(by_role(graph, operands), **options_of(graph))
    for name in graph.outputs:
        np.testing.assert_allclose(
            got[name], want[name], **_CLOSE, err_msg=to_json(graph)
        )


@examples(20)
@given(forward_graphs(dtypes=("f64",)), st.booleans(), st.integers(0, 2**32 - 1))
def test_gradient_graphs_give_numpys_answer(
    graph: Graph, has_grad_stats: bool, seed: int
) -> None:
    assert SDPA.derivative is not None
    graph = SDPA.derivative.with_residuals(graph)
    wanted = (True,) * len(graph.inputs)
    backward = SDPA.derivative.backward(graph, wanted, (True, has_grad_stats))
    operands, logical = draw_operands(graph, seed), {}
    rng = np.random.default_rng([seed, 1])
    cotangents = [rng.standard_normal(t.stored_shape) for t in graph.output_tensors]
    with jax.enable_x64(True):
        outputs = _evaluate(graph, operands)
        stored = [np.transpose(outputs[t.name], t.order) for t in graph.output_tensors]
        source = {"input": operands, "output": stored, "cotangent": cotangents}
        got = _evaluate(backward.graph, [source[x][i] for x, i in backward.operands])
    logical = [
        to_logical(tensor, x)
        for tensor, x in zip(graph.output_tensors, cotangents, strict=True)
    ]
    want = numpy_gradients(
        by_role(graph, operands),
        logical[0],
        logical[1] if has_grad_stats else None,
        **options_of(graph),
    )
    for name in backward.graph.outputs:
        np.testing.assert_allclose(
            got[name],
            want[name.removeprefix("grad_")],
            **_CLOSE,
            err_msg=f"{name} of {to_json(graph)}",
        )


def _qkv(draw: Draw, dtype: Any = jnp.float64, **sizes: int) -> tuple[jax.Array, ...]:
    return tuple(draw(axes, dtype, **sizes) for axes in ("bshd", "btkd", "btke"))


def _assert_numpys(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, **_CLOSE)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axes", BROADCASTS)
def test_every_broadcast_of_a_bias_and_its_gradient(axes: str, draw: Draw) -> None:
    q, k, v = _qkv(draw)
    bias, weight = draw(axes, jnp.float64), draw("bshe", jnp.float64)

    def run(bias: jax.Array) -> tuple[jax.Array, ...]:
        return sdpa(q, k, v, bias, return_residual=True)

    got, pullback = jax.vjp(jax.jit(run), bias)
    _assert_numpys(got, numpy_sdpa(q, k, v, bias))
    grad_stats = draw("bsh", jnp.float64)
    (gradient,) = pullback((weight, grad_stats))
    want = numpy_gradients(
        {
            "query": np.swapaxes(q, 1, 2),
            "key": np.swapaxes(k, 1, 2),
            "value": np.swapaxes(v, 1, 2),
            "bias": bias,
        },
        np.swapaxes(weight, 1, 2),
        np.swapaxes(grad_stats, 1, 2)[..., None],
        scale=SIZES["d"] ** -0.5,
    )
    assert gradient.shape == bias.shape
    np.testing.assert_allclose(gradient, want["bias"], **_CLOSE)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axes", ["", "t", "s1", "st", "hst", "h11"])
def test_a_bias_of_fewer_axes_gets_them_in_front(axes: str, draw: Draw) -> None:
    q, k, v = _qkv(draw)
    bias, mask = draw(axes, jnp.float64), draw(axes) > -0.5
    padded = (None,) * (4 - bias.ndim)
    got = sdpa(q, k, v, bias, mask, return_residual=True)
    _assert_numpys(got, numpy_sdpa(q, k, v, bias[padded], mask[padded]))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.0},
        {"scale": -2},
        {"scale": np.float32(0.75)},
        {"is_causal": True},
        {"query_seq_lengths": np.array([2, 5])},
        {"key_value_seq_lengths": np.array([7, 0])},
        {"query_seq_lengths": np.array([-3, 99], np.int64)},
        {"key_value_seq_lengths": np.array([4, 99], np.int16), "is_causal": True},
        {
            "query_seq_lengths": np.array([4, 0], np.uint8),
            "key_value_seq_lengths": np.array([-1, 3]),
        },
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_options_mean_what_the_docstring_says(
    options: dict[str, Any], draw: Draw
) -> None:
    q, k, v = _qkv(draw)
    got = sdpa(q, k, v, **options, return_residual=True)
    _assert_numpys(got, numpy_sdpa(q, k, v, **options))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("s", "t"), [(3, 11), (11, 3)])
def test_causal_masks_align_at_the_top_left(s: int, t: int, draw: Draw) -> None:
    q, k, v = _qkv(draw, s=s, t=t)
    got = sdpa(q, k, v, is_causal=True, return_residual=True)
    _assert_numpys(got, numpy_sdpa(q, k, v, is_causal=True))
    # The first query sees the first key only.
    np.testing.assert_allclose(got[0][:, 0], jnp.repeat(v[:, 0], 2, axis=1), rtol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("h", "k"), [(6, 6), (6, 2), (5, 1)])
def test_each_key_head_serves_consecutive_query_heads(
    h: int, k: int, draw: Draw
) -> None:
    operands = _qkv(draw, h=h, k=k)
    got = sdpa(*operands, return_residual=True)
    _assert_numpys(got, numpy_sdpa(*operands))


@pytest.mark.usefixtures("x64")
def test_operands_without_a_batch_axis_are_one_entry(draw: Draw) -> None:
    q, k, v = (x[0] for x in _qkv(draw))
    bias, lengths = draw("hst", jnp.float64), jnp.array([4])
    options = {"key_value_seq_lengths": lengths, "return_residual": True}
    got = sdpa(q, k, v, bias, **options)
    want = sdpa(q[None], k[None], v[None], bias, **options)
    assert [x.shape for x in got] == [shape_of("she"), shape_of("sh")]
    _assert_numpys(got, [x[0] for x in want])


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_on_the_cpu_every_implementation_is_the_same(
    implementation: Any, draw: Draw
) -> None:
    q, k, v = _qkv(draw, jnp.float32)
    got = sdpa(q, k, v, is_causal=True, implementation=implementation)
    np.testing.assert_array_equal(got, sdpa(q, k, v, is_causal=True))


# --- against jax.nn -------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "names",
    [(), ("bias",), ("mask",), ("is_causal",), ("key_lengths",), ("scale",), None],
    ids=lambda names: "all" if names is None else "-".join(names) or "plain",
)
def test_values_and_gradients_agree_with_jax_nn(
    names: tuple[str, ...] | None, draw: Draw
) -> None:
    q, k, v = _qkv(draw, e=SIZES["d"])
    options = {
        "bias": draw("1hst", jnp.float64),
        # Every query sees the first key: JAX and we differ for those that see none.
        "mask": (draw("b1st") > 0).at[..., 0].set(True),
        "is_causal": True,
        "key_value_seq_lengths": jnp.array([3, 7], jnp.int32),
        "scale": 0.7,
    }
    if names is not None:
        long = {"key_lengths": "key_value_seq_lengths"}
        kept = {long.get(name, name) for name in names}
        options = {name: x for name, x in options.items() if name in kept}

    def with_gradients(function: Callable[..., Any]) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, stats = function(q, k, v, **options, return_residual=True)
            # jax.nn lets no gradient through its residual.
            return jnp.sum(jnp.sin(out)), (out, stats)

        with jax.numpy_dtype_promotion("standard"):
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    got = with_gradients(sdpa)
    want = with_gradients(jax.nn.dot_product_attention)
    # jax.nn computes the softmax in f32, whatever the operands.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6), got, want
    )


# --- derivatives ----------------------------------------------------------------------


def _finite(stats: jax.Array) -> jax.Array:
    return jnp.where(jnp.isinf(stats), jnp.zeros_like(stats), stats)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("part", ["output", "stats", "both"])
def test_derivatives_of_both_modes_and_orders_match_differences(
    part: str, draw: Draw
) -> None:
    q, k, v = _qkv(draw, d=3, e=4, h=4, k=2)
    bias = draw("1hst", jnp.float64, h=4)
    mask = (draw("b1st") > -0.5).at[0, 0, 2].set(False)

    @jax.jit
    def function(*operands: jax.Array) -> Any:
        out, stats = sdpa(
            *operands,
            mask,
            query_seq_lengths=jnp.array([5, 3]),
            key_value_seq_lengths=jnp.array([0, 6]),
            return_residual=True,
        )
        return {"output": out, "stats": _finite(stats), "both": (out, _finite(stats))}[
            part
        ]

    check_grads(
        function, (q, k, v, bias), order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_derivatives_by_one_operand_match_differences(draw: Draw) -> None:
    operands = [*_qkv(draw, d=3, e=4, h=4, k=2), draw("bh1t", jnp.float64, h=4)]
    for i in range(len(operands)):

        @jax.jit
        def function(x: jax.Array, i: int = i) -> jax.Array:
            return sdpa(*operands[:i], x, *operands[i + 1 :], is_causal=True)

        check_grads(function, (operands[i],), 2, ("fwd", "rev"), atol=1e-6, rtol=1e-6)


def test_scores_far_below_zero_keep_their_log_sum_exp(draw: Draw) -> None:
    q, k, v = _qkv(draw, jnp.float32)
    bias = jnp.full((1, 1, 1, 1), -1e6, jnp.float32)
    out, stats = sdpa(q, k, v, bias, return_residual=True)
    want_out, want_stats = numpy_sdpa(q, k, v, bias)
    # At 1e6 neighbouring f32 scores lie 1/16 apart.
    np.testing.assert_allclose(stats, want_stats, atol=1 / 16)
    np.testing.assert_allclose(out, want_out, atol=1 / 16 * float(jnp.abs(v).max()))


# --- 16-bit operands ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_values_are_within_one_rounding_of_weights_and_result(
    dtype: Any, draw: Draw
) -> None:
    q, k, v = _qkv(draw, dtype, t=67, s=31, d=19)
    out, stats = sdpa(q, k, v, is_causal=True, return_residual=True)
    assert out.dtype == dtype
    assert stats.dtype == jnp.float32
    want_out, want_stats = numpy_sdpa(
        *(np.asarray(x, np.float64) for x in (q, k, v)), is_causal=True
    )
    # Weights, which sum to 1, are rounded by eps/2 at most, and so is the result. The
    # rest is f32, 4 bits and more below.
    bound = float(jnp.finfo(dtype).eps) * float(jnp.abs(v).max()) * 1.1
    assert np.abs(np.asarray(out, np.float64) - want_out).max() <= bound
    np.testing.assert_allclose(stats, want_stats, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_gradients_are_within_three_roundings(dtype: Any, draw: Draw) -> None:
    operands = (*_qkv(draw, dtype, t=67, s=31, d=19), draw("1hst", dtype, t=67, s=31))
    cotangent = draw("bshe", dtype, s=31)

    def gradients(*operands: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(sdpa, *operands)
        return pullback(jnp.asarray(cotangent, out.dtype))

    got = gradients(*operands)
    truth = gradients(*(jnp.asarray(x, jnp.float32) for x in operands))
    for one, true in zip(got, truth, strict=True):
        assert one.dtype == dtype
        error = jnp.asarray(one, jnp.float32) - true
        # The result, the slope dS and the saved output are rounded: eps/2 each.
        bound = 1.5 * float(jnp.finfo(dtype).eps)
        assert jnp.linalg.norm(error) <= bound * jnp.linalg.norm(true)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.bfloat16),
        (jnp.float32, jnp.float16),
    ],
)
def test_a_bias_may_have_a_dtype_of_its_own(
    dtype: Any, bias_dtype: Any, draw: Draw
) -> None:
    q, k, v = _qkv(draw, dtype)
    bias = draw("11st", bias_dtype)
    out, pullback = jax.vjp(lambda bias: sdpa(q, k, v, bias), bias)
    (gradient,) = pullback(jnp.ones_like(out))
    assert (out.dtype, gradient.dtype) == (dtype, bias_dtype)
    want, _ = numpy_sdpa(*(np.asarray(x, np.float64) for x in (q, k, v, bias)))
    bound = float(jnp.finfo(dtype).eps) * float(jnp.abs(v).max()) * 1.1 + 1e-5
    assert np.abs(np.asarray(out, np.float64) - want).max() <= bound


# --- axes of size zero ----------------------------------------------------------------


@pytest.mark.parametrize("axis", ["b", "s", "t", "h", "d", "e"])
def test_an_axis_of_size_zero_gives_an_empty_or_defined_result(
    axis: str, draw: Draw
) -> None:
    sizes = {"h": 0, "k": 0} if axis == "h" else {axis: 0}
    operands = _qkv(draw, jnp.float32, **sizes)

    def function(*operands: jax.Array) -> Any:
        return sdpa(*operands, return_residual=True)

    (out, stats), pullback = jax.vjp(function, *operands)
    all_sizes = {**SIZES, **sizes}
    assert out.shape == shape_of("bshe", all_sizes)
    assert stats.shape == shape_of("bsh", all_sizes)
    gradients = pullback((jnp.ones_like(out), jnp.ones_like(stats)))
    assert [x.shape for x in gradients] == [x.shape for x in operands]
    assert all(np.isfinite(x).all() for x in gradients)
    if axis == "t":
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(stats, -np.inf)
        np.testing.assert_array_equal(gradients[0], 0)
    if axis == "d":
        # All scores are 0: every query takes the mean of the values.
        mean = jnp.repeat(operands[2].mean(axis=1, keepdims=True), 2, axis=2)
        np.testing.assert_allclose(
            out, jnp.broadcast_to(mean, out.shape), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(stats, np.log(SIZES["t"]), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_the_smallest_sizes_are_taken(size: int, draw: Draw) -> None:
    operands = _qkv(draw, jnp.float32, **dict.fromkeys("bsthkde", size))
    out, stats = sdpa(*operands, return_residual=True)
    want_out, want_stats = numpy_sdpa(*operands)
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats, want_stats, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint8, np.int32, np.int8])
def test_lengths_beyond_the_axis_are_the_whole_axis_in_any_dtype(
    dtype: type, draw: Draw
) -> None:
    operands = _qkv(draw, jnp.float32)
    lengths = np.array([np.iinfo(dtype).max, 4], dtype)
    got = sdpa(*operands, key_value_seq_lengths=lengths)
    want = sdpa(*operands, key_value_seq_lengths=jnp.array([7, 4]))
    np.testing.assert_array_equal(got, want)
