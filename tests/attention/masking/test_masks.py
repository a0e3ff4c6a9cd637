# SPDX-License-Identifier: Apache-2.0
"""Tests that every mask hides what its predicate says, alone, combined and batched.

The truth is the sentence as a Python condition on one query and one key.
"""

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType

from jax_cudnn import masks, sdpa
from tests.attention.shared.oracle import numpy_gradients, numpy_sdpa
from tests.common import drawn
from tests.common.devices import gradient, mesh_of, placed

pytestmark = pytest.mark.sampled

B, H = 3, 2


def _draw_mask(rng: np.random.Generator, kind: str, s: int, t: int) -> tuple[Any, Any]:
    """Return a mask and whether query i of a head sees key j, as Python has it."""
    alignment = rng.choice(["top-left", "bottom-right"])
    offset = t - s if alignment == "bottom-right" else 0
    if kind == "causal":
        return masks.Causal(str(alignment)), lambda b, h, i, j: j <= i + offset
    if kind == "window":
        left, right = (
            None if rng.integers(4) == 0 else int(rng.integers(-2, 5)) for _ in "lr"
        )
        if left is not None and right is not None:
            right = max(right, -left)
        return (
            masks.Window(left, right, str(alignment)),
            lambda b, h, i, j: (
                (left is None or j >= i + offset - left)
                and (right is None or j <= i + offset + right)
            ),
        )
    if kind == "lengths":
        q, k = rng.integers(0, s + 2, B), rng.integers(0, t + 2, B)
        which = rng.integers(3)
        mask = masks.Lengths(
            q.astype(np.int32) if which != 1 else None, k if which != 2 else None
        )
        return (
            mask,
            lambda b, h, i, j: (which == 1 or i < q[b]) and (which == 2 or j < k[b]),
        )
    if kind == "segments":
        q, k = rng.integers(0, 3, (B, s)), rng.integers(0, 3, (B, t))
        if rng.integers(2):
            return masks.Segments(q[0], k[0]), lambda b, h, i, j: q[0][i] == k[0][j]
        return masks.Segments(q, k), lambda b, h, i, j: q[b][i] == k[b][j]
    if kind == "prefix":
        n = rng.integers(0, t + 1, B)
        if rng.integers(2):
            return masks.Prefix(int(n[0])), lambda b, h, i, j: j < n[0] or j <= i
        return masks.Prefix(n), lambda b, h, i, j: j < n[b] or j <= i
    if kind == "blocks":
        rows, columns = (int(x) for x in rng.integers(1, 4, 2))
        table = rng.integers(0, 2, (H, -(-s // rows), -(-t // columns))) > 0
        mask = masks.Blocks(table, (rows, columns))
        return mask, lambda b, h, i, j: table[h, i // rows, j // columns]
    seen = rng.integers(0, 4, (B, 1, s, t)) > 0
    return masks.Where(seen), lambda b, h, i, j: seen[b, 0, i, j]


_KINDS = ("causal", "window", "lengths", "segments", "prefix", "blocks", "where")


def _seen(conditions: list[Any], s: int, t: int) -> np.ndarray:
    found = np.zeros((B, H, s, t), bool)
    for place in itertools.product(range(B), range(H), range(s), range(t)):
        found[place] = all(condition(*place) for condition in conditions)
    return found


def _check_with_gradients(
    rng: np.random.Generator,
    mask: masks.Mask,
    seen: np.ndarray,
    lost: np.ndarray | None = None,
) -> None:
    """Compare results and gradients with NumPy's, given what the mask lets see.

    Queries that are `lost`, (b, s), have NaN. It reaches their gradients, and those of
    the values, if they see a key.
    """
    s, t = seen.shape[2:]
    lost = np.zeros((B, s), bool) if lost is None else lost
    q, k, v, pull = (
        rng.standard_normal((B, size, H, 4)).astype(np.float32) for size in (s, t, t, s)
    )
    pull_lse = rng.standard_normal((B, s, H)).astype(np.float32)

    @jax.jit
    def run(*operands: jax.Array) -> Any:
        call = functools.partial(sdpa, mask=mask, return_residual=True)
        results, transpose = jax.vjp(call, *operands)
        return results, transpose((pull, pull_lse))

    found, gradients = jax.device_get(run(q, k, v))
    for x, y in zip(found, numpy_sdpa(q, k, v, mask=seen), strict=True):
        y[lost] = np.nan
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    operands = {"query": q, "key": k, "value": v}
    want = numpy_gradients(
        {name: np.swapaxes(x, 1, 2) for name, x in operands.items()} | {"mask": seen},
        np.swapaxes(pull, 1, 2),
        np.swapaxes(pull_lse, 1, 2)[..., None],
        scale=0.5,
    )
    for name, x in zip(operands, gradients, strict=True):
        y = np.swapaxes(want[name], 1, 2)
        is_loud = lost & seen.any((1, 3))
        is_lost, is_loud = (
            each if name == "query" else each.any(1) for each in (lost, is_loud)
        )
        if name != "key":
            assert np.isnan(x[is_loud]).all(), name
        np.testing.assert_allclose(
            x[~is_lost], y[~is_lost], rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.once
@given(
    kinds=st.lists(st.sampled_from(_KINDS), min_size=1, max_size=4),
    number=st.integers(0, 2**32),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
)
def test_masks_hide_what_they_say_alone_and_combined(
    kinds: list[str], number: int, sizes: tuple[int, int]
) -> None:
    rng = np.random.default_rng(number)
    s, t = sizes
    drawn = [_draw_mask(rng, kind, s, t) for kind in kinds]
    mask = functools.reduce(operator.and_, (each for each, _ in drawn))
    seen = _seen([condition for _, condition in drawn], s, t)
    _check_unless_empty(rng, mask, seen)


def _check_unless_empty(
    rng: np.random.Generator,
    mask: masks.Mask,
    seen: np.ndarray,
    lost: np.ndarray | None = None,
) -> None:
    """Compare with NumPy, unless bands that no query sees a key in are refused."""
    try:
        mask.arguments(*seen.shape[2:])
    except ValueError:
        assert not seen.any()
        with pytest.raises(ValueError, match="show no key to any of"):
            mask.arguments(*seen.shape[2:])
        return
    _check_with_gradients(rng, mask, seen, lost)


@pytest.mark.once
@given(
    number=st.integers(0, 2**32),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 7)),
    given_lengths=st.tuples(st.booleans(), st.booleans()),
    bounds=st.lists(
        st.tuples(*[st.none() | st.integers(-3, 8)] * 2), min_size=0, max_size=2
    ),
)
def test_positions_at_the_end_of_a_cache(
    number: int,
    sizes: tuple[int, int],
    given_lengths: tuple[bool, bool],
    bounds: list[tuple[int | None, int | None]],
) -> None:
    rng = np.random.default_rng(number)
    s, t = sizes
    queries, keys = (
        rng.integers(-1, most, B).astype(np.int32) if is_given else None
        for most, is_given in zip((s + 2, 2 * t + 1), given_lengths, strict=True)
    )
    if keys is not None and rng.integers(2):
        keys[0] = rng.choice([2**30, 2**31 - 1])
    lengths = [masks.Lengths(queries, keys)]
    if keys is not None and rng.integers(2):  # The shortest of several is the length.
        lengths.append(masks.Lengths(key=np.maximum(keys, rng.integers(0, t, B))))
    mask = functools.reduce(operator.and_, lengths, masks.Causal("cache"))
    for left, right in bounds:
        if left is not None and right is not None:
            assume(left + right >= 0)
        mask = mask & masks.Window(left, right, "cache")

    def span(b: int, i: int) -> tuple[int, int]:
        """Return the first and the last token that a query sees, in a cache or not."""
        key_length = t if keys is None else max(int(keys[b]), 0)
        count = s if queries is None else int(np.clip(queries[b], 0, s))
        own = key_length - count + i
        first, last = 0, min(key_length - 1, own) if i < count else -1
        for left, right in bounds:
            first = first if left is None else max(first, own - left)
            last = last if right is None else min(last, own + right)
        return first, last

    def sees(b: int, h: int, i: int, j: int) -> bool:
        first, last = span(b, i)
        return first <= j <= last

    spans = [[span(b, i) for i in range(s)] for b in range(B)]
    lost = np.array([[first <= last >= t for first, last in each] for each in spans])
    _check_unless_empty(rng, mask, _seen([sees], s, t), lost)


def test_a_mask_at_the_end_of_a_cache_is_an_array_only_where_it_hides_something() -> (
    None
):
    lengths = masks.Lengths(key=np.array([3, 7], np.int32))
    cache = masks.Causal("cache")
    assert [*(cache & lengths).arguments(1, 9)] == ["key_value_seq_lengths"]
    found = (cache & lengths).arguments(4, 9)
    assert [*found] == ["key_value_seq_lengths", "mask"]
    assert found["mask"].shape == (2, 1, 4, 9)
    far = masks.Window(8, None, "cache")
    assert [*(far & lengths).arguments(1, 9)] == ["key_value_seq_lengths"]
    near = masks.Window(7, None, "cache")
    assert [*(near & lengths).arguments(1, 9)] == ["key_value_seq_lengths", "mask"]
    # Key 0 is behind the window of the fourth token in a cache of 3, which is not lost.
    behind = masks.Window(2, -1, "cache") & masks.Lengths(key=np.array([4], np.int32))
    assert "mask" in behind.arguments(1, 3)
    # Without lengths the cache is full.
    assert cache.arguments(4, 9) == masks.Causal("bottom-right").arguments(4, 9)


def _operands(s: int = 6, t: int = 8) -> list[jax.Array]:
    return [drawn.normal(i, (B, size, H, 4)) for i, size in enumerate((s, t, t))]


def test_a_mask_adds_to_the_other_arguments() -> None:
    q, k, v = _operands()
    bias = drawn.normal(9, (1, H, 6, 8))
    segments = np.array([[0, 0, 0, 1, 1, 1, 2, 2]] * B)
    lengths, fewer = np.array([8, 5, 3]), np.array([6, 7, 2], np.int8)
    got = sdpa(
        q,
        k,
        v,
        bias,
        mask=masks.Segments(segments[:, :6], segments)
        & masks.Lengths(key=fewer)
        & masks.Additive(bias.astype(jnp.bfloat16)),
        is_causal=True,
        local_window_size=(3, 9),
        key_value_seq_lengths=lengths,
    )
    want = sdpa(
        q,
        k,
        v,
        bias + bias.astype(jnp.bfloat16).astype(jnp.float32),
        mask=segments[:, None, :6, None] == segments[:, None, None, :],
        is_causal=True,
        local_window_size=(3, 0),
        key_value_seq_lengths=np.minimum(lengths, fewer),
    )
    np.testing.assert_array_equal(got, want)


def test_they_say_which_arguments_they_stand_for() -> None:
    assert masks.Causal().arguments(5, 5) == {"is_causal": True}
    assert masks.Causal("bottom-right").arguments(5, 5) == {"is_causal": True}
    assert masks.Causal("bottom-right").arguments(3, 5) == {"local_window_size": (3, 2)}
    both = masks.Causal() & masks.Window(3, 7)
    assert both.arguments(5, 5) == {"is_causal": True, "local_window_size": (3, 0)}
    assert masks.Window(None, None).arguments(5, 5) == {}
    lengths = np.array([1, 2])
    found = (masks.Lengths(key=lengths) & masks.Causal()).arguments(5, 5)
    assert [*found] == ["is_causal", "key_value_seq_lengths"]
    assert [*masks.Segments(np.zeros((2, 5), np.int32)).arguments(5, 5)] == ["mask"]


def test_they_print_as_they_are_written() -> None:
    mask = (
        masks.Causal()
        & masks.Window(127, 0, "bottom-right")
        & masks.Lengths(key=np.zeros(3, np.int32))
        & masks.Blocks(jnp.ones((4, 4), bool), size=(64, 32))
    )
    assert repr(mask) == (
        "Causal() & Window(left=127, right=0, alignment='bottom-right') & "
        "Lengths(key=i32[3]) & Blocks(table=bool[4,4], size=(64, 32))"
    )
    assert masks.Causal() == masks.Causal()
    assert hash(masks.Window(3, 0)) == hash(masks.Window(3, 0))
    assert masks.Window(3, 0) != masks.Window(3, 0, "bottom-right")


def test_they_are_arguments_of_transformed_functions() -> None:
    q, k, v = _operands()
    lengths = np.array([8, 5, 0], np.int32)
    mask = masks.Lengths(key=lengths) & masks.Causal("bottom-right")
    want = sdpa(q, k, v, mask=mask)
    call = functools.partial(jax.jit(lambda q, k, v, mask: sdpa(q, k, v, mask=mask)))
    np.testing.assert_array_equal(call(q, k, v, mask), want)

    one = jax.vmap(lambda q, k, v, mask: sdpa(q[None], k[None], v[None], mask=mask)[0])
    batched = masks.Lengths(key=lengths[:, None]) & masks.Causal("bottom-right")
    np.testing.assert_allclose(one(q, k, v, batched), want, rtol=1e-5, atol=1e-6)

    def loss(bias: Any) -> jax.Array:
        return jnp.sum(jnp.sin(sdpa(q, k, v, mask=mask & masks.Additive(bias))))

    bias = drawn.normal(5, (H, 6, 8))
    found = jax.grad(loss)(bias)
    plain = jax.grad(
        lambda bias: jnp.sum(jnp.sin(sdpa(q, k, v, bias, **mask.arguments(6, 8))))
    )(bias)
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_their_arrays_may_be_sharded(kind: AxisType) -> None:
    q, k, v = (drawn.normal(i, (4, 8, H, 4)) for i in range(3))
    ids = jnp.asarray(
        np.asarray(np.random.default_rng(0).integers(0, 2, (4, 8)), jnp.int32)
    )

    def run(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
        return sdpa(q, k, v, mask=masks.Segments(ids) & masks.Causal())

    sharded = placed(mesh_of(kind, x=4), [q, k, v, ids], [("x",)] * 4)
    np.testing.assert_allclose(
        jax.jit(run)(*sharded), run(q, k, v, ids), rtol=1e-5, atol=1e-6
    )
    got = jax.jit(lambda *x: gradient(lambda q, k, v: run(q, k, v, x[3]))(*x[:3]))
    want = gradient(lambda q, k, v: run(q, k, v, ids))(q, k, v)
    for x, y in zip(got(*sharded), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64])
@pytest.mark.parametrize("length", [-3, 5, 100])
def test_lengths_of_few_bits_count_beyond_what_they_hold(
    dtype: Any, length: int
) -> None:
    """300 tokens are more than 8 bits hold."""
    q = drawn.normal(0, (1, 300, 1, 4))
    length = max(length, 0) if np.iinfo(dtype).min == 0 else length
    narrow, wide = (np.array([length], x) for x in (dtype, np.int32))
    for make in (
        masks.Prefix,
        lambda x: masks.Lengths(key=x),
        lambda x: masks.Causal("cache") & masks.Lengths(key=x),
    ):
        found, expected = (sdpa(q, q, q, mask=make(x)) for x in (narrow, wide))
        np.testing.assert_array_equal(found, expected)
