# SPDX-License-Identifier: Apache-2.0
"""Tests masks, score_mods, dropout and sinks over several devices.

The truth is dense attention of the whole arrays in float64
(tests/attention/shared/dense.py), with masks as Python conditions on one query and one
key, and dropout's numbers as NumPy has them.
"""

import functools
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_cudnn import UnsupportedError, masks, parallel, score_mods, sdpa
from jax_cudnn.ops.attention.dropout import drawn
from jax_cudnn.parallel.order import natural, ordered
from jax_cudnn.reference.attention.dropout import kept, kept_at
from tests.attention.shared.dense import dense_attention, seen_by, with_gradients
from tests.attention.shared.dropout import numpy_kept
from tests.attention.shared.small import count_kinds
from tests.common.devices import mesh_of

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("x64"), pytest.mark.sampled]

B, H, K, S, T, D, E = 2, 4, 2, 24, 40, 3, 5
N = 4
_RNG = np.random.default_rng(0)
METHODS = ("ring", "all_gather", "all_to_all")


def _draw(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.standard_normal(shape))


def _operands(s: int = S, t: int = T) -> dict[str, jax.Array]:
    return {"query": _draw(B, s, H, D), "key": _draw(B, t, K, D)} | {
        "value": _draw(B, t, K, E)
    }


# --- masks ----------------------------------------------------------------------------

_SEGMENTS = np.sort(_RNG.integers(0, 5, (B, T)), axis=1)
_LOOSE = _RNG.integers(0, 3, (T,))
_TABLE = _RNG.integers(0, 2, (B, H, 8, 6)) > 0
_ARRAY = _RNG.integers(0, 3, (B, 1, S, T)) > 0
_BIAS = np.where(
    _RNG.integers(0, 4, (1, H, S, T)) > 0, _RNG.standard_normal((1, H, S, T)), -np.inf
)
_LENGTHS = (np.array([S, 13]), np.array([11, 33]))
_OFFSETS = np.array([[0, 9, 9, 17, 24], [0, 3, 15, 16, 23]])
_KEY_OFFSETS = np.array([[0, 4, 20, 31, 40], [0, 7, 7, 25, 39]])
_PACKED = np.array([[0, 7, 7, 31, 40], [0, 4, 20, 21, 38]])


def _sequence(offsets: np.ndarray, i: int) -> int:
    """Return which sequence a token is in; -1 for none."""
    found = [j for j in range(4) if offsets[j] <= i < offsets[j + 1]]
    return found[0] if found else -1


def _packed(
    q: np.ndarray, k: np.ndarray, left: int, right: int, *, at_end: bool = False
) -> Any:
    """Return the condition of packed sequences with a band within each."""

    def condition(b: int, h: int, i: int, j: int) -> bool:
        row, column = _sequence(q[b], i), _sequence(k[b], j)
        if row != column or row < 0:
            return False
        place, other = i - q[b][row], j - k[b][row]
        if at_end:
            place += np.diff(k[b])[row] - np.diff(q[b])[row]
        return -left <= other - place <= right

    return condition


