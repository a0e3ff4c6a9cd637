# SPDX-License-Identifier: Apache-2.0
"""Tests that every two options of `sdpa` together mean what each means alone.

Every pair of options gives output, log-sum-exp, maximum and all gradients of dense
attention in float64 (tests/attention/shared/dense.py), or is refused by a message that
names both.
"""

import functools
import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import masks, plans, score_mods, sdpa
from jax_cudnn.ops.attention.dropout import drawn
from tests.attention.shared.dense import (
    Condition,
    dense_attention,
    seen_by,
    with_gradients,
)
from tests.attention.shared.dropout import numpy_kept

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("x64"), pytest.mark.sampled]

B, H, K, S, T, D, E = 2, 4, 2, 5, 7, 3, 2
_RNG = np.random.default_rng(7)


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option: arguments of `sdpa`, and what they mean for dense attention.

    ``arrays`` get gradients. ``call`` and ``truth`` return the arguments of `sdpa` and
    of dense attention, given these arrays.
    """

    call: Any = lambda x: {}
    truth: Any = lambda x: {}
    mask: masks.Mask | None = None
    seen: Condition = lambda b, h, i, j: True
    arrays: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_ARRAY = _RNG.integers(0, 4, (B, 1, S, T)) > 0
_ARRAY[1, 0, 2] = False
_ADDED = np.where(
    _RNG.integers(0, 4, (S, T)) > 0, _RNG.standard_normal((S, T)), -np.inf
)
_SEGMENTS = _RNG.integers(0, 2, (B, S)), _RNG.integers(0, 2, (B, T))
_TABLE = _RNG.integers(0, 3, (H, 3, 3)) > 0
_LENGTHS = np.array([4, 3]), np.array([6, 0])
_PREFIX = np.array([2, 4])
_STARTS = np.array([[0, 2, 5], [0, 1, 4]]), np.array([[0, 3, 7], [0, 2, 6]])
_KEY, _RATE, _CAP, _SCALE = jax.random.key(11), 0.25, 0.7, -0.6


def _packed(b: int, h: int, i: int, j: int) -> bool:
    q, k = _STARTS[0][b], _STARTS[1][b]
    return any(q[n] <= i < q[n + 1] and k[n] <= j < k[n + 1] for n in range(2))


@functools.cache
def _factors() -> np.ndarray:
    with jax.ensure_compile_time_eval():
        found = drawn("sdpa", _RATE, _KEY, B, H)
        assert found is not None
        seed, offsets = int(found.seed.ravel()[0]), np.asarray(found.offset)
    return numpy_kept(found.rate, seed, offsets, S, T) / (1 - found.rate)


def _capped(x: Any) -> Any:
    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        capped = score_mods.softcap(_CAP)(score + x["table"][j], b, h, i, j)
        return capped * x["slopes"][h] + x["table"][i]

    return score_mod


def _dense_capped(x: Any) -> Any:
    slopes = x["slopes"][None, :, None, None]
    columns = x["table"][None, None, None, :]
    rows = x["table"][None, None, :S, None]

    def modify(scores: jax.Array) -> jax.Array:
        return _CAP * jnp.tanh((scores + columns) / _CAP) * slopes + rows

    return modify


OPTIONS: dict[str, Option] = {
    "bias": Option(
        arrays={"bias": (1, H, S, T)},
        call=lambda x: {"bias": x["bias"]},
        truth=lambda x: {"bias": x["bias"]},
    ),
    "row_bias": Option(
        arrays={"row_bias": (B, 1, S, 1)},
        call=lambda x: {"bias": x["row_bias"]},
        truth=lambda x: {"bias": x["row_bias"]},
    ),
    "additive": Option(
        mask=masks.Additive(_ADDED), truth=lambda x: {"bias": _ADDED[None, None]}
    ),
    "is_causal": Option(
        call=lambda x: {"is_causal": True}, seen=lambda b, h, i, j: j <= i
    ),
    "bottom_right": Option(
        mask=masks.Causal("bottom-right"), seen=lambda b, h, i, j: j <= i + T - S
    ),
    "cache": Option(
        mask=masks.Causal("cache") & masks.Lengths(*_LENGTHS),
        seen=lambda b, h, i, j: (
            i < _LENGTHS[0][b]
            and j < _LENGTHS[1][b]
            and j <= i + _LENGTHS[1][b] - _LENGTHS[0][b]
        ),
    ),
    "window": Option(
        call=lambda x: {"local_window_size": (2, 1)},
        seen=lambda b, h, i, j: -2 <= j - i <= 1,
    ),
    "lengths": Option(
        call=lambda x: {
            "query_seq_lengths": _LENGTHS[0],
            "key_value_seq_lengths": _LENGTHS[1],
        },
        seen=lambda b, h, i, j: i < _LENGTHS[0][b] and j < _LENGTHS[1][b],
    ),
    "array": Option(
        mask=masks.Where(_ARRAY), seen=lambda b, h, i, j: _ARRAY[b, 0, i, j]
    ),
    "segments": Option(
        mask=masks.Segments(*_SEGMENTS),
        seen=lambda b, h, i, j: _SEGMENTS[0][b, i] == _SEGMENTS[1][b, j],
    ),
    "prefix": Option(
        mask=masks.Prefix(_PREFIX), seen=lambda b, h, i, j: j < _PREFIX[b] or j <= i
    ),
    "blocks": Option(
        mask=masks.Blocks(_TABLE, (2, 3)),
        seen=lambda b, h, i, j: _TABLE[h, i // 2, j // 3],
    ),
    "packed": Option(mask=masks.Packed(*_STARTS), seen=_packed),
    "sinks": Option(
        arrays={"sinks": (H,)},
        call=lambda x: {"sinks": x["sinks"]},
        truth=lambda x: {"sinks": x["sinks"]},
    ),
    "dropout": Option(
        call=lambda x: {"dropout_rate": _RATE, "dropout_key": _KEY},
        truth=lambda x: {"factors": _factors()},
    ),
    "score_mod": Option(
        arrays={"table": (T,), "slopes": (H,)},
        call=lambda x: {"score_mod": _capped(x)},
        truth=lambda x: {"score_mod": _dense_capped(x)},
    ),
    "deterministic": Option(
        call=lambda x: {"plan": plans.PlanOptions(deterministic=True)}
    ),
}

# Positions beside packed sequences count within each: another meaning than either has
# alone, which tests/attention/test_sdpa_packed.py is about. Both biases are one
# argument.
_OTHER_MEANING = [
    *(("packed", x) for x in ("is_causal", "bottom_right", "window", "cache")),
    ("bias", "row_bias"),
]
_PAIRS = [
    (first, second)
    for first, second in itertools.combinations(OPTIONS, 2)
    if not {(first, second), (second, first)} & set(_OTHER_MEANING)
]


def _joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of both; biases add up."""
    joined = found[0] | found[1]
    if "bias" in found[0] and "bias" in found[1]:
        joined["bias"] = found[0]["bias"] + found[1]["bias"]
    return joined


