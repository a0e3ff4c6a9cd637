# SPDX-License-Identifier: Apache-2.0
"""Tests score_mods, dropout and sinks over several devices, and all options at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_cudnn import masks, parallel, score_mods
from jax_cudnn.reference.attention.dropout import kept, kept_at
from tests.attention.shared.dense import dense_attention, seen_by, with_gradients
from tests.attention.shared.small import count_kinds
from tests.common.devices import mesh_of
from tests.parallel.whole import (
    KEY,
    MASKS,
    METHODS,
    RATE,
    SEGMENTS,
    B,
    E,
    H,
    N,
    S,
    T,
    causal,
    check,
    draw,
    factors_of,
    operands_of,
    spread_over,
)

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("x64"), pytest.mark.sampled]


@pytest.mark.parametrize("method", METHODS)
def test_shares_of_a_score_mod_count_positions_in_the_whole(method: Any) -> None:
    operands = operands_of(T, T)
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
            dropout_rate=RATE,
            dropout_key=KEY,
        )

    ordered = {name: parallel.to_zigzag(x, 2) for name, x in operands.items()}
    got = parallel.from_zigzag(attend(ordered, slopes), 2)
    distance = np.arange(T)[None, :] - np.arange(T)[:, None]
    bias = -np.abs(distance) * np.asarray(slopes)[None, :, None, None]
    seen = np.ones((B, H, T, T), bool)
    want, _ = dense_attention(
        **operands, seen=seen, bias=bias, factors=factors_of(T, T)
    )
    np.testing.assert_allclose(got, want, atol=1e-9)


_CAP = 0.8

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
    operands = {**operands_of(), "slopes": draw(H), "table": draw(B, T)}
    seen = seen_by(causal, (B, H, S, T))

    def dense(x: dict[str, Any]) -> Any:
        slopes, table = x["slopes"], x["table"]
        given = {name: x[name] for name in ("query", "key", "value")}
        return dense_attention(
            **given, seen=seen, score_mod=_dense_modified(slopes, table)
        )

    def spread(x: dict[str, Any]) -> Any:
        given = {name: x[name] for name in ("query", "key", "value")}
        score_mod = _modified(x["slopes"], x["table"])
        return spread_over(given, method, order, score_mod=score_mod, is_causal=True)

    pulls = (draw(B, S, H, E), draw(B, S, H))
    want, got = (with_gradients(f, operands, pulls) for f in (dense, spread))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, got, want)


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
    seen = seen_by(causal, (B, H, s, t))
    check(
        {**operands_of(s, t), "sinks": draw(H)},
        seen,
        method,
        order,
        truth={"factors": factors_of(s, t)},
        dropout_rate=RATE,
        dropout_key=KEY,
        is_causal=True,
    )


@pytest.mark.thorough
def test_what_is_kept_at_positions_is_what_is_kept_there() -> None:
    seed, offset = jnp.full((1, 1, 1, 1), -5, jnp.int32), jnp.array([[[[64]], [[96]]]])
    offset = offset.astype(jnp.int32)
    want = kept(RATE, seed, offset, (80, 70))
    for rows, columns, runs in (
        (np.arange(32, 64), np.arange(16, 64), (16, 16)),
        (np.r_[8:16, 40:56], np.r_[16:32, 48:64], (8, 16)),
        (np.arange(3, 70), np.arange(5, 9), (1, 4)),
        (np.r_[4:8, 20:24], np.arange(0, 70, 2), (4, 1)),
    ):
        places = (jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32))
        got = kept_at(RATE, seed, offset, (80, 70), places, runs)
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
    operands = {**operands_of(), "sinks": draw(H).at[0].set(-jnp.inf)}
    if bias:
        sizes = {"b": B, "h": H, "s": S, "t": T, "1": 1}
        operands["bias"] = draw(*(sizes[axis] for axis in bias)).at[0, 0, 0, 0].set(5)
    mask, condition, _ = MASKS["packed"]
    check(operands, seen_by(condition, (B, H, S, T)), method, order, mask=mask)


def test_the_gradient_beside_sinks_is_one_call_for_each_block() -> None:
    operands = {**operands_of(), "sinks": draw(H), "bias": draw(1, H, S, T)}

    def loss(operands: dict[str, Any]) -> jax.Array:
        output, lse = spread_over(operands, "ring", "contiguous")
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse > -10, lse, 0))

    assert count_kinds(jax.grad(loss), operands) == {"sdpa": N, "sdpa_backward": N}


def test_rows_that_a_bias_moves_far_are_exact_beside_sinks() -> None:
    wide = {**operands_of(), "sinks": draw(H), "bias": draw(1, H, S, T)}
    far = wide["bias"].at[:, :, 3::4].add(-1e9).at[:, 1, 5].set(-3e10)
    far = far.at[:, 0, 7, 8:].add(-2e9).at[:, 2:, 6].add(3e6)
    narrow = {n: x.astype(jnp.float32) for n, x in {**wide, "bias": far}.items()}
    seen = seen_by(causal, (B, H, S, T))
    pulls = [draw(B, S, H, E), draw(B, S, H)]

    def dense(x: dict[str, Any]) -> Any:
        return dense_attention(**x, seen=seen)

    def spread(x: dict[str, Any]) -> Any:
        return spread_over(x, "ring", "contiguous", is_causal=True)

    exact = {name: jnp.asarray(x, jnp.float64) for name, x in narrow.items()}
    truth = with_gradients(dense, exact, tuple(pulls))
    got = with_gradients(spread, narrow, tuple(x.astype(jnp.float32) for x in pulls))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5), got, truth
    )


_DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(T)).astype(float)[None, None]


def _everything(x: dict[str, Any], method: Any = "ring", **options: Any) -> Any:
    given = {name: y for name, y in x.items() if name != "slopes"}
    score_mod = score_mods.compose(
        score_mods.alibi(x["slopes"]), score_mods.softcap(_CAP)
    )
    return parallel.sharded_sdpa(
        **given,
        mask=masks.Segments(jnp.asarray(SEGMENTS)) & masks.Prefix(jnp.array([3, 9])),
        local_window_size=(11, 6),
        dropout_rate=RATE,
        dropout_key=KEY,
        score_mod=score_mod,
        method=method,
        **options,
    )


def _everything_dense(x: dict[str, Any]) -> jax.Array:
    slopes = x["slopes"]
    given = {name: y for name, y in x.items() if name != "slopes"}

    def condition(b: int, h: int, i: int, j: int) -> bool:
        is_own = SEGMENTS[b, i] == SEGMENTS[b, j]
        return is_own and (j < (3, 9)[b] or j <= i) and -11 <= j - i <= 6

    def modify(scores: jax.Array) -> jax.Array:
        biased = scores - slopes[None, :, None, None] * _DISTANCE
        return _CAP * jnp.tanh(biased / _CAP)

    seen = seen_by(condition, (B, H, T, T))
    factors = factors_of(T, T)
    return dense_attention(**given, seen=seen, score_mod=modify, factors=factors)[0]


def _all_operands() -> dict[str, jax.Array]:
    return {**operands_of(T, T), "slopes": abs(draw(H)), "sinks": draw(H)}


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