_FAR = 99
MASKS: dict[str, tuple[masks.Mask, Any, tuple[int, int]]] = {
    "causal": (masks.Causal(), lambda b, h, i, j: j <= i, (S, T)),
    "bottom-right": (
        masks.Causal("bottom-right"),
        lambda b, h, i, j: j <= i + T - S,
        (S, T),
    ),
    "window-bottom-right": (
        masks.Window(7, 3, "bottom-right"),
        lambda b, h, i, j: -7 <= j - i - T + S <= 3,
        (S, T),
    ),
    "cache": (
        masks.Causal("cache")
        & masks.Lengths(*_LENGTHS)
        & masks.Window(9, None, "cache"),
        lambda b, h, i, j: (
            i < _LENGTHS[0][b]
            and j < _LENGTHS[1][b]
            and 0 <= i + _LENGTHS[1][b] - _LENGTHS[0][b] - j <= 9
        ),
        (S, T),
    ),
    "documents": (
        masks.Segments(_SEGMENTS) & masks.Causal(),
        lambda b, h, i, j: _SEGMENTS[b, i] == _SEGMENTS[b, j] and j <= i,
        (T, T),
    ),
    "segments": (
        masks.Segments(_SEGMENTS[0, :S], _LOOSE),
        lambda b, h, i, j: _SEGMENTS[0, i] == _LOOSE[j],
        (S, T),
    ),
    "prefix": (
        masks.Prefix(np.array([5, 30])) & masks.Window(None, 20),
        lambda b, h, i, j: (j < (5, 30)[b] or j <= i) and j <= i + 20,
        (S, T),
    ),
    "blocks": (
        masks.Blocks(_TABLE, (3, 7)) & masks.Causal("bottom-right"),
        lambda b, h, i, j: _TABLE[b, h, i // 3, j // 7] and j <= i + T - S,
        (S, T),
    ),
    "arrays": (
        masks.Where(_ARRAY) & masks.Additive(_BIAS) & masks.Prefix(3),
        lambda b, h, i, j: _ARRAY[b, 0, i, j] and (j < 3 or j <= i),
        (S, T),
    ),
    "packed": (
        masks.Packed(_OFFSETS, _KEY_OFFSETS),
        _packed(_OFFSETS, _KEY_OFFSETS, _FAR, _FAR),
        (S, T),
    ),
    "packed-causal": (
        masks.Packed(_PACKED) & masks.Causal(),
        _packed(_PACKED, _PACKED, _FAR, 0),
        (T, T),
    ),
    "packed-window": (
        masks.Packed(_PACKED, max_length=11) & masks.Window(4, 2),
        lambda b, h, i, j: (
            _packed(_PACKED, _PACKED, 4, 2)(b, h, i, j)
            and max(i, j) - _PACKED[b][_sequence(_PACKED[b], i)] < 11
        ),
        (T, T),
    ),
    "packed-ends": (
        masks.Packed(_OFFSETS, _KEY_OFFSETS) & masks.Causal("bottom-right"),
        _packed(_OFFSETS, _KEY_OFFSETS, _FAR, 0, at_end=True),
        (S, T),
    ),
}


def _in_order(mask: Any, n: int, order: Any) -> Any:
    """Return a mask with what has an axis of tokens in an order."""
    if isinstance(mask, masks.Intersection):
        parts = (_in_order(part, n, order) for part in mask.parts)
        return functools.reduce(operator.and_, parts)

    def to(x: Any, axis: int) -> jax.Array:
        return ordered(jnp.asarray(x), n, order, axis)

    if isinstance(mask, masks.Segments):
        key = None if mask.key is None else to(mask.key, -1)
        return masks.Segments(to(mask.query, -1), key)
    if isinstance(mask, masks.Where):
        return masks.Where(to(to(mask.mask, 2), 3))
    if isinstance(mask, masks.Additive):
        return masks.Additive(to(to(mask.bias, 2), 3))
    return mask


def _spread(
    operands: dict[str, Any], method: str, order: Any, n: int = N, **options: Any
) -> Any:
    """Return output and log-sum-exp of whole operands in their natural order."""
    given = dict(operands)
    bias, sinks = given.pop("bias", None), given.pop("sinks", None)
    given = {name: ordered(x, n, order) for name, x in given.items()}
    for axis in (2, 3):
        if bias is not None and bias.shape[axis] != 1:
            bias = ordered(bias, n, order, axis)
    options["mask"] = _in_order(options.get("mask"), n, order)
    results = parallel.sharded_sdpa(
        **given,
        bias=bias,
        sinks=sinks,
        return_residual=True,
        mesh=mesh_of(seq=n),
        axis="seq",
        method=method,
        order=order,
        **options,
    )
    return tuple(natural(x, n, order) for x in results)


def _check(
    operands: dict[str, Any],
    seen: np.ndarray,
    method: str,
    order: str,
    *,
    truth: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Compare results and all gradients with those of dense attention."""
    q, v = operands["query"], operands["value"]
    pulls = (_draw(*q.shape[:3], v.shape[3]), _draw(*q.shape[:3]))

    def dense(x: dict[str, Any]) -> Any:
        return dense_attention(**x, seen=seen, **(truth or {}))

    spread = functools.partial(_spread, method=method, order=order, **options)
    want = with_gradients(dense, operands, pulls)
    got = with_gradients(spread, operands, pulls)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, want
    )


_OFTEN = ("documents", "packed", "packed-causal", "packed-window", "packed-ends")
# Each mask around a ring, and every second one by each of the other methods.
_PAIRS = [
    (name, method, ("contiguous", "zigzag")[(i // 2 + i + j) % 2])
    for i, name in enumerate(MASKS)
    for j, method in enumerate(METHODS)
    if j == 0 or i % 2 == j - 1
] + [
    (name, "ring", ("zigzag", "contiguous")[(i // 2 + i) % 2])
    for i, name in enumerate(MASKS)
    if name in _OFTEN
]
# A device has a part of every document then.
_PAIRS += [(name, "ring", "striped") for name in MASKS]
_PAIRS += [(name, "all_to_all", "striped") for name in ("documents", "packed-causal")]


@pytest.mark.parametrize(("name", "method", "order"), _PAIRS)
def test_masks_hide_what_they_say(name: str, method: str, order: str) -> None:
    mask, condition, (s, t) = MASKS[name]
    truth: dict[str, Any] = {}
    if name == "arrays":
        truth["bias"] = _BIAS
    seen = seen_by(condition, (B, H, s, t))
    _check(_operands(s, t), seen, method, order, truth=truth, mask=mask)


@pytest.mark.parametrize(
    ("method", "order"),
    [
        *((method, order) for method in METHODS for order in ("contiguous", "zigzag")),
        ("ring", "striped"),
    ],
)
def test_tokens_that_a_cache_has_no_room_for_are_nan(method: str, order: str) -> None:
    operands = _operands()
    lengths = masks.Lengths(np.array([S, 13]), np.array([T + 3, T + 30]))
    mask = masks.Causal("cache") & masks.Window(17, None, "cache") & lengths
    whole = functools.partial(sdpa, mask=mask, return_residual=True)
    got = _spread(operands, method, order, mask=mask)
    want = jax.jit(whole)(**operands)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)
    lost = np.isnan(got[1][..., 0])
    rows = np.arange(S)
    assert (lost == [rows >= S - 3, rows < 13]).all()


def _causal(b: int, h: int, i: int, j: int) -> bool:
    return j <= i


def test_shares_of_segments_are_those_of_a_devices_tokens() -> None:
    operands = _operands(T, T)
    mask = masks.Segments(jnp.asarray(_SEGMENTS))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(seq=N),
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    def attend(operands: dict[str, Any], mask: masks.Mask) -> jax.Array:
        return parallel.sdpa(
            **operands,
            mask=mask & masks.Causal(),
            axis_name="seq",
            order="zigzag",
            is_causal=True,
        )

    ordered = {name: parallel.to_zigzag(x, N) for name, x in operands.items()}
    got = attend(ordered, masks.Segments(parallel.to_zigzag(mask.query, N)))
    seen = seen_by(MASKS["documents"][1], (B, H, T, T))
    want, _ = dense_attention(**operands, seen=seen)
    np.testing.assert_allclose(parallel.from_zigzag(got, N), want, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_shares_of_a_score_mod_count_positions_in_the_whole(method: Any) -> None:
    operands = _operands(T, T)
    slopes = jnp.array([0.1, 0.5, 1.0, 0.0])

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(seq=2),
        in_specs=(P(None, "seq"), P()),
        out_specs=P(None, "seq"),
    )
    def attend(operands: dict[str, Any], slopes: jax.Array) -> jax.Array:
        return parallel.sdpa(
            **operands,
            axis_name="seq",
            method=method,
            order="zigzag",
            score_mod=score_mods.alibi(slopes),
            dropout_rate=_RATE,
            dropout_key=_KEY,
        )

    ordered = {name: parallel.to_zigzag(x, 2) for name, x in operands.items()}
    got = parallel.from_zigzag(attend(ordered, slopes), 2)
    distance = np.arange(T)[None, :] - np.arange(T)[:, None]
    bias = -np.abs(distance) * np.asarray(slopes)[None, :, None, None]
    seen = np.ones((B, H, T, T), bool)
    want, _ = dense_attention(**operands, seen=seen, bias=bias, factors=_factors(T, T))
    np.testing.assert_allclose(got, want, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_leaves_out_blocks_that_see_nothing(packed: bool) -> None:
    operands = _operands(T, T)
    size = T // N
    numbers = jnp.arange(T) // size
    mask: masks.Mask = masks.Segments(numbers)
    if packed:
        mask = masks.Packed(size * jnp.arange(N + 1), size * jnp.arange(N + 1))
        mask = mask & masks.Window(3, 3)  # As an array, whose 0 * NaN is NaN.
    # Each document is one device's. Hidden products with NaN would be NaN.
    spoilt = {name: x.at[:, :size].set(jnp.nan) for name, x in operands.items()}

    def loss(operands: dict[str, Any]) -> jax.Array:
        output, _ = _spread(operands, "ring", "contiguous", mask=mask)
        return jnp.sum(jnp.sin(output[:, size:]))

    gradient = jax.jit(jax.grad(loss))
    want, got = (gradient(x) for x in (operands, spoilt))
    for name, x in got.items():
        np.testing.assert_allclose(x[:, size:], want[name][:, size:], atol=1e-12)


def _documents(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of drawn documents in rows of 8 * n tokens, (B, 7).

    Some are empty, some rows end with padding, and documents may have gaps.
    """
    rng = np.random.default_rng([n, seed])
    cuts = np.sort(rng.integers(0, 8 * n + 1, (B, 8)), axis=1)
    gaps = rng.integers(0, 3, (B, 7)) * (seed % 2)
    return cuts[:, :-1], np.maximum(np.diff(cuts, axis=1) - gaps, 0)


@pytest.mark.parametrize("window", [None, (5, 0), (0, 0), (9, 4), 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_documents_of_any_length_in_striped_order(
    n: int, causal: bool, window: Any
) -> None:
    left, right = (window, window) if isinstance(window, int) else window or (999, 999)
    for seed in range(2):
        starts, lengths = _documents(n, seed)

        def condition(
            b: int,
            h: int,
            i: int,
            j: int,
            starts: np.ndarray = starts,
            lengths: np.ndarray = lengths,
        ) -> bool:
            own = (starts[b] <= i) & (i < starts[b] + lengths[b])
            other = (starts[b] <= j) & (j < starts[b] + lengths[b])
            is_near = -left <= j - i <= (min(right, 0) if causal else right)
            return bool(np.any(own & other)) and is_near

        _check(
            _operands(8 * n, 8 * n),
            seen_by(condition, (B, H, 8 * n, 8 * n)),
            "ring",
            "striped",
            n=n,
            mask=masks.Packed(starts, query_lengths=lengths),
            is_causal=causal,
            local_window_size=window,
        )


def test_causal_documents_in_striped_order_take_no_mask() -> None:
    operands = _operands(T, T)
    packed = masks.Packed(jnp.asarray(_PACKED))

    def loss(operands: dict[str, Any], packed: masks.Packed) -> jax.Array:
        output, _ = _spread(operands, "ring", "striped", mask=packed, is_causal=True)
        return jnp.sum(jnp.sin(output))

    # One program of all devices in each step, and its gradient.
    kinds = count_kinds(jax.grad(loss), operands, packed)
    assert kinds == {"sdpa": N, "sdpa_backward": N}
    text = str(jax.make_jaxpr(jax.grad(loss))(operands, packed))
    assert "cond[" not in text
    size = T // N
    assert f"bool[{B},1,{size},{size}]" not in text


# --- scores, sinks, dropout -----------------------------------------------------------

_CAP = 0.8
_RATE = 0.25
_KEY = jax.random.key(3)
_PLACES = [
    np.arange(n).reshape([-1 if i == axis else 1 for i in range(4)])
    for axis, n in enumerate((B, H, S, T))
]


def _modified(slopes: Any, table: Any) -> Any:
    """Return a score_mod with what it reads: ALiBi, a cap, and a term beyond it."""

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        distance = (i - j).astype(score.dtype)
        score = score - slopes[h] * jnp.abs(distance)
        return score_mods.softcap(_CAP)(score, b, h, i, j) * table[b, j] + table[b, i]

    return score_mod


def _dense_modified(slopes: Any, table: Any) -> Any:
    b, h, i, j = _PLACES

    def modify(scores: jax.Array) -> jax.Array:
        capped = scores - slopes[h] * np.abs(i - j).astype(float)
        return _CAP * jnp.tanh(capped / _CAP) * table[b, j] + table[b, i]

    return modify


@pytest.mark.parametrize(
    ("method", "order"),
    [
        *((method, order) for method in METHODS for order in ("contiguous", "zigzag")),
        ("ring", "striped"),
        ("all_to_all", "striped"),
    ],
)
def test_a_score_mod_sees_positions_of_the_whole_sequence(
    method: str, order: str
) -> None:
    operands = {**_operands(), "slopes": _draw(H), "table": _draw(B, T)}
    seen = seen_by(_causal, (B, H, S, T))

    def dense(x: dict[str, Any]) -> Any:
        slopes, table = x["slopes"], x["table"]
        given = {name: x[name] for name in ("query", "key", "value")}
        return dense_attention(
            **given, seen=seen, score_mod=_dense_modified(slopes, table)
        )

    def spread(x: dict[str, Any]) -> Any:
        given = {name: x[name] for name in ("query", "key", "value")}
        score_mod = _modified(x["slopes"], x["table"])
        return _spread(given, method, order, score_mod=score_mod, is_causal=True)

    pulls = (_draw(B, S, H, E), _draw(B, S, H))
    want, got = (with_gradients(f, operands, pulls) for f in (dense, spread))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, got, want)


@functools.cache
def _factors(s: int, t: int) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        found = drawn("sdpa", _RATE, _KEY, B, H)
        assert found is not None
        seed, offsets = int(found.seed.ravel()[0]), np.asarray(found.offset)
    return numpy_kept(found.rate, seed, offsets, s, t) / (1 - found.rate)


@pytest.mark.parametrize(
    ("method", "order", "s"),
    [
        *[(method, "zigzag", S) for method in METHODS],
        *[("ring", order, x) for order in ("contiguous", "striped") for x in (S, 64)],
        ("all_gather", "zigzag", 128),
    ],
)
def test_the_same_weights_are_dropped_as_on_one_device(
    method: str, order: str, s: int
) -> None:
    t = T if s == S else s
    seen = seen_by(_causal, (B, H, s, t))
    _check(
        {**_operands(s, t), "sinks": _draw(H)},
        seen,
        method,
        order,
        truth={"factors": _factors(s, t)},
        dropout_rate=_RATE,
        dropout_key=_KEY,
        is_causal=True,
    )


@pytest.mark.thorough
def test_what_is_kept_at_positions_is_what_is_kept_there() -> None:
    seed, offset = jnp.full((1, 1, 1, 1), -5, jnp.int32), jnp.array([[[[64]], [[96]]]])
    offset = offset.astype(jnp.int32)
    want = kept(_RATE, seed, offset, (80, 70))
    for rows, columns, runs in (
        (np.arange(32, 64), np.arange(16, 64), (16, 16)),
        (np.r_[8:16, 40:56], np.r_[16:32, 48:64], (8, 16)),
        (np.arange(3, 70), np.arange(5, 9), (1, 4)),
        (np.r_[4:8, 20:24], np.arange(0, 70, 2), (4, 1)),
    ):
        places = (jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32))
        got = kept_at(_RATE, seed, offset, (80, 70), places, runs)
        np.testing.assert_array_equal(got, want[:, :, rows[:, None], columns])


@pytest.mark.parametrize(
    ("method", "order", "bias"),
    [
        ("ring", "zigzag", ""),
        ("ring", "contiguous", "1hst"),
        ("all_gather", "zigzag", "b11t"),
        ("ring", "contiguous", "bhs1"),
        ("all_to_all", "zigzag", "b1st"),
        ("ring", "striped", "b1st"),
    ],
)
def test_sinks_take_their_share(method: str, order: str, bias: str) -> None:
    operands = {**_operands(), "sinks": _draw(H).at[0].set(-jnp.inf)}
    if bias:
        sizes = {"b": B, "h": H, "s": S, "t": T, "1": 1}
        operands["bias"] = _draw(*(sizes[axis] for axis in bias)).at[0, 0, 0, 0].set(5)
    mask, condition, _ = MASKS["packed"]
    _check(operands, seen_by(condition, (B, H, S, T)), method, order, mask=mask)


def test_the_gradient_beside_sinks_is_one_call_for_each_block() -> None:
    operands = {**_operands(), "sinks": _draw(H), "bias": _draw(1, H, S, T)}

    def loss(operands: dict[str, Any]) -> jax.Array:
        output, lse = _spread(operands, "ring", "contiguous")
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse > -10, lse, 0))

    assert count_kinds(jax.grad(loss), operands) == {"sdpa": N, "sdpa_backward": N}


