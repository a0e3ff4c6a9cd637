# SPDX-License-Identifier: Apache-2.0
"""Tests f8 attention against its formula, under every transformation it takes.

The truth is NumPy in float64 (f8.py), with a bound for what rounding may do.
"""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import jax_cudnn
from jax_cudnn import f8
from tests.attention.shared.f8 import Truth, check, dense, wide
from tests.attention.shared.oracle import SIZES, shape_of
from tests.common.devices import collectives, mesh_of, placed
from tests.common.examples import examples

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2]
_NAMES = ("query_scale", "key_scale", "value_scale")
_SCALES: dict[str, Any] = {"query_scale": 0.75, "key_scale": 1.25, "value_scale": 0.5}


def _operands(
    rng: np.random.Generator, dtype: Any, sizes: Any = SIZES
) -> list[jax.Array]:
    return [
        jnp.asarray(
            np.asarray(rng.standard_normal(shape_of(axes, sizes)), jnp.float32)
        ).astype(dtype)
        for axes in ("bshd", "btkd", "btke")
    ]


def _truth(operands: Any, **more: Any) -> Truth:
    scales = (_SCALES["query_scale"], _SCALES["key_scale"], _SCALES["value_scale"])
    return dense(*operands, **{"scales": scales, **more})


@examples(30)
@given(
    number=st.integers(0, 2**32),
    dtype=st.sampled_from(_DTYPES),
    result=st.sampled_from([*_DTYPES, jnp.bfloat16, jnp.float16, None]),
    scales=st.tuples(*[st.floats(0.125, 2, width=32)] * 3),
    output_scale=st.none() | st.floats(2.0**-10, 1, width=32),
    is_causal=st.booleans(),
    window=st.sampled_from([None, (2, 1), (0, 3)]),
    has_lengths=st.booleans(),
    sizes=st.tuples(*[st.integers(1, 11)] * 4),
    heads=st.sampled_from([(1, 1), (6, 3), (5, 1), (3, 3)]),
    layout=st.sampled_from(["bshd", "bhsd", "sbhd"]),
)
def test_results_are_those_of_the_formula(
    number: int,
    dtype: Any,
    result: Any,
    scales: tuple[float, float, float],
    output_scale: float | None,
    is_causal: bool,
    window: Any,
    has_lengths: bool,
    sizes: tuple[int, int, int, int],
    heads: tuple[int, int],
    layout: Any,
) -> None:
    rng = np.random.default_rng(number)
    s, t, d, e = sizes
    h, k = heads
    letters = {"b": 2, "s": s, "t": t, "d": d, "e": e, "h": h, "k": k}
    operands = _operands(rng, dtype, letters)
    lengths = rng.integers(0, t + 1, size=2) if has_lengths else np.full(2, t)
    rows, columns = np.arange(s)[:, None], np.arange(t)
    seen = np.broadcast_to(columns < lengths[:, None, None, None], (2, h, s, t))
    if is_causal:
        seen = seen & (columns <= rows)
    if window:
        seen = seen & (columns >= rows - window[0]) & (columns <= rows + window[1])
    is_f8 = result is None or np.dtype(result).itemsize == 1
    axes = ["bshd".index(letter) for letter in layout]
    output, lse, amax = f8.sdpa(
        *(jnp.transpose(x, axes) for x in operands),
        layout=layout,
        query_scale=scales[0],
        key_scale=scales[1],
        value_scale=scales[2],
        output_scale=output_scale if is_f8 else None,
        is_causal=is_causal,
        local_window_size=window,
        key_value_seq_lengths=lengths if has_lengths else None,
        preferred_element_type=result,
        return_residual=True,
        return_amax=True,
    )
    output = jnp.transpose(output, [layout.index(letter) for letter in "bshd"])
    assert output.dtype == (dtype if result is None else result)
    assert (lse.dtype, amax.dtype, amax.shape) == (jnp.float32, jnp.float32, ())
    truth = dense(*operands, scales=scales, seen=seen)
    unit = (output_scale or scales[2]) if is_f8 else 1
    check(truth, output, unit, lse=lse, amax=amax)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_weights_are_rounded_before_they_are_divided(dtype: Any) -> None:
    """As cuDNN does (9.19 on an H200); rounded after it, every other number differs."""
    operands = _operands(np.random.default_rng(2), dtype)
    truth = _truth(operands)
    output = f8.sdpa(*operands, **_SCALES, output_scale=1e-3)
    want = np.asarray(f8.quantize(wide(truth.kernel), 1e-3, dtype))
    same = np.asarray(output).view(np.uint8) == want.view(np.uint8)
    assert same.mean() > 0.99
    unrounded = np.asarray(f8.quantize(wide(truth.output), 1e-3, dtype))
    assert (unrounded.view(np.uint8) == want.view(np.uint8)).mean() < 0.9


