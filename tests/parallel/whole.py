# SPDX-License-Identifier: Apache-2.0
"""Attention of whole arrays, by several devices and dense, for tests of its options."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import masks, parallel
from jax_cudnn.ops.attention.dropout import drawn
from jax_cudnn.parallel.order import natural, ordered
from tests.attention.shared.dense import dense_attention, with_gradients
from tests.attention.shared.dropout import numpy_kept
from tests.common.devices import mesh_of

B, H, K, S, T, D, E = 2, 4, 2, 24, 40, 3, 5

N = 4

_RNG = np.random.default_rng(0)

METHODS = ("ring", "all_gather", "all_to_all")


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(_RNG.standard_normal(shape))


def operands_of(s: int = S, t: int = T) -> dict[str, jax.Array]:
    return {"query": draw(B, s, H, D), "key": draw(B, t, K, D)} | {
        "value": draw(B, t, K, E)
    }


SEGMENTS = np.sort(_RNG.integers(0, 5, (B, T)), axis=1)

_LOOSE = _RNG.integers(0, 3, (T,))

_TABLE = _RNG.integers(0, 2, (B, H, 8, 6)) > 0

_ARRAY = _RNG.integers(0, 3, (B, 1, S, T)) > 0

BIAS = np.where(
    _RNG.integers(0, 4, (1, H, S, T)) > 0, _RNG.standard_normal((1, H, S, T)), -np.inf
)

_LENGTHS = (np.array([S, 13]), np.array([11, 33]))

_OFFSETS = np.array([[0, 9, 9, 17, 24], [0, 3, 15, 16, 23]])

_KEY_OFFSETS = np.array([[0, 4, 20, 31, 40], [0, 7, 7, 25, 39]])

PACKED = np.array([[0, 7, 7, 31, 40], [0, 4, 20, 21, 38]])


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
        masks.Segments(SEGMENTS) & masks.Causal(),
        lambda b, h, i, j: SEGMENTS[b, i] == SEGMENTS[b, j] and j <= i,
        (T, T),
    ),
    "segments": (
        masks.Segments(SEGMENTS[0, :S], _LOOSE),
        lambda b, h, i, j: SEGMENTS[0, i] == _LOOSE[j],
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
        masks.Where(_ARRAY) & masks.Additive(BIAS) & masks.Prefix(3),
        lambda b, h, i, j: _ARRAY[b, 0, i, j] and (j < 3 or j <= i),
        (S, T),
    ),
    "packed": (
        masks.Packed(_OFFSETS, _KEY_OFFSETS),
        _packed(_OFFSETS, _KEY_OFFSETS, _FAR, _FAR),
        (S, T),
    ),
    "packed-causal": (
        masks.Packed(PACKED) & masks.Causal(),
        _packed(PACKED, PACKED, _FAR, 0),
        (T, T),
    ),
    "packed-window": (
        masks.Packed(PACKED, max_length=11) & masks.Window(4, 2),
        lambda b, h, i, j: (
            _packed(PACKED, PACKED, 4, 2)(b, h, i, j)
            and max(i, j) - PACKED[b][_sequence(PACKED[b], i)] < 11
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


def spread_over(
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


def check(
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
    pulls = (draw(*q.shape[:3], v.shape[3]), draw(*q.shape[:3]))

    def dense(x: dict[str, Any]) -> Any:
        return dense_attention(**x, seen=seen, **(truth or {}))

    spread = functools.partial(spread_over, method=method, order=order, **options)
    want = with_gradients(dense, operands, pulls)
    got = with_gradients(spread, operands, pulls)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), got, want
    )


def causal(b: int, h: int, i: int, j: int) -> bool:
    return j <= i


RATE = 0.25

KEY = jax.random.key(3)


@functools.cache
def factors_of(s: int, t: int) -> np.ndarray:
    with jax.ensure_compile_time_eval():
        found = drawn("sdpa", RATE, KEY, B, H)
        assert found is not None
        seed, offsets = int(found.seed.ravel()[0]), np.asarray(found.offset)
    return numpy_kept(found.rate, seed, offsets, s, t) / (1 - found.rate)
