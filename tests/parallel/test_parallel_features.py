# SPDX-License-Identifier: Apache-2.0
"""Tests masks over several devices.

The truth is dense attention of the whole arrays in float64
(tests/attention/shared/dense.py), with masks as Python conditions on one query and one
key, and dropout's numbers as NumPy has them.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_cudnn import UnsupportedError, masks, parallel, sdpa
from jax_cudnn.lowering import traced_graphs
from tests.attention.shared.dense import dense_attention, seen_by, with_gradients
from tests.attention.shared.small import count_kinds
from tests.common.devices import mesh_of
from tests.parallel.whole import (
    BIAS,
    MASKS,
    METHODS,
    PACKED,
    SEGMENTS,
    B,
    E,
    H,
    N,
    S,
    T,
    check,
    draw,
    operands_of,
    spread_over,
)

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("x64"), pytest.mark.sampled]


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
        truth["bias"] = BIAS
    seen = seen_by(condition, (B, H, s, t))
    check(operands_of(s, t), seen, method, order, truth=truth, mask=mask)


@pytest.mark.parametrize(
    ("method", "order"),
    [
        *((method, order) for method in METHODS for order in ("contiguous", "zigzag")),
        ("ring", "striped"),
    ],
)
def test_tokens_that_a_cache_has_no_room_for_are_nan(method: str, order: str) -> None:
    operands = operands_of()
    lengths = masks.Lengths(np.array([S, 13]), np.array([T + 3, T + 30]))
    mask = masks.Causal("cache") & masks.Window(17, None, "cache") & lengths
    whole = functools.partial(sdpa, mask=mask, return_residual=True)
    got = spread_over(operands, method, order, mask=mask)
    want = jax.jit(whole)(**operands)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)
    lost = np.isnan(got[1][..., 0])
    rows = np.arange(S)
    assert (lost == [rows >= S - 3, rows < 13]).all()


def test_shares_of_segments_are_those_of_a_devices_tokens() -> None:
    operands = operands_of(T, T)
    mask = masks.Segments(jnp.asarray(SEGMENTS))

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


@pytest.mark.parametrize("packed", [False, True])
def test_a_ring_leaves_out_blocks_that_see_nothing(packed: bool) -> None:
    operands = operands_of(T, T)
    size = T // N
    numbers = jnp.arange(T) // size
    mask: masks.Mask = masks.Segments(numbers)
    if packed:
        mask = masks.Packed(size * jnp.arange(N + 1), size * jnp.arange(N + 1))
        mask = mask & masks.Window(3, 3)  # As an array, whose 0 * NaN is NaN.
    # Each document is one device's. Hidden products with NaN would be NaN.
    spoilt = {name: x.at[:, :size].set(jnp.nan) for name, x in operands.items()}

    def loss(operands: dict[str, Any]) -> jax.Array:
        output, _ = spread_over(operands, "ring", "contiguous", mask=mask)
        return jnp.sum(jnp.sin(output[:, size:]))

    gradient = jax.jit(jax.grad(loss))
    want, got = (gradient(x) for x in (operands, spoilt))
    for name, x in got.items():
        np.testing.assert_allclose(x[:, size:], want[name][:, size:], atol=1e-12)


_WAYS_OF_DOCUMENTS = [
    ("ring", "striped"),
    ("ring", "zigzag"),
    ("ring", "contiguous"),
    ("all_gather", "zigzag"),
    ("all_gather", "contiguous"),
]


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
@pytest.mark.parametrize(("method", "order"), _WAYS_OF_DOCUMENTS)
def test_documents_of_any_length(
    method: str, order: str, n: int, causal: bool, window: Any
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

        check(
            operands_of(8 * n, 8 * n),
            seen_by(condition, (B, H, 8 * n, 8 * n)),
            method,
            order,
            n=n,
            mask=masks.Packed(starts, query_lengths=lengths),
            is_causal=causal,
            local_window_size=window,
        )


@pytest.mark.parametrize("sizes", [(T, T), (T, 2 * T), (2 * T, T)])
@pytest.mark.parametrize(("method", "order"), _WAYS_OF_DOCUMENTS)
def test_causal_documents_take_no_mask(
    method: str, order: str, sizes: tuple[int, int]
) -> None:
    operands, offsets = operands_of(*sizes), jnp.asarray(PACKED)

    def loss(operands: dict[str, Any], offsets: jax.Array) -> jax.Array:
        # One array for both is one set of sequences.
        packed = masks.Packed(offsets, offsets if sizes[0] == T else None)
        output, _ = spread_over(operands, method, order, mask=packed, is_causal=True)
        return jnp.sum(jnp.sin(output))

    text = str(jax.make_jaxpr(jax.grad(loss))(operands, offsets))
    scores = re.findall(r"bool\[\d+,1,(\d+),(\d+)\]", text)
    assert all("1" in sizes for sizes in scores)
    if order == "striped":
        # One program of all devices in each step, and its gradient.
        assert "cond[" not in text
        kinds = count_kinds(jax.grad(loss), operands, offsets)
        assert kinds == {"sdpa": N, "sdpa_backward": N}


@pytest.mark.parametrize(("method", "order"), _WAYS_OF_DOCUMENTS)
def test_a_batch_may_have_no_entries(method: str, order: str) -> None:
    operands = {name: x[:0] for name, x in operands_of(T, T).items()}
    mask = masks.Packed(jnp.asarray(PACKED[0])) & masks.Window(4, 2)

    @jax.grad
    def gradient(operands: dict[str, Any], mask: masks.Mask | None) -> jax.Array:
        found = spread_over(operands, method, order, mask=mask, is_causal=True)
        return sum(map(jnp.sum, found), jnp.zeros(()))

    for given in (None, mask):
        found = jax.eval_shape(gradient, operands, given)
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, operands)


@pytest.mark.parametrize("name", [x for x in MASKS if x.startswith("packed")])
def test_heads_apart_take_packed_sequences_as_one_device(name: str) -> None:
    mask, _, sizes = MASKS[name]
    operands = operands_of(*sizes)
    spread = functools.partial(
        spread_over, method="all_to_all", order="contiguous", mask=mask
    )
    one = functools.partial(sdpa, mask=mask, return_residual=True)
    (own,), (whole,) = (
        traced_graphs(function, operands)[0].graph.nodes
        for function in (spread, lambda operands: one(**operands))
    )
    assert own.attributes == whole.attributes
    assert [role for role, _ in own.inputs] == [role for role, _ in whole.inputs]


@pytest.mark.parametrize(
    ("method", "order"),
    [
        ("ring", "contiguous"),
        ("ring", "striped"),
        ("all_gather", "zigzag"),
        ("all_to_all", "contiguous"),
    ],
)
@pytest.mark.parametrize("name", [x for x in MASKS if x.startswith("packed")])
def test_padding_of_packed_documents_may_be_nan(
    name: str, method: str, order: str
) -> None:
    mask, _, (s, t) = MASKS[name]
    packed = next(x for x in mask._parts() if isinstance(x, masks.Packed))
    offsets = packed.query_offsets, packed.key_offsets
    queries, keys = (
        np.arange(size) >= np.asarray(offsets[0] if x is None else x)[:, -1:]
        for size, x in zip((s, t), offsets, strict=True)
    )
    assert queries.any()
    assert keys.any()
    operands = operands_of(s, t)
    pulls = (draw(B, s, H, E), draw(B, s, H))

    def spoilt(is_padding: np.ndarray, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(is_padding, range(2, x.ndim)), jnp.nan, x)

    given = {
        name: spoilt(queries if name == "query" else keys, x)
        for name, x in operands.items()
    }
    spread = functools.partial(spread_over, method=method, order=order, mask=mask)
    want = with_gradients(spread, operands, pulls)
    got = with_gradients(spread, given, tuple(spoilt(queries, x) for x in pulls))
    jax.tree.map(np.testing.assert_array_equal, got, want)


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
            *operands_of(T, T).values(), mesh=mesh_of(seq=N), axis="seq", **options
        )