def test_without_an_output_scale_nothing_saturates() -> None:
    q, k, v = _operands(np.random.default_rng(3), jnp.float8_e4m3fn)
    v = jnp.full_like(v, 448)
    output = f8.sdpa(q, k, v, **_SCALES)
    assert set(np.unique(wide(output))) <= {416.0, 448.0}


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_small_output_scale_saturates_and_the_amax_does_not(dtype: Any) -> None:
    operands = _operands(np.random.default_rng(4), dtype)
    output, amax = f8.sdpa(*operands, **_SCALES, output_scale=1e-9, return_amax=True)
    most = float(jnp.finfo(dtype).max)
    truth = _truth(operands)
    sure = np.abs(truth.output) > truth.error
    found = wide(output)
    np.testing.assert_array_equal(found[sure], (np.sign(truth.output) * most)[sure])
    check(truth, output, 1e-9, amax=amax)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_nan_reaches_what_reads_it_and_not_the_amax(dtype: Any) -> None:
    q, k, v = _operands(np.random.default_rng(5), dtype)
    _, clean = f8.sdpa(q, k, v, **_SCALES, return_amax=True)
    spoiled = q.at[1, 2, 3, 4].set(jnp.asarray(np.asarray(np.nan, dtype)))
    output, lse, amax = f8.sdpa(
        spoiled, k, v, **_SCALES, return_residual=True, return_amax=True
    )
    is_nan = np.isnan(wide(output))
    assert is_nan[1, 2, 3].all()
    assert is_nan.sum() == SIZES["e"]
    assert np.argwhere(np.isnan(lse)).tolist() == [[1, 2, 3]]
    assert 0 < float(amax) <= float(clean)
    spoiled = v.at[0, 2, 1, 4].set(jnp.asarray(np.asarray(np.nan, dtype)))
    output = f8.sdpa(q, k, spoiled, **_SCALES)
    is_nan = np.isnan(wide(output))
    assert is_nan[0, :, 2:4, 4].all()  # the query heads of key head 1
    assert is_nan.sum() == 2 * SIZES["s"]


@pytest.mark.parametrize("name", [*_NAMES, "output_scale"])
@pytest.mark.parametrize("number", [0.0, -1.0, np.nan])
def test_a_scale_that_is_not_above_0_gives_nan(name: str, number: float) -> None:
    operands = _operands(np.random.default_rng(6), jnp.float8_e4m3fn)
    scales = {**_SCALES, "output_scale": 1.0, name: number}
    output = f8.sdpa(*operands, **scales)
    assert np.isnan(wide(output)).all()


@pytest.mark.parametrize("letter", ["b", "s", "t", "d", "e"])
def test_empty_operands(letter: str) -> None:
    sizes = {**SIZES, letter: 0}
    operands = _operands(np.random.default_rng(7), jnp.float8_e4m3fn, sizes)
    output, lse, amax = f8.sdpa(
        *operands, **_SCALES, scale=1.0, return_residual=True, return_amax=True
    )
    assert output.shape == shape_of("bshe", sizes)
    if letter == "t":
        assert not wide(output).any()
        assert np.all(lse == -np.inf)
    if letter != "d":
        assert float(amax) == 0


def test_queries_past_their_length_are_zero_and_not_in_the_amax() -> None:
    q, k, v = _operands(np.random.default_rng(8), jnp.float8_e4m3fn)
    lengths = np.array([2, 0])
    output, lse, amax = f8.sdpa(
        q,
        k,
        v,
        **_SCALES,
        query_seq_lengths=lengths,
        return_residual=True,
        return_amax=True,
    )
    found = wide(output)
    assert not found[0, 2:].any()
    assert not found[1].any()
    assert np.all(np.asarray(lse)[1] == -np.inf)
    _, alone = f8.sdpa(q[:1, :2], k[:1], v[:1], **_SCALES, return_amax=True)
    np.testing.assert_allclose(amax, alone, rtol=1e-6)


# --- transformations ------------------------------------------------------------------