def test_rows_that_a_bias_moves_far_are_exact_beside_sinks() -> None:
    wide = {**_operands(), "sinks": _draw(H), "bias": _draw(1, H, S, T)}
    far = wide["bias"].at[:, :, 3::4].add(-1e9).at[:, 1, 5].set(-3e10)
    far = far.at[:, 0, 7, 8:].add(-2e9).at[:, 2:, 6].add(3e6)
    narrow = {n: x.astype(jnp.float32) for n, x in {**wide, "bias": far}.items()}
    seen = seen_by(_causal, (B, H, S, T))
    pulls = [_draw(B, S, H, E), _draw(B, S, H)]

    def dense(x: dict[str, Any]) -> Any:
        return dense_attention(**x, seen=seen)

    def spread(x: dict[str, Any]) -> Any:
        return _spread(x, "ring", "contiguous", is_causal=True)

    exact = {name: jnp.asarray(x, jnp.float64) for name, x in narrow.items()}
    truth = with_gradients(dense, exact, tuple(pulls))
    got = with_gradients(spread, narrow, tuple(x.astype(jnp.float32) for x in pulls))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5), got, truth
    )


# --- all at once ----------------------------------------------------------------------


_DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(T)).astype(float)[None, None]


def _everything(x: dict[str, Any], method: Any = "ring", **options: Any) -> Any:
    given = {name: y for name, y in x.items() if name != "slopes"}
    score_mod = score_mods.compose(
        score_mods.alibi(x["slopes"]), score_mods.softcap(_CAP)
    )
    return parallel.sharded_sdpa(
        **given,
        mask=masks.Segments(jnp.asarray(_SEGMENTS)) & masks.Prefix(jnp.array([3, 9])),
        local_window_size=(11, 6),
        dropout_rate=_RATE,
        dropout_key=_KEY,
        score_mod=score_mod,
        method=method,
        **options,
    )