@pytest.mark.parametrize(("first", "second"), _PAIRS)
def test_two_options_mean_what_both_mean(first: str, second: str) -> None:
    options = [OPTIONS[first], OPTIONS[second]]
    shapes: dict[str, Any] = {
        "query": (B, S, H, D),
        "key": (B, T, K, D),
        "value": (B, T, K, E),
    }
    for option in options:
        shapes.update(option.arrays)
    rng = np.random.default_rng([*first.encode(), *second.encode()])
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    pulls = tuple(rng.standard_normal((B, S, H, *more)) for more in ((E,), (), ()))
    given = [option.mask for option in options if option.mask is not None]
    mask = functools.reduce(operator.and_, given) if given else None
    conditions = [option.seen for option in options]
    seen = seen_by(lambda *x: all(f(*x) for f in conditions), (B, H, S, T))

    def tokens(x: dict[str, Any]) -> list[Any]:
        return [x[name] for name in ("query", "key", "value")]

    def call(x: dict[str, Any]) -> Any:
        keywords = _joined([option.call(x) for option in options])
        return sdpa(
            *tokens(x),
            mask=mask,
            scale=_SCALE,
            return_residual=True,
            return_max_logit=True,
            **keywords,
        )

    def dense(x: dict[str, Any]) -> Any:
        keywords = _joined([option.truth(x) for option in options])
        return dense_attention(
            *tokens(x), seen=seen, scale=_SCALE, with_max=True, **keywords
        )

    got = with_gradients(call, arrays, pulls)
    # One operation after another: most are compiled already.
    want = with_gradients(dense, arrays, pulls, is_jitted=False)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, got, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask": masks.Packed(*_STARTS) & masks.Packed(*_STARTS)},
            "two masks say which sequences a row contains. Pass one Packed; Segments "
            "may",
        ),
        (
            {
                "mask": masks.Packed(*_STARTS) & masks.Window(1, 1, "bottom-right"),
                "is_causal": True,
            },
            "causality and windows of packed sequences have different alignments",
        ),
        ({"dropout_rate": 0.5}, "dropout_rate is 0.5 but dropout_key is None."),
    ],
)
def test_what_two_options_cannot_mean_is_refused(
    options: dict[str, Any], message: str
) -> None:
    query, key = np.zeros((B, S, H, D)), np.zeros((B, T, K, D))
    with pytest.raises(ValueError, match=f"^sdpa: {re.escape(message)}"):
        sdpa(query, key, key, **options)