def _everything(q: Any, k: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return f8.sdpa(
        q,
        k,
        v,
        query_scale=a,
        key_scale=b,
        value_scale=c,
        output_scale=d,
        return_residual=True,
        return_amax=True,
    )


def _only_output(*operands: Any) -> Any:
    return _everything(*operands)[0]


def test_random_operands_may_be_examples_of_a_vmap() -> None:
    rng = np.random.default_rng(9)
    operands = [
        *_operands(rng, jnp.float8_e4m3fn),
        *np.array([0.7, 1.2, 0.5, 0.02], np.float32),
    ]
    both = jax.jit(lambda *xs: (_everything(*xs), _only_output(*xs)))
    choices = [*itertools.product([False, True], repeat=7)][1:]
    for index in rng.choice(len(choices), size=14, replace=False):
        chosen = choices[index]
        stacked = [
            jnp.stack([x, x[::-1], x * jnp.asarray(0.5, x.dtype)])
            if batched and np.ndim(x)
            else jnp.stack([x, 2 * x, x / 2])
            if batched
            else x
            for x, batched in zip(operands, chosen, strict=True)
        ]
        axes = tuple(0 if batched else None for batched in chosen)
        got = jax.jit(jax.vmap(both, in_axes=axes))(*stacked)
        for i in range(3):
            one = [
                x[i] if batched else x
                for x, batched in zip(stacked, chosen, strict=True)
            ]
            for x, y in zip(*map(jax.tree.leaves, (got, both(*one))), strict=True):
                _assert_same(x[i], y)


def _assert_same(x: Any, y: Any) -> None:
    """Compare results whose sums may differ in order: f8 may round the other way."""
    x, y = (jnp.asarray(each) for each in (x, y))
    if x.dtype.itemsize > 1:
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-6)
        return
    both = [wide(each) for each in (x, y)]
    np.testing.assert_allclose(*both, rtol=2.0**-2, atol=2.0**-8)
    assert (both[0] == both[1]).mean() > 0.98


def test_examples_fold_where_they_share_the_scales_and_no_amax_is_asked() -> None:
    q, k, v = _operands(np.random.default_rng(10), jnp.float8_e4m3fn)
    batch = [jnp.stack([x] * 3) for x in (q, k, v)]
    fixed = functools.partial(f8.sdpa, **_SCALES)
    text = str(jax.make_jaxpr(jax.vmap(fixed))(*batch))
    assert text.count("cudnn_graph[") == 1
    assert "6,6,5,11" in text  # the batch of 2 is 6 images


def test_jit_and_scan_compute_the_same() -> None:
    q, k, v = _operands(np.random.default_rng(11), jnp.float8_e4m3fn)
    want = f8.sdpa(q, k, v, **_SCALES)
    _assert_same(jax.jit(functools.partial(f8.sdpa, **_SCALES))(q, k, v), want)

    def step(scale: Any, _: None) -> Any:
        scales = {**_SCALES, "output_scale": scale}
        output, amax = f8.sdpa(q, k, v, **scales, return_amax=True)
        return f8.scale_from_amax(amax), output

    _, outputs = jax.lax.scan(step, jnp.float32(0.5), length=2)
    _assert_same(outputs[0], want)
    assert float(f8.amax(outputs[1])) >= 416