def _everything_dense(x: dict[str, Any]) -> jax.Array:
    slopes = x["slopes"]
    given = {name: y for name, y in x.items() if name != "slopes"}

    def condition(b: int, h: int, i: int, j: int) -> bool:
        is_own = _SEGMENTS[b, i] == _SEGMENTS[b, j]
        return is_own and (j < (3, 9)[b] or j <= i) and -11 <= j - i <= 6

    def modify(scores: jax.Array) -> jax.Array:
        biased = scores - slopes[None, :, None, None] * _DISTANCE
        return _CAP * jnp.tanh(biased / _CAP)

    seen = seen_by(condition, (B, H, T, T))
    factors = _factors(T, T)
    return dense_attention(**given, seen=seen, score_mod=modify, factors=factors)[0]


def _all_operands() -> dict[str, jax.Array]:
    return {**_operands(T, T), "slopes": abs(_draw(H)), "sinks": _draw(H)}


def _loss(function: Any, x: dict[str, Any], **options: Any) -> jax.Array:
    return jnp.sum(jnp.sin(function(x, **options)))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("method", METHODS)
def test_all_at_once_over_a_mesh_of_three_axes(method: str, kind: AxisType) -> None:
    operands = _all_operands()
    mesh = mesh_of(kind, data=2, seq=2, model=2)
    options = {"axis": "seq", "batch_axis": "data", "head_axis": "model"}
    spread = functools.partial(_loss, _everything, method=method, **options)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(spread))(operands)
    dense = functools.partial(_loss, _everything_dense)
    want = jax.jit(jax.value_and_grad(dense))(operands)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, got, want)


