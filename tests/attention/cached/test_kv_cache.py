# SPDX-License-Identifier: Apache-2.0
"""Tests that new tokens reach their places in a cache, without a copy of it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_cudnn
from jax_cudnn import kv_cache
from tests.common import drawn

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# Lengths to which int32 cannot add much.
_FAR = st.sampled_from([2**30, 2**31 - 1, -(2**31)])


def _counts(data: st.DataObject, b: int, s: int, room: int) -> tuple[int, ...] | None:
    """Draw how many of s new tokens are written; not all, where there is no room."""
    counts = st.tuples(*[st.integers(-1, s + 1)] * b)
    return data.draw(counts if s > room else st.none() | counts)


_update = jax.jit(kv_cache.update, static_argnames="layout")
_update_pages = jax.jit(kv_cache.update_pages, static_argnames="layout")


@given(data=st.data())
def test_tokens_reach_their_places_and_no_others(data: st.DataObject) -> None:
    b, s, t = (data.draw(st.integers(0, 4)) for _ in "bst")
    lengths = data.draw(st.tuples(*[st.integers(-2, t + 2) | _FAR] * b))
    counts = _counts(data, b, s, t)
    cache = np.arange(b * t * 3, dtype=np.float32).reshape(b, t, 3)
    new = -1 - np.arange(b * s * 3, dtype=np.float32).reshape(b, s, 3)
    want = cache.copy()
    for i in range(b):
        for j in range(s if counts is None else min(max(counts[i], 0), s)):
            place = max(lengths[i], 0) + j
            if place < t:
                want[i, place] = new[i, j]
    n = None if counts is None else np.array(counts, np.int32)
    lengths = np.array(lengths, np.int32)
    got = _update(cache, new, lengths, n)
    np.testing.assert_array_equal(got, want)
    for layout, axes in (("bhsd", (0, 2, 1)), ("sbhd", (1, 0, 2))):
        moved = [np.transpose(x, axes) for x in (cache, new)]
        got = _update(*moved, lengths, n, layout=layout)
        np.testing.assert_array_equal(got, np.transpose(want, axes))


@given(data=st.data())
def test_tokens_reach_their_pages_and_no_others(data: st.DataObject) -> None:
    b, s, m = (data.draw(st.integers(0, 4)) for _ in "bsm")
    size = data.draw(st.integers(1, 4))
    pages = data.draw(st.integers(0, 3)) + b * m
    numbers = data.draw(st.permutations(range(pages)))[: b * m]
    table = np.array(numbers, np.int32).reshape(b, m)
    for place in np.ndindex(b, m):
        if data.draw(st.booleans()):
            table[place] = data.draw(st.sampled_from([-1, pages, 2**31 - 1, -(2**31)]))
    room = m * size
    lengths = data.draw(st.tuples(*[st.integers(-2, room + 2) | _FAR] * b))
    counts = _counts(data, b, s, room)
    old = np.arange(pages * size * 2, dtype=np.float32).reshape(pages, size, 2)
    new = -1 - np.arange(b * s * 2, dtype=np.float32).reshape(b, s, 2)
    want = old.copy()
    for i in range(b):
        for j in range(s if counts is None else min(max(counts[i], 0), s)):
            place = max(lengths[i], 0) + j
            if place < room and 0 <= table[i, place // size] < pages:
                want[table[i, place // size], place % size] = new[i, j]
    n = None if counts is None else np.array(counts, np.int32)
    lengths = np.array(lengths, np.int32)
    got = _update_pages(old, new, table, lengths, n)
    np.testing.assert_array_equal(got, want)
    old, new, want = (np.swapaxes(x, 1, 2) for x in (old, new, want))
    got = _update_pages(old, new, table, lengths, n, layout="bhsd")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_lengths_may_be_one_number_of_any_integer_dtype(dtype: Any) -> None:
    cache, new = jnp.zeros((2, 300, 1)), jnp.ones((2, 2, 1))
    got = kv_cache.update(cache, new, jnp.asarray(100, dtype), 1)
    assert np.flatnonzero(got).tolist() == [100, 400]


def test_any_dtype_and_further_axes() -> None:
    cache = jnp.zeros((2, 3, 4, 5), jnp.float8_e4m3fn)
    new = jnp.ones((2, 1, 4, 5), jnp.float8_e4m3fn)
    got = kv_cache.update(cache, new, jnp.array([0, 2]))
    assert got.dtype == cache.dtype
    assert got.astype(jnp.float32).sum(axis=(2, 3)).tolist() == [[20, 0, 0], [0, 0, 20]]


def test_updates_are_batched_and_differentiated() -> None:
    cache, new = jnp.zeros((3, 2, 4, 1)), jnp.ones((3, 2, 1, 1))
    lengths = jnp.array([[0, 1], [2, 3], [3, 9]])
    got = jax.vmap(kv_cache.update)(cache, new, lengths)
    want = [kv_cache.update(*each) for each in zip(cache, new, lengths, strict=True)]
    np.testing.assert_array_equal(got, jnp.stack(want))

    def loss(cache: Any, new: Any) -> jax.Array:
        return jnp.sum(kv_cache.update(cache, new, lengths[2]) ** 2)

    of_cache, of_new = jax.grad(loss, (0, 1))(cache[0] + 3, new[0])
    assert of_new[..., 0].tolist() == [[2.0], [0.0]]
    assert of_cache[..., 0].tolist() == [[6, 6, 6, 0], [6, 6, 6, 6]]


@pytest.mark.parametrize("is_paged", [False, True])
def test_symbolic_sizes(is_paged: bool) -> None:
    b, t = jax.export.symbolic_shape("b, t")
    new, lengths = jnp.ones((2, 3, 2, 8)), jnp.array([1, 4])
    operands = [jnp.zeros((7, 4, 2, 8) if is_paged else (2, 5, 2, 8)), new, lengths]
    shapes = [(t, 4, 2, 8) if is_paged else (b, t, 2, 8), (b, 3, 2, 8), (b,)]
    update = kv_cache.update_pages if is_paged else kv_cache.update
    if is_paged:
        operands.insert(2, jnp.array([[3, 1], [0, -1]]))
        shapes.insert(2, (b, 2))
    specs = [
        jax.ShapeDtypeStruct(shape, x.dtype)
        for shape, x in zip(shapes, operands, strict=True)
    ]
    exported = jax.export.export(jax.jit(update))(*specs)
    np.testing.assert_array_equal(exported.call(*operands), update(*operands))


# --- nothing is copied ----------------------------------------------------------------

_CACHE = jax.ShapeDtypeStruct((4, 512, 2, 64), jnp.float32)
_BYTES = 4 * 512 * 2 * 64 * 4


def _step(key: Any, value: Any, new: Any, lengths: Any, query: Any) -> Any:
    key, value = (kv_cache.update(x, new, lengths) for x in (key, value))
    return key, value, jax_cudnn.cached_sdpa(query, key, value, lengths + 1)


def _paged_step(
    key: Any, value: Any, new: Any, table: Any, lengths: Any, query: Any
) -> Any:
    key, value = (kv_cache.update_pages(x, new, table, lengths) for x in (key, value))
    return key, value, jax_cudnn.paged_sdpa(query, key, value, table, lengths + 1)


def _without_attention(step: Any) -> Any:
    return lambda *given: step(*given)[:2]


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_donated_cache_is_written_in_place(is_paged: bool) -> None:
    new = jax.ShapeDtypeStruct((4, 1, 2, 64), jnp.float32)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    operands = [
        _CACHE,
        _CACHE,
        new,
        lengths,
        jax.ShapeDtypeStruct((4, 1, 4, 64), jnp.float32),
    ]
    step = _without_attention(_paged_step if is_paged else _step)
    if is_paged:
        operands.insert(3, jax.ShapeDtypeStruct((4, 128), jnp.int32))
        operands[0] = operands[1] = jax.ShapeDtypeStruct((128, 16, 2, 64), jnp.float32)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*operands).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * _BYTES
    text = compiled.as_text()
    assert (
        "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }"
        in text
    )
    shape = ",".join(map(str, operands[0].shape))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
    assert memory.temp_size_in_bytes < _BYTES / 8


def test_in_a_loop_the_cache_is_carried_in_place() -> None:
    def loop(cache: Any, new: Any) -> Any:
        def body(i: Any, cache: Any) -> Any:
            return kv_cache.update(cache, new, i)

        return jax.lax.fori_loop(0, 9, body, cache)

    new = jax.ShapeDtypeStruct((4, 1, 2, 64), jnp.float32)
    compiled = jax.jit(loop, donate_argnums=0).lower(_CACHE, new).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == _BYTES
    assert compiled.memory_analysis().temp_size_in_bytes < _BYTES / 8


def test_decoding_token_by_token_is_attention_at_once() -> None:
    b, s, h, k, d = 2, 6, 4, 2, 8
    q = drawn.normal(0, (b, s, h, d))
    kv = drawn.normal(1, (2, b, s, k, d))
    want = jax_cudnn.sdpa(q, kv[0], kv[1], is_causal=True)
    caches = [jnp.full((b, 8, k, d), jnp.nan)] * 2
    pages = [jnp.full((9, 2, k, d), jnp.nan)] * 2
    table = jnp.array([[5, 0, 7, -1], [8, 2, 1, -1]])
    start = 0
    for count in (2, 1, 3):  # a prompt, a token, and tokens that were drafted
        tokens = slice(start, start + count)
        lengths = jnp.full((b,), start)
        caches = [
            kv_cache.update(c, x[:, tokens], lengths)
            for c, x in zip(caches, kv, strict=True)
        ]
        pages = [
            kv_cache.update_pages(c, x[:, tokens], table, lengths)
            for c, x in zip(pages, kv, strict=True)
        ]
        got = jax_cudnn.cached_sdpa(q[:, tokens], *caches, lengths + count)
        np.testing.assert_allclose(got, want[:, tokens], rtol=1e-5, atol=1e-6)
        got = jax_cudnn.paged_sdpa(q[:, tokens], *pages, table, lengths + count)
        np.testing.assert_allclose(got, want[:, tokens], rtol=1e-5, atol=1e-6)
        start += count


# --- messages -------------------------------------------------------------------------

_C, _N, _P = jnp.ones((2, 5, 3)), jnp.ones((2, 1, 3)), jnp.ones((7, 4, 3))
_L, _T = jnp.array([1, 2]), jnp.array([[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: kv_cache.update(_C, _N[:1], _L),
            ValueError,
            "kv_cache.update: cache is f32[2,5,3] and new f32[1,1,3]. They must be "
            "(sequences, tokens, ...), and differ in the tokens only.",
        ),
        (
            lambda: kv_cache.update(_C[:, 0, 0], _N[:, 0, 0], _L),
            ValueError,
            "kv_cache.update: cache is f32[2] and new f32[2].",
        ),
        (
            lambda: kv_cache.update(_C, _N[..., None], _L),
            ValueError,
            "kv_cache.update: cache is f32[2,5,3] and new f32[2,1,3,1].",
        ),
        (
            lambda: kv_cache.update(_C, _N.astype(jnp.int32), _L),
            TypeError,
            "kv_cache.update: new is i32[2,1,3] but cache f32[2,5,3]. Both must have "
            "one dtype. Convert new to float32.",
        ),
        (
            lambda: kv_cache.update(_C, jnp.ones((2, 6, 3)), _L),
            ValueError,
            "kv_cache.update: new has 6 tokens and cache room for 5: cache is "
            "f32[2,5,3] and new f32[2,6,3]. Make room for all of them, or pass "
            "new_lengths, the tokens of each sequence that are written, if the others "
            "are padding.",
        ),
        (
            jax.jit(lambda: kv_cache.update(_C, jnp.ones((2, 6, 3)), _L)),
            ValueError,
            "kv_cache.update: new has 6 tokens and cache room for 5: ",
        ),
        (
            lambda: kv_cache.update(
                jnp.ones((2, 3, 5)), jnp.ones((2, 3, 6)), _L, layout="bhsd"
            ),
            ValueError,
            "kv_cache.update: new has 6 tokens and cache room for 5: cache is "
            "f32[2,3,5] and new f32[2,3,6]. Make room",
        ),
        (
            lambda: kv_cache.update_pages(_P, jnp.ones((2, 9, 3)), _T, _L),
            ValueError,
            "kv_cache.update_pages: new has 9 tokens of a sequence, and its 2 pages of "
            "4 tokens room for 8: pages is f32[7,4,3], new f32[2,9,3] and page_table "
            "i32[2,2]. Make room for all of them, or pass new_lengths, the tokens of "
            "each sequence that are written, if the others are padding.",
        ),
        (
            lambda: kv_cache.update(_C, _N, _L[:1]),
            ValueError,
            "kv_cache.update: lengths is i32[1]. It must be one number, or one per "
            "sequence, shape [2].",
        ),
        (
            lambda: kv_cache.update(_C, _N, _L, _L.astype(jnp.float32)),
            TypeError,
            "kv_cache.update: new_lengths is f32[2]. It must hold integers. Convert it "
            "to int32.",
        ),
        (
            lambda: kv_cache.update_pages(_P, _N[..., :2], _T, _L),
            ValueError,
            "kv_cache.update_pages: pages is f32[7,4,3] and new f32[2,1,2]. They must "
            "be (pages, tokens of a page, ...) and (sequences, tokens, ...), with the "
            "same axes beside these.",
        ),
        (
            lambda: kv_cache.update_pages(_P, _N, _T[:1], _L),
            ValueError,
            "kv_cache.update_pages: page_table is i32[1,2] but new f32[2,1,3]. It must "
            "have the pages of each sequence, shape [2, most pages of a sequence].",
        ),
        (
            lambda: kv_cache.update_pages(_P[..., None], _P[:5], _T, _L, layout="bhsd"),
            ValueError,
            "kv_cache.update_pages: pages is f32[7,4,3,1] and new f32[5,4,3]. They "
            "must be (pages, heads, tokens of a page, ...) and (sequences, heads, ",
        ),
        (
            lambda: kv_cache.update_pages(_P, _P[:5], _T, _L, layout="bhsd"),
            ValueError,
            "kv_cache.update_pages: page_table is i32[2,2] but new f32[5,4,3]. It must "
            "have the pages of each sequence, shape [5, most pages of a sequence].",
        ),
        (
            lambda: kv_cache.update_pages(_P, _N, _T.astype(jnp.float32), _L),
            TypeError,
            "kv_cache.update_pages: page_table is f32[2,2]. It must hold integers.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
