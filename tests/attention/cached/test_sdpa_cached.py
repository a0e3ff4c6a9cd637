# SPDX-License-Identifier: Apache-2.0
"""Tests attention over caches and pages against NumPy, under every transformation."""

from dataclasses import replace
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
from jax_cudnn import kv_cache, masks
from jax_cudnn.errors import UnsupportedError
from tests.attention.shared.cached import Drawn, Problem, draw, in_pages
from tests.common import drawn
from tests.common.devices import mesh_of, placed

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}
# Lengths to which int32 cannot add much.
_FAR = st.sampled_from([2**30, 2**31 - 1])
_RAGGED = Problem(lengths=(0, 1, 23, 9, 17), s=3, query_lengths=(3, 1, 2, 0, 9))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a problem of any form."""
    b, s, t = (draw(st.integers(1, most)) for most in (4, 5, 19))
    page = draw(st.sampled_from([0, 1, 2, 3, 4, 8, 32]))
    layouts = ("bshd", "bhsd") if page else ("bshd", "bhsd", "sbhd")
    counts = st.tuples(*[st.integers(-1, s + 1)] * b)
    is_causal = draw(st.booleans())
    windows = st.tuples(st.integers(-2, 9), st.integers(-2, 4))
    # Others are refused: no query sees a key in them.
    windows = windows.filter(lambda w: w[0] + min(w[1], 0 if is_causal else 4) >= 0)
    window = draw(st.none() | windows)
    has_room = s <= t or not (is_causal or window)
    return Problem(
        # Up to twice the tokens that there is room for, and more.
        lengths=draw(st.tuples(*[st.integers(-2, 2 * t) | _FAR] * b)),
        page=page,
        s=s,
        t=t,
        k=draw(st.integers(1, 3)),
        g=draw(st.integers(1, 3)),
        d=draw(st.sampled_from([1, 5, 8])),
        e=draw(st.sampled_from([1, 3, 8])),
        query_lengths=draw(st.none() | counts if has_room else counts),
        is_causal=is_causal,
        window=window,
        scale=draw(st.sampled_from([None, 0.7, -1.25, 0.0])),
        sinks=draw(st.booleans()),
        layout=draw(st.sampled_from(layouts)),
    )


@given(problem=problems(), seed=st.integers(0, 2**31))
def test_it_is_numpys_answer(problem: Problem, seed: int) -> None:
    drawn = draw(problem, seed)
    for x, y in zip(drawn.call(), drawn.truth, strict=True):
        np.testing.assert_allclose(x, y, **_CLOSE)


@pytest.mark.parametrize("page", [0, 4])
def test_tokens_past_the_room_are_nan_and_the_others_right(page: int) -> None:
    """The update drops these tokens; all others have their keys, and no other's."""
    b, s, t, held = 3, 5, 12, (4, 9, 12)
    whole = Problem(lengths=tuple(n + s for n in held), s=s, t=t + s)
    drawn = draw(whole, poison=False)
    truth = [np.array(x) for x in drawn.truth]
    places = np.array(held)[:, None] + np.arange(s)
    for x in truth:
        x[places >= t] = np.nan
    room = -(-t // page) * page if page else t
    assert room == t
    starts = jnp.array(held)
    caches, each = [], t // page if page else 0
    table = jnp.arange(b * each, dtype=jnp.int32)[::-1].reshape(b, each)
    for x in drawn.dense:
        new = jnp.asarray(x[np.arange(b)[:, None], places])
        if page:
            pages = jnp.asarray(x[:, :t].reshape(b * each, page, *x.shape[2:])[::-1])
            caches.append(kv_cache.update_pages(pages, new, table, starts))
        else:
            caches.append(kv_cache.update(jnp.asarray(x[:, :t]), new, starts))
    run = jax_cudnn.paged_sdpa if page else jax_cudnn.cached_sdpa
    where = (table, drawn.lengths) if page else (drawn.lengths,)
    found = run(drawn.query, *caches, *where, return_residual=True)
    for x, y in zip(found, truth, strict=True):
        np.testing.assert_allclose(x, y, **_CLOSE)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("s", [1, 3])
def test_latent_heads_share_one_key_head(s: int, page: int) -> None:
    problem = Problem(lengths=(0, 1, 23, 9, 17), s=s, k=1, g=5, d=576, e=512)
    drawn = draw(in_pages(problem, page))
    for x, y in zip(drawn.call(), drawn.truth, strict=True):
        np.testing.assert_allclose(x, y, **_CLOSE)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_are_those_of_the_operands(dtype: str, page: int) -> None:
    drawn = draw(replace(in_pages(_RAGGED, page), dtype=dtype))
    output, lse = drawn.call()
    assert output.dtype == jnp.dtype(dtype)
    assert lse.dtype == jnp.float32
    error = 2 * float(jnp.finfo(dtype).eps)
    for x, y in zip((output, lse), drawn.truth, strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=error, atol=error)
    assert isinstance(drawn.call(return_residual=False), jax.Array)


@pytest.mark.parametrize("page", [0, 4])
def test_f64_is_kept(page: int) -> None:
    with jax.enable_x64(True):
        drawn = draw(replace(in_pages(_RAGGED, page), dtype="float64"))
        assert drawn.query.dtype == jnp.float64
        for x, y in zip(drawn.call(), drawn.truth, strict=True):
            assert x.dtype == jnp.float64
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("window", [None, (4, 0), (2, 1)])
def test_it_is_sdpa_with_a_mask_at_the_end_of_the_cache(
    s: int, window: tuple[int, int] | None
) -> None:
    counts = tuple(min(n, s) for n in (1, 0, 2, 3, 1))
    problem = replace(_RAGGED, s=s, window=window, query_lengths=counts)
    drawn = draw(problem, poison=False)
    mask = masks.Causal("cache") & masks.Lengths(drawn.query_lengths, drawn.lengths)
    if window is not None:
        mask = masks.Window(*window, "cache") & mask
    found = jax_cudnn.sdpa(
        drawn.query, drawn.key, drawn.value, mask=mask, return_residual=True
    )
    for x, y in zip(found, drawn.truth, strict=True):
        np.testing.assert_allclose(x, y, **_CLOSE)


def test_pages_may_be_shared_by_sequences() -> None:
    k, v = drawn.normal(0, (2, 5, 4, 2, 8))
    q = drawn.normal(1, (3, 1, 4, 8))
    table = jnp.array([[4, 1, 0], [4, 1, 3], [4, 2, 2]])
    lengths = jnp.array([9, 12, 6])
    got = jax_cudnn.paged_sdpa(q, k, v, table, lengths)
    dense = [x[table].reshape(3, 12, 2, 8) for x in (k, v)]
    want = jax_cudnn.cached_sdpa(q, *dense, lengths)
    np.testing.assert_allclose(got, want, **_CLOSE)


def test_numbers_that_are_no_page_are_the_nearest_one() -> None:
    k, v = drawn.normal(0, (2, 3, 4, 1, 8))
    q = drawn.normal(1, (1, 1, 1, 8))
    got, want = (
        jax_cudnn.paged_sdpa(q, k, v, jnp.array([table]), jnp.array([8]))
        for table in ([-7, 3], [0, 2])
    )
    np.testing.assert_array_equal(got, want)
    for dtype in (jnp.int8, jnp.uint8, jnp.int16):
        same = jax_cudnn.paged_sdpa(
            q, k, v, jnp.array([[0, 2]], dtype), jnp.array([8], dtype)
        )
        np.testing.assert_array_equal(same, want)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("empty", ["b", "s", "t", "k", "d", "e"])
def test_empty_axes(page: int, empty: str) -> None:
    problem = in_pages(_RAGGED, page)
    changed: dict[str, Any] = {empty: 0}
    if empty == "b":
        changed = {"lengths": (), "query_lengths": ()}
    if empty == "t":
        changed["lengths"] = (0,) * 5
    drawn = draw(replace(problem, **changed))
    for x, y in zip(drawn.call(), drawn.truth, strict=True):
        np.testing.assert_allclose(x, y, **_CLOSE)


# --- derivatives ----------------------------------------------------------------------


def _function(drawn: Drawn) -> Any:
    is_live = drawn.truth[1] != -np.inf

    def call(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array]:
        output, lse = drawn.call(query=query, key=key, value=value)
        return output, jnp.where(is_live, lse, 0)

    return call


@pytest.mark.thorough
@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("window", [None, (3, 1)])
def test_derivatives_of_every_mode(page: int, window: tuple[int, int] | None) -> None:
    problem = replace(_RAGGED, page=page, window=window, k=2, d=3, e=4)
    drawn = draw(problem, poison=False)
    call = _function(drawn)
    operands = (drawn.query, drawn.key, drawn.value)
    check_grads(call, operands, order=2, modes=("fwd", "rev"), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page", [0, 4])
def test_what_is_past_a_length_has_no_gradient(page: int) -> None:
    drawn = draw(in_pages(_RAGGED, page))

    def loss(query: Any, key: Any, value: Any) -> jax.Array:
        output, lse = _function(drawn)(query, key, value)
        return jnp.sum(jnp.sin(output)) + jnp.sum(lse**2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    grads = gradient(drawn.query, drawn.key, drawn.value)
    for x, gradient in zip((drawn.query, drawn.key, drawn.value), grads, strict=True):
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[np.isnan(x)].any()
    assert all(np.asarray(gradient).any() for gradient in grads)


@pytest.mark.parametrize("page", [0, 4])
def test_gradients_are_nan_where_a_token_has_no_room(page: int) -> None:
    """Those of its own query and of its sequence, so that no sum is short of it."""
    problem = Problem(lengths=(8, 10, 9), s=2, t=8, k=2, page=page)
    drawn = draw(problem, poison=False)

    def loss(query: Any, key: Any, value: Any) -> jax.Array:
        return jnp.sum(jnp.sin(drawn.call(query=query, key=key, value=value)[0]))

    operands = (drawn.query, drawn.key, drawn.value)
    of_query, *of_cache = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*operands)
    is_nan = np.isnan(of_query).all((2, 3))
    assert is_nan.tolist() == [[False, False], [True, True], [False, True]]
    assert np.isfinite(of_query[~is_nan]).all()
    for x in of_cache:
        if drawn.page_table is not None:
            x = x[drawn.page_table].reshape(3, 8, *x.shape[2:])
        assert np.isnan(x).all((1, 2, 3)).tolist() == [False, True, True]
        assert np.isfinite(x[0]).all()


def test_sinks_have_a_gradient() -> None:
    drawn = draw(replace(in_pages(_RAGGED, 4), sinks=True))

    @jax.jit
    def call(query: Any, sinks: Any) -> jax.Array:
        return drawn.call(query=query, sinks=sinks)[0]

    check_grads(call, (drawn.query, drawn.sinks), 1, rtol=2e-2, atol=2e-2)


# --- vmap, sharding, jit --------------------------------------------------------------

_NAMES = ("query", "key", "value", "lengths", "page_table")


@given(
    is_batched=st.lists(st.booleans(), min_size=5, max_size=5).filter(any),
    page=st.sampled_from([0, 4]),
    implementation=st.sampled_from(["auto", "cudnn"]),
)
def test_vmap_over_any_operands(
    is_batched: list[bool], page: int, implementation: str
) -> None:
    drawn = [draw(in_pages(replace(_RAGGED, lengths=each), page), i) for i, each in (
        (0, (0, 1, 23, 9, 17)), (1, (5, 23, 2, 20, 0)),
    )]  # fmt: skip
    names = [n for n in _NAMES if page or n != "page_table"]
    chosen = dict(zip(names, is_batched, strict=False))
    if not any(chosen.values()):
        return
    # Junk in tables and NaN belong to lengths: with those of another example, zeros.
    arrays = {n: [jnp.nan_to_num(getattr(x, n)) for x in drawn] for n in names}
    if page:
        arrays["page_table"] = [jnp.clip(x, 0, 32) for x in arrays["page_table"]]

    @jax.jit
    def one(given: dict[str, jax.Array]) -> Any:
        return drawn[0].call(**given, implementation=implementation)

    stacked = {n: jnp.stack(x) if chosen[n] else x[0] for n, x in arrays.items()}
    axes = {n: 0 if chosen[n] else None for n in names}
    found = jax.jit(jax.vmap(one, in_axes=(axes,)))(stacked)
    for i in range(2):
        want = one({n: x[i if chosen[n] else 0] for n, x in arrays.items()})
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(x[i], y, **_CLOSE)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("page", [0, 4])
def test_sequences_and_heads_may_be_sharded(page: int, kind: AxisType) -> None:
    problem = Problem(lengths=(0, 23, 9, 17), s=2, k=4, page=page)
    drawn = draw(problem)
    specs: dict[str, tuple[str | None, ...]] = {
        "query": ("x", None, "y"),
        "key": (None if page else "x", None, "y"),
        "value": (None if page else "x", None, "y"),
        "lengths": ("x",),
    }
    if page:
        specs["page_table"] = ("x",)
    mesh = mesh_of(kind, x=2, y=2)
    arrays = placed(mesh, [getattr(drawn, n) for n in specs], [*specs.values()])

    @jax.jit
    def run(*arrays: Any) -> Any:
        return drawn.call(**dict(zip(specs, arrays, strict=True)))

    found = run(*arrays)
    for x, y in zip(found, drawn.truth, strict=True):
        np.testing.assert_allclose(x, y, **_CLOSE)
    assert found[0].sharding.shard_shape(found[0].shape) == (2, 2, 4, 16)


def test_symbolic_sizes_run_xla() -> None:
    for page in (0, 4):
        drawn = draw(in_pages(_RAGGED, page))
        b, t = jax.export.symbolic_shape("b, t")
        names = [n for n in _NAMES if page or n != "page_table"]
        arrays = [getattr(drawn, n) for n in names]
        shapes = [(b, *x.shape[1:]) for x in arrays]
        if page:
            shapes[1:3] = [(t, *x.shape[1:]) for x in arrays[1:3]]
        specs = [
            jax.ShapeDtypeStruct(shape, x.dtype)
            for shape, x in zip(shapes, arrays, strict=True)
        ]

        def run(*arrays: Any, drawn: Drawn = drawn, names: Any = names) -> Any:
            given = dict(zip(names, arrays, strict=True))
            return drawn.call(**given, query_seq_lengths=None)

        exported = jax.export.export(jax.jit(run))(*specs)
        for x, y in zip(exported.call(*arrays), run(*arrays), strict=True):
            np.testing.assert_allclose(x, y, **_CLOSE)
        with pytest.raises(UnsupportedError, match="query has symbolic dimensions"):
            jax.export.export(
                jax.jit(
                    lambda *x, names=names, drawn=drawn: drawn.call(
                        **dict(zip(names, x, strict=True)),
                        query_seq_lengths=None,
                        implementation="cudnn",
                    )
                )
            )(*specs)


# --- what is compiled for a GPU -------------------------------------------------------


@pytest.mark.parametrize("s", [1, 4])
@pytest.mark.parametrize("page", [0, 4])
def test_a_call_is_one_kernel(page: int, s: int) -> None:
    problem = Problem(
        lengths=(0, 1, 20, 9, 17), s=s, t=20, k=2, page=page, dtype="bfloat16"
    )
    drawn = draw(problem)
    (call,) = jax_cudnn.plans.inspect(lambda q: drawn.call(query=q), drawn.query).calls
    assert call.op == "sdpa_cached"
    assert ("page_table" in call.part.inputs) == bool(page)