@pytest.mark.parametrize("way", ["jvp", "second", "vmap", "scan", "export"])
def test_transformations_of_all_at_once(way: str) -> None:
    operands = _all_operands()
    options: dict[str, Any] = {"mesh": mesh_of(seq=2), "axis": "seq"}
    spread = functools.partial(_everything, **options)

    def apply(function: Any) -> Any:
        loss = functools.partial(_loss, function)
        if way == "jvp":
            return jax.jvp(function, (operands,), (operands,))
        if way == "second":
            gradient = jax.grad(loss)
            return jax.jvp(gradient, (operands,), (operands,))
        if way == "vmap":
            queries = jnp.stack([operands["query"], -operands["query"]])
            one = jax.grad(lambda q: loss({**operands, "query": q}))
            return jax.vmap(one)(queries)
        if way == "export":
            return jax.grad(loss)(operands)

        def body(x: Any, _: None) -> Any:
            return 0.5 * jnp.sin(x), loss({**operands, "query": x})

        def total(q: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(jax.checkpoint(body), q, None, length=2)[1])

        return jax.grad(total)(operands["query"])

    want = jax.jit(functools.partial(apply, _everything_dense))()
    program = jax.jit(functools.partial(apply, spread))
    if way == "export":
        placed = jax.device_put(operands, NamedSharding(options["mesh"], P()))
        gradient = jax.jit(jax.grad(functools.partial(_loss, spread)))
        exported = jax.export.export(gradient)(placed)
        got = jax.export.deserialize(exported.serialize()).call(placed)
    else:
        got = program()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8)
    jax.tree.map(close, got, want)


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"mask": masks.Segments(np.arange(5))},
            ValueError,
            f"Segments.query is i32[5]. It must have one number per query in the order "
            f"of the tokens, shape [{T}] or [batch, {T}].",
        ),
        (
            {"mask": masks.Packed(np.arange(3)) & masks.Packed(np.arange(3))},
            ValueError,
            "two masks say which sequences a row contains. Pass one Packed;",
        ),
        (
            {"mask": masks.Where(np.ones((1, 1, 3, T), bool))},
            ValueError,
            f"mask is bool[1,1,3,{T}], which does not broadcast to (batch, heads, ",
        ),
        (
            {"score_mod": lambda score, b, h, i, j: jnp.sort(score[None])[0]},
            UnsupportedError,
            "score_mod <lambda> cannot be part of a kernel: ",
        ),
        ({"score_mod": 3}, TypeError, "score_mod is int. It must be a function of"),
        (
            {"dropout_rate": 0.5},
            ValueError,
            "dropout_rate is 0.5 but dropout_key is None.",
        ),
        ({"sinks": np.zeros(3)}, ValueError, "sinks is f64[3]. It must have one"),
    ],
)
def test_what_no_device_can_do_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with (
        jax.enable_x64(False) if "Segments" in message else jax.enable_x64(True),
        pytest.raises(error, match=rf"^parallel\.sharded_sdpa: {re.escape(message)}"),
    ):
        parallel.sharded_sdpa(
            *_operands(T, T).values(), mesh=mesh_of(seq=N), axis="seq", **options
        )