def test_a_program_is_exported_for_gpus_and_with_symbolic_sizes() -> None:
    q, k, v = _operands(np.random.default_rng(12), jnp.float8_e4m3fn)
    function = jax.jit(functools.partial(f8.sdpa, **_SCALES, return_amax=True))
    checks = jax_cudnn.EXPORT_SAFETY_CHECKS
    fixed = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)
    text = fixed(q, k, v).mlir_module()
    assert "jax_cudnn.graph" in text
    assert "sdpa_f8" in text
    (size,) = jax.export.symbolic_shape("s")
    shapes = [jax.ShapeDtypeStruct((2, size, *x.shape[2:]), x.dtype) for x in (q, k, v)]
    free = jax.export.export(function, disabled_checks=checks)(*shapes)
    got = free.call(q, k[:, :5], v[:, :5])
    for x, y in zip(got, function(q, k[:, :5], v[:, :5]), strict=True):
        _assert_same(x, y)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_stay_sharded_and_the_amax_is_of_all(kind: AxisType) -> None:
    sizes = {"b": 4, "s": 8, "t": 8, "h": 8, "k": 4, "d": 4, "e": 6}
    operands = _operands(np.random.default_rng(13), jnp.float8_e4m3fn, sizes)
    # The largest output is on one device only.
    operands[2] = operands[2].at[3, :, 1].multiply(jnp.asarray(16, jnp.float8_e4m3fn))
    specs = [("x", None, "y")] * 3
    sharded = placed(mesh_of(kind, x=4, y=2), operands, specs)

    def with_amax(*operands: Any) -> Any:
        return f8.sdpa(*operands, **_SCALES, return_residual=True, return_amax=True)

    def alone(*operands: Any) -> Any:
        return f8.sdpa(*operands, **_SCALES)

    got, want = jax.jit(with_amax)(*sharded), with_amax(*operands)
    for x, y in zip(got, want, strict=True):
        _assert_same(x, y)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-6)
    assert collectives(with_amax, *sharded) == {"all-reduce": 1}
    assert collectives(alone, *sharded) == {}


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query", *_NAMES])
def test_it_has_no_derivative(name: str) -> None:
    operands = _operands(np.random.default_rng(14), jnp.float8_e4m3fn)
    given = dict(zip(("query", "key", "value"), operands, strict=True))
    given |= {scale: jnp.float32(x) for scale, x in _SCALES.items()}

    def loss(x: Any) -> Any:
        return jnp.sum(f8.sdpa(**{**given, name: x}).astype(jnp.float32))

    message = (
        f"^f8.sdpa: it is differentiated with respect to {name}. It has no "
        "derivative: a cotangent in f8 would need a scale of its own. Call "
        "f8.quantized_sdpa, whose operands are bf16 or f16, or apply "
        "jax.lax.stop_gradient to the operands and scales."
    )
    for run in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(TypeError, match=message):
            run(given[name])
    stopped = jax.grad(lambda x: loss(jax.lax.stop_gradient(x)) + 0 * jnp.sum(x))
    if name != "query":
        assert float(stopped(given[name])) == 0


# --- errors ---------------------------------------------------------------------------

_Q = jnp.zeros((2, 5, 6, 16), jnp.float8_e4m3fn)
_K = jnp.zeros((2, 7, 3, 16), jnp.float8_e4m3fn)
_GOOD: dict[str, Any] = {"query": _Q, "key": _K, "value": _K, **_SCALES}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"query": _Q.astype(jnp.bfloat16)},
            TypeError,
            "f8.sdpa: query is bf16[2,5,6,16]. Supported dtypes are f8_e4m3fn, "
            "f8_e5m2. Convert it with f8.quantize, or call f8.quantized_sdpa, which "
            "does.",
        ),
        (
            {"value": _K.astype(jnp.float8_e5m2)},
            TypeError,
            "f8.sdpa: value is f8_e5m2[2,7,3,16] but query is f8_e4m3fn[2,5,6,16]. "
            "cuDNN takes one dtype. Quantize value to f8_e4m3fn.",
        ),
        (
            {"key_scale": jnp.ones(3)},
            TypeError,
            "f8.sdpa: key_scale is f32[3]. It must be one number for the whole tensor, "
            "of shape []: cuDNN has no scales by head or block on sm_90.",
        ),
        (
            {"output_scale": True},
            TypeError,
            "f8.sdpa: output_scale is bool[]. A scale must be a real number.",
        ),
        ({"query_scale": None}, TypeError, "f8.sdpa: query_scale is None."),
        (
            {"preferred_element_type": jnp.float32},
            TypeError,
            "f8.sdpa: preferred_element_type=float32 is not one of f8_e4m3fn, f8_e5m2, "
            "bf16, f16. Convert the result instead.",
        ),
        (
            {"preferred_element_type": "eight"},
            TypeError,
            "f8.sdpa: preferred_element_type='eight' is not one of",
        ),
        (
            {"preferred_element_type": jnp.bfloat16, "output_scale": 1.0},
            ValueError,
            "f8.sdpa: output_scale with a result in bf16, which has no scale. Leave it "
            "out, or ask for a result in f8.",
        ),
        ({"key": _K[:1]}, ValueError, "f8.sdpa: batch sizes differ"),
        ({"scale": jnp.inf}, ValueError, "f8.sdpa: scale=inf is not finite."),
        ({"return_amax": 1}, TypeError, "f8.sdpa: return_amax is int."),
        ({"implementation": "fast"}, ValueError, "f8.sdpa: implementation"),
    ],
)
def test_wrong_arguments_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        f8.sdpa(**{**_GOOD, **change})
