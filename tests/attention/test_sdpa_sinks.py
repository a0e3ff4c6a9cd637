# SPDX-License-Identifier: Apache-2.0
"""Tests that a sink acts as one more key without a value, derivatives included.

The truth is a dense softmax in float64 (dense.py).
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
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import cached_sdpa, paged_sdpa, parallel, sdpa
from tests.attention.shared.dense import dense_attention
from tests.attention.shared.oracle import BROADCASTS, SIZES, shape_of
from tests.common import drawn
from tests.common.devices import collectives, gradient, mesh_of, placed
from tests.common.examples import examples

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_NAMES = ("query", "key", "value", "sinks", "bias")
_METHODS = ("ring", "all_gather", "all_to_all")


def _operands(
    rng: np.random.Generator, sizes: dict[str, int], bias: str | None
) -> list[Any]:
    axes = ("bshd", "btkd", "btke", "h", *([] if bias is None else [bias]))
    return [
        rng.standard_normal(shape_of(each, sizes)).astype(np.float32) for each in axes
    ]


@pytest.mark.once
@examples(12)
@given(
    number=st.integers(0, 2**32),
    bias=st.none() | st.sampled_from(BROADCASTS),
    is_causal=st.booleans(),
    window=st.sampled_from([None, (2, 1), (0, 3)]),
    has_lengths=st.booleans(),
    k=st.sampled_from([1, 3, 6]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)
def test_values_and_gradients_are_those_of_the_dense_softmax(
    number: int,
    bias: str | None,
    is_causal: bool,
    window: Any,
    has_lengths: bool,
    k: int,
    dtype: Any,
) -> None:
    rng = np.random.default_rng(number)
    sizes = {**SIZES, "k": k}
    operands = [
        jnp.asarray(np.asarray(x, dtype if i < 3 else jnp.float32))
        for i, x in enumerate(_operands(rng, sizes, bias))
    ]
    b, s, t, h = (sizes[letter] for letter in "bsth")
    lengths = rng.integers(0, t + 1, size=b) if has_lengths else np.full(b, t)
    rows, columns = np.arange(s)[:, None], np.arange(t)
    seen = np.broadcast_to(columns < lengths[:, None, None, None], (b, h, s, t))
    if is_causal:
        seen = seen & (columns <= rows)
    if window:
        seen = seen & (columns >= rows - window[0]) & (columns <= rows + window[1])
    weights = rng.standard_normal((b, s, h, sizes["e"] + 1))

    def loss(results: tuple[jax.Array, jax.Array]) -> jax.Array:
        output, lse = results
        both = jnp.concatenate([output.astype(lse.dtype), lse[..., None]], axis=-1)
        return jnp.sum(both * jnp.asarray(weights, lse.dtype))

    def ours(q: Any, k: Any, v: Any, sinks: Any, bias: Any = None) -> Any:
        return sdpa(
            q,
            k,
            v,
            bias,
            sinks=sinks,
            is_causal=is_causal,
            local_window_size=window,
            key_value_seq_lengths=lengths if has_lengths else None,
            return_residual=True,
        )

    def truth(q: Any, k: Any, v: Any, sinks: Any, bias: Any = None) -> Any:
        return dense_attention(q, k, v, sinks=sinks, bias=bias, seen=seen)

    places = tuple(range(len(operands)))

    @functools.partial(jax.jit, static_argnums=0)
    def both(function: Any, *operands: jax.Array) -> Any:
        gradient = jax.grad(lambda *x: loss(function(*x)), argnums=places)
        return function(*operands), gradient(*operands)

    got, found = both(ours, *operands)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in operands]
        want, true = both(truth, *wide)
        scales = [max(1.0, float(jnp.abs(y).max(initial=0))) for y in (*want, *true)]
        if bias is not None:
            # The terms of its sums may cancel.
            full = [*wide[:4], jnp.broadcast_to(wide[4], (b, h, s, t))]
            terms = jax.jit(jax.grad(lambda x: loss(truth(*full[:4], x))))(full[4])
            axes = [i for i, letter in enumerate(bias) if letter == "1"]
            scales[-1] = float(jnp.sum(jnp.abs(terms), axis=axes).max())
    assert got[0].dtype == dtype
    assert got[1].dtype == jnp.float32
    eps = float(jnp.finfo(dtype).eps)
    for name, x, y, scale in zip(
        ("output", "lse", *_NAMES), (*got, *found), (*want, *true), scales, strict=False
    ):
        error = np.abs(np.asarray(x, np.float64) - np.asarray(y)).max(initial=0)
        assert error <= 8 * eps * scale, (name, error / eps / scale)


def _given() -> dict[str, Any]:
    operands = _operands(np.random.default_rng(3), SIZES, "1hst")
    return dict(zip(_NAMES, operands, strict=True))


def _some(has_bias: bool) -> dict[str, Any]:
    operands = _given()
    return operands if has_bias else dict([*operands.items()][:4])


@pytest.mark.thorough
@pytest.mark.parametrize("names", [_NAMES, _NAMES[:4]])
def test_derivatives_agree_with_each_other_and_with_differences(
    names: tuple[str, ...],
) -> None:
    with jax.enable_x64(True):
        operands = {name: np.float64(_given()[name]) for name in names}

        def run(*arrays: Any) -> Any:
            given = dict(zip(operands, arrays, strict=True))
            return sdpa(**given, is_causal=True, return_residual=True)

        # A bias has the second order of the log-sum-exp, which others test.
        order = 1 if "bias" in names else 2
        check_grads(run, tuple(operands.values()), order=order)


@pytest.mark.parametrize("count", [4, 5])
def test_random_operands_may_be_examples_of_a_vmap(count: int) -> None:
    operands = dict([*_given().items()][:count])
    for chosen in itertools.product([False, True], repeat=count):
        if sum(chosen) not in (1, 3):
            continue
        stacked = [
            np.stack([x, x[::-1], -x]) if batched else x
            for x, batched in zip(operands.values(), chosen, strict=True)
        ]
        axes = tuple(0 if batched else None for batched in chosen)
        got = jax.jit(jax.vmap(_with_gradient, in_axes=axes))(*stacked)
        for i in range(3):
            one = [
                x[i] if batched else x
                for x, batched in zip(stacked, chosen, strict=True)
            ]
            want = _with_gradient(*one)
            for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                np.testing.assert_allclose(x[i], y, rtol=2e-4, atol=2e-5)


def _by_name(*arrays: Any) -> jax.Array:
    return sdpa(**dict(zip(_NAMES, arrays, strict=False)))


@jax.jit
def _with_gradient(*arrays: Any) -> Any:
    return _by_name(*arrays), gradient(_by_name)(*arrays)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sink_of_minus_infinity_is_none(has_bias: bool) -> None:
    operands = _some(has_bias)
    sinks = operands.pop("sinks")
    none = np.full_like(sinks, -np.inf)
    lengths = np.array([0, 5])  # one batch entry sees no key
    call = functools.partial(
        sdpa, **operands, key_value_seq_lengths=lengths, return_residual=True
    )
    for x, y in zip(call(sinks=none), call(), strict=True):
        np.testing.assert_array_equal(x, y)

    def loss(sinks: Any) -> Any:
        output, lse = call(sinks=sinks)
        return jnp.sum(output) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))

    np.testing.assert_array_equal(jax.grad(loss)(none), np.zeros_like(none))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sink", [np.inf, np.finfo(np.float32).max, 1e4])
def test_a_sink_above_all_scores_takes_everything(sink: float, has_bias: bool) -> None:
    operands = _some(has_bias)
    operands["sinks"] = np.full_like(operands["sinks"], sink)
    output, lse = sdpa(**operands, return_residual=True)
    np.testing.assert_array_equal(output, np.zeros_like(output))
    np.testing.assert_array_equal(lse, np.full_like(lse, sink))
    gradients = jax.grad(lambda x: jnp.sum(sdpa(**x)))(operands)
    for x in gradients.values():
        np.testing.assert_array_equal(x, np.zeros_like(x))


def test_a_sink_of_nan_reaches_its_head_only() -> None:
    operands = _given()
    clean = sdpa(**operands)
    operands["sinks"] = operands["sinks"].copy()
    operands["sinks"][2] = np.nan
    output = np.asarray(sdpa(**operands))
    assert np.isnan(output[:, :, 2]).all()
    rest = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(output[:, :, rest], clean[:, :, rest])


def test_without_a_batch_axis_and_with_symbolic_lengths() -> None:
    operands = _given()
    whole = sdpa(**operands, return_residual=True)
    q, k, v, sinks, bias = operands.values()
    one = sdpa(q[0], k[0], v[0], bias, sinks=sinks, return_residual=True)
    for x, y in zip(one, whole, strict=True):
        np.testing.assert_allclose(x, y[0], rtol=1e-5, atol=1e-6)

    (length,) = jax.export.symbolic_shape("s")
    shapes = [(*x.shape[:1], length, *x.shape[2:]) for x in (q, k, v)]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    exported = jax.export.export(
        jax.jit(lambda q, k, v: sdpa(q, k, v, sinks=sinks)),
        disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
    )(*given)
    np.testing.assert_allclose(
        exported.call(q, k[:, :5], v[:, :5]),
        sdpa(q, k[:, :5], v[:, :5], sinks=sinks),
        rtol=1e-5,
        atol=1e-6,
    )


# --- several devices ------------------------------------------------------------------


def _sharded() -> list[jax.Array]:
    shapes = (4, 8, 8, 4), (4, 8, 4, 4), (4, 8, 4, 6), (8,)
    return [drawn.normal(i, shape) for i, shape in enumerate(shapes)]


def _causal(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    return sdpa(q, k, v, sinks=sinks, is_causal=True)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_stay_sharded(kind: AxisType) -> None:
    operands = _sharded()
    specs = [("x", None, "y")] * 3 + [("y",)]
    sharded = placed(mesh_of(kind, x=4, y=2), operands, specs)
    for function, sent in ((_causal, {}), (gradient(_causal), {"all-reduce": 1})):
        got, want = jax.jit(function)(*sharded), function(*operands)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        assert collectives(function, *sharded) == sent


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_a_sharded_sequence_has_them_once(method: Any) -> None:
    operands = _sharded()
    mesh = mesh_of(x=2, y=2, z=2)

    def run(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
        return parallel.sharded_sdpa(
            q,
            k,
            v,
            sinks=sinks,
            mesh=mesh,
            axis="x",
            batch_axis="z",
            head_axis="y",
            method=method,
            is_causal=True,
        )

    for ours, whole in ((run, _causal), (gradient(run), gradient(_causal))):
        got, want = jax.jit(ours)(*operands), whole(*operands)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        (
            np.zeros((3,), np.float32),
            ValueError,
            "sdpa: sinks is f32[3]. It must have one number per query head, shape [6].",
        ),
        (
            np.zeros((1, 6), np.float32),
            ValueError,
            "sdpa: sinks is f32[1,6]. It must have one number per query head, "
            "shape [6].",
        ),
        (np.zeros((6,), np.int32), TypeError, "sdpa: sinks is i32[6]"),
        (np.zeros((6,), bool), TypeError, "sdpa: sinks is bool[6]"),
        ("six", TypeError, "sdpa: sinks"),
    ],
)
def test_wrong_sinks_are_refused(
    sinks: Any, error: type[Exception], message: str
) -> None:
    operands = _given()
    operands["sinks"] = sinks
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        sdpa(**operands)


def test_the_cotangent_of_padding_is_not_read() -> None:
    rng = np.random.default_rng(3)
    query, grad = rng.standard_normal((2, 2, 5, 4, 8)).astype(np.float32)
    sinks, lengths = jnp.ones(4), jnp.array([3, 0])

    def total(sinks: jax.Array, grad: jax.Array) -> jax.Array:
        output = jax_cudnn.sdpa(
            query, query, query, sinks=sinks, query_seq_lengths=lengths
        )
        return jnp.sum(jnp.where(grad == 0, 0, output * grad))

    kept = np.where(
        np.arange(5)[:, None, None] < np.array(lengths)[:, None, None, None], grad, 0
    )
    want = jax.grad(total)(sinks, kept)
    output, pull = jax.vjp(
        lambda sinks: jax_cudnn.sdpa(
            query, query, query, sinks=sinks, query_seq_lengths=lengths
        ),
        sinks,
    )
    spoiled = np.where(kept == 0, np.nan, kept)
    assert output.shape == grad.shape
    (got,) = pull(jnp.asarray(spoiled))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "cached_sdpa", "paged_sdpa", *_METHODS])
def test_a_query_that_sees_no_key_has_the_sink_as_its_log_sum_exp(name: str) -> None:
    """So have queries that are padding; without sinks it is -inf."""
    q, k, v = (drawn.normal(i, (3, 6, 2, 8)) for i in range(3))
    sinks = jnp.array([-0.5, 2.5])
    # The second entry has no key, and the third one no query.
    keys, queries = jnp.array([6, 0, 6]), jnp.array([6, 6, 0])
    lengths = {"key_value_seq_lengths": keys, "query_seq_lengths": queries}
    mesh = jax.make_mesh(
        (2,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    call = {
        "sdpa": lambda **given: sdpa(q, k, v, **lengths, **given),
        "cached_sdpa": lambda **given: cached_sdpa(
            q, k, v, keys, query_seq_lengths=queries, **given
        ),
        "paged_sdpa": lambda **given: paged_sdpa(
            q, k, v, jnp.arange(3)[:, None], keys, query_seq_lengths=queries, **given
        ),
    }.get(
        name,
        lambda **given: parallel.sharded_sdpa(
            q, k, v, mesh=mesh, axis="s", method=name, **lengths, **given  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    _, lse = call(return_residual=True)
    _, with_sinks = call(return_residual=True, sinks=sinks)
    assert np.isfinite(lse[0]).all()
    assert (np.asarray(lse[1:]) == -np.inf).all()
    np.testing.assert_allclose(with_sinks[0], np.logaddexp(lse[0], sinks), rtol=1e-5)
    np.testing.assert_array_equal(
        with_sinks[1:], np.broadcast_to(sinks, (2, 6, 2)).astype(np.float32)
    )
