# SPDX-License-Identifier: Apache-2.0
"""Tests random combinations of several options of `sdpa`, with random sizes.

Drawn options and sizes give output, log-sum-exp, maximum and all gradients of dense
attention in float64 (tests/attention/shared/dense.py): those of the operands, of biases
and sinks, and of the arrays that a score_mod captures.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_cudnn import UnsupportedError, masks, plans, score_mods, sdpa
from jax_cudnn.ops.attention.dropout import drawn
from tests.attention.shared.dense import dense_attention, with_gradients
from tests.attention.shared.dropout import numpy_kept
from tests.common.examples import examples

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _doubles_and_promotion_as_users_have_it() -> Iterator[None]:
    """Let functions of scores mix dtypes and ranks."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


class Sizes(NamedTuple):
    """Of the axes, with g query heads for each of k key heads."""

    b: int
    s: int
    t: int
    g: int
    d: int
    e: int
    k: int

    @property
    def h(self) -> int:
        return self.k * self.g


class Places(NamedTuple):
    """Open grids of batch entries, heads, queries and keys, and what bands count by.

    ``row`` and ``column`` are positions in the sequence, and ``ends`` is how much the
    alignment adds to the row.
    """

    b: np.ndarray
    h: np.ndarray
    i: np.ndarray
    j: np.ndarray
    row: Any
    column: Any
    ends: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Option:
    """Arguments of `sdpa`, and what they mean for dense attention.

    ``arrays`` get gradients; ``call`` and ``truth`` return arguments, given these.
    """

    call: Any = lambda x: {}
    truth: Any = lambda x: {}
    mask: masks.Mask | None = None
    seen: Callable[[Places], Any] = lambda p: True
    arrays: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Where sequences begin and how long they are, of queries and of keys, each (b, n).
    sequences: Any = None
    # Of each batch entry's queries and keys.
    lengths: Any = None


Rng = np.random.Generator
_ALIGNMENTS = ("top-left", "bottom-right", "cache")


def _bias(rng: Rng, z: Sizes, alignment: str) -> Option:
    shape = tuple(int(rng.choice([1, x])) for x in (z.b, z.h, z.s, z.t))
    return Option(
        arrays={"bias": shape},
        call=lambda x: {"bias": x["bias"]},
        truth=lambda x: {"bias": x["bias"]},
    )


def _additive(rng: Rng, z: Sizes, alignment: str) -> Option:
    hidden = np.where(rng.random((z.s, z.t)) < 0.2, -np.inf, 0)
    return Option(
        arrays={"added": (z.h, 1, z.t)},
        call=lambda x: {"added": masks.Additive(x["added"] + hidden)},
        truth=lambda x: {"bias": (x["added"] + hidden)[None]},
    )


def _causal(rng: Rng, z: Sizes, alignment: str) -> Option:
    seen = lambda p: p.column <= p.row + p.ends[alignment]  # noqa: E731
    if alignment == "top-left" and rng.integers(2):
        return Option(call=lambda x: {"is_causal": True}, seen=seen)
    return Option(mask=masks.Causal(alignment), seen=seen)  # type: ignore[arg-type]


def _window(rng: Rng, z: Sizes, alignment: str) -> Option:
    # Not one that shows no key to any query, causality beside it or not.
    left = int(rng.integers(0, 6))
    right = int(rng.integers(-min(left, 2), 6))

    def seen(p: Places) -> Any:
        distance = p.column - p.row - p.ends[alignment]
        return (distance >= -left) & (distance <= right)

    if alignment == "top-left" and min(left, right) >= 0:
        return Option(call=lambda x: {"local_window_size": (left, right)}, seen=seen)
    return Option(mask=masks.Window(left, right, alignment), seen=seen)  # type: ignore[arg-type]


def _lengths(rng: Rng, z: Sizes, alignment: str) -> Option:
    q, k = rng.integers(0, z.s + 1, z.b), rng.integers(0, z.t + 1, z.b)
    return Option(
        call=lambda x: {"query_seq_lengths": q, "key_value_seq_lengths": k},
        seen=lambda p: (p.i < q[p.b]) & (p.j < k[p.b]),
        lengths=(q, k),
    )


def _where(rng: Rng, z: Sizes, alignment: str) -> Option:
    seen = rng.random((z.b, 1, z.s, z.t)) < 0.7
    return Option(mask=masks.Where(seen), seen=lambda p: seen)


def _segments(rng: Rng, z: Sizes, alignment: str) -> Option:
    q, k = rng.integers(0, 2, (z.b, z.s)), rng.integers(0, 2, (z.b, z.t))
    return Option(mask=masks.Segments(q, k), seen=lambda p: q[p.b, p.i] == k[p.b, p.j])


def _prefix(rng: Rng, z: Sizes, alignment: str) -> Option:
    n = rng.integers(0, z.t + 1, z.b)
    return Option(mask=masks.Prefix(n), seen=lambda p: (p.j < n[p.b]) | (p.j <= p.i))


def _blocks(rng: Rng, z: Sizes, alignment: str) -> Option:
    table = rng.random((z.h, -(-z.s // 2), -(-z.t // 4))) < 0.7
    return Option(
        mask=masks.Blocks(table, (2, 4)), seen=lambda p: table[p.h, p.i // 2, p.j // 4]
    )


def _packed(rng: Rng, z: Sizes, alignment: str) -> Option:
    n = int(rng.integers(1, 4))
    offsets = [np.sort(rng.integers(0, x + 1, (z.b, n + 1)), 1) for x in (z.s, z.t)]
    has_lengths = bool(rng.integers(2))
    if not has_lengths:  # Then the first sequence begins with the first token.
        for x in offsets:
            x[:, 0] = 0
    starts, counts = [x[:, :-1] for x in offsets], [np.diff(x, axis=1) for x in offsets]
    mask = masks.Packed(offsets[0], offsets[1])
    if has_lengths:
        counts = [rng.integers(0, x + 1) for x in counts]
        mask = masks.Packed(starts[0], starts[1], counts[0], counts[1])
    return Option(mask=mask, sequences=[*zip(starts, counts, strict=True)])


def _sinks(rng: Rng, z: Sizes, alignment: str) -> Option:
    one = lambda x: {"sinks": x["sinks"]}  # noqa: E731
    return Option(arrays={"sinks": (z.h,)}, call=one, truth=one)


def _dropout(rng: Rng, z: Sizes, alignment: str) -> Option:
    key, rate = jax.random.key(int(rng.integers(100))), float(rng.choice([0.1, 0.5]))
    found = drawn("sdpa", rate, key, z.b, z.h)
    assert found is not None
    seed, offsets = int(found.seed.ravel()[0]), np.asarray(found.offset)
    kept = numpy_kept(found.rate, seed, offsets, z.s, z.t)
    return Option(
        call=lambda x: {"dropout_rate": rate, "dropout_key": key},
        truth=lambda x: {"factors": kept / (1 - found.rate)},
    )


def _score_mod(rng: Rng, z: Sizes, alignment: str) -> Option:
    """Return a function of each score for `sdpa`, and of all of them for the truth."""
    rows, columns = np.arange(z.s)[:, None], np.arange(z.t)
    middle, distance = z.s - 1, columns - rows
    kinds: dict[str, Any] = {
        "softcap": (
            {"cap": (2,)},
            lambda x: score_mods.softcap(1 + x["cap"][0] ** 2),
            lambda x, v: (1 + x["cap"][0] ** 2) * jnp.tanh(v / (1 + x["cap"][0] ** 2)),
        ),
        "alibi": (
            {"slopes": (z.h,)},
            lambda x: score_mods.alibi(x["slopes"]),
            lambda x, v: v - x["slopes"][:, None, None] * np.abs(distance),
        ),
        "gated": (
            {"rows": (z.b, z.s), "slopes": (z.h,)},
            lambda x: (
                lambda v, b, h, i, j: v * x["slopes"][h] + jnp.tanh(v) * x["rows"][b, i]
            ),
            lambda x, v: (
                v * x["slopes"][:, None, None]
                + jnp.tanh(v) * x["rows"][:, None, :, None]
            ),
        ),
        "capped_table": (
            {"table": (z.s + z.t - 1, z.h)},
            lambda x: score_mods.compose(
                lambda v, b, h, i, j: v + x["table"][j - i + middle, h],
                score_mods.softcap(1.5),
            ),
            lambda x, v: (
                1.5
                * jnp.tanh(
                    (v + jnp.moveaxis(x["table"][distance + middle], 2, 0)) / 1.5
                )
            ),
        ),
        "by_xla": (
            {"columns": (z.t,)},
            lambda x: lambda v, b, h, i, j: jnp.logaddexp(v, x["columns"][j]),
            lambda x, v: jnp.logaddexp(v, jnp.broadcast_to(x["columns"], v.shape)),
        ),
    }
    arrays, one, all_of = kinds[str(rng.choice([*kinds]))]
    return Option(
        arrays={f"mod_{name}": shape for name, shape in arrays.items()},
        call=lambda x: {"score_mod": one({n: x[f"mod_{n}"] for n in arrays})},
        truth=lambda x: {
            "score_mod": functools.partial(all_of, {n: x[f"mod_{n}"] for n in arrays})
        },
    )


def _scale(rng: Rng, z: Sizes, alignment: str) -> Option:
    scale = float(rng.choice([-0.7, 0.4]))
    return Option(call=lambda x: {"scale": scale}, truth=lambda x: {"scale": scale})


def _deterministic(rng: Rng, z: Sizes, alignment: str) -> Option:
    plan = plans.PlanOptions(deterministic=True)
    return Option(call=lambda x: {"plan": plan})


OPTIONS: dict[str, Callable[[Rng, Sizes, str], Option]] = {
    each.__name__[1:]: each
    for each in (
        *(_bias, _additive, _causal, _window, _lengths, _where, _segments, _prefix),
        *(_blocks, _packed, _sinks, _dropout, _score_mod, _scale, _deterministic),
    )
}


def _places(z: Sizes, options: list[Option]) -> tuple[Places, Any]:
    """Return where scores are, and which of them are of one sequence."""
    b, h, i, j = np.ogrid[: z.b, : z.h, : z.s, : z.t]
    ends: list[Any] = [np.full(z.b, z.s), np.full(z.b, z.t)]
    ends = next((x.lengths for x in options if x.lengths is not None), ends)
    packed = next((x.sequences for x in options if x.sequences is not None), None)
    if packed is None:
        cache = (ends[1] - ends[0])[:, None, None, None]
        add = {"top-left": 0, "bottom-right": z.t - z.s, "cache": cache}
        return Places(b, h, i, j, i, j, add), True
    shape = (z.b, 1, z.s, z.t)
    same, row, column, end = (np.zeros(shape, int) for _ in range(4))
    (starts, counts), (key_starts, key_counts) = packed
    for n in range(starts.shape[1]):
        a, c = (x[:, n][b] for x in (starts, key_starts))
        # What is beyond the row's length belongs to no sequence.
        m = np.clip(ends[0][b] - a, 0, counts[:, n][b])
        w = np.clip(ends[1][b] - c, 0, key_counts[:, n][b])
        own = (i >= a) & (i < a + m) & (j >= c) & (j < c + w)
        for x, value in ((same, 1), (row, i - a), (column, j - c), (end, w - m)):
            x[...] = np.where(own, value, x)
    add = {"top-left": 0, "bottom-right": end, "cache": end}
    return Places(b, h, i, j, row, column, add), same > 0


def _joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arguments of all; biases add up."""
    biases = [x["bias"] for x in found if "bias" in x]
    joined = functools.reduce(operator.or_, found, {})
    return joined | ({"bias": sum(biases)} if biases else {})


_SIZES = st.builds(
    lambda odd, k: Sizes(*odd, k=k),
    st.permutations([3, 5, 7, 9, 11, 13]),
    st.sampled_from([1, 2]),
)
_NAMES = st.lists(st.sampled_from([*OPTIONS]), min_size=2, max_size=4, unique=True)
_NUMBERS = st.integers(0, 2**32)
_LAYOUTS = st.sampled_from(["bshd", "bhsd", "sbhd"])


def _draw(rng: Rng, z: Sizes, names: list[str]) -> list[Option]:
    """Return the options; bands beside packed sequences have one alignment."""
    alignment = str(rng.choice(_ALIGNMENTS))
    found = []
    for name in names:
        own = alignment if "packed" in names else str(rng.choice(_ALIGNMENTS))
        found.append(OPTIONS[name](rng, z, own))
    return found


def _call(options: list[Option], x: dict[str, Any], layout: str, **more: Any) -> Any:
    """Return the results of `sdpa`, the output as b s h e."""
    axes = ["bshd".index(letter) for letter in layout]
    operands = [jnp.transpose(x[name], axes) for name in ("query", "key", "value")]
    keywords = _joined([option.call(x) for option in options])
    given = [option.mask for option in options if option.mask is not None]
    given += [keywords.pop("added")] if "added" in keywords else []
    if "mask" in more:
        given.append(more.pop("mask"))
    if given:
        keywords["mask"] = functools.reduce(operator.and_, given)
    results = sdpa(*operands, layout=layout, **(keywords | more))  # type: ignore[arg-type]
    results = results if isinstance(results, tuple) else (results,)
    back = [layout.index(letter) for letter in "bshd"]
    return (jnp.transpose(results[0], back), *results[1:])


def _arrays(rng: Rng, z: Sizes, options: list[Option]) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "query": (z.b, z.s, z.h, z.d),
        "key": (z.b, z.t, z.k, z.d),
        "value": (z.b, z.t, z.k, z.e),
    }
    for option in options:
        shapes.update(option.arrays)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


@examples(15)
@given(
    number=_NUMBERS,
    z=_SIZES,
    names=_NAMES,
    layout=_LAYOUTS,
    with_lse=st.booleans(),
    with_max=st.booleans(),
)
def test_options_mean_together_what_each_means(
    number: int,
    z: Sizes,
    names: list[str],
    layout: str,
    with_lse: bool,
    with_max: bool,
) -> None:
    rng = np.random.default_rng(number)
    options = _draw(rng, z, names)
    arrays = _arrays(rng, z, options)
    places, same = _places(z, options)
    seen = functools.reduce(operator.and_, [x.seen(places) for x in options], same)
    seen = np.broadcast_to(seen, (z.b, z.h, z.s, z.t))
    is_asked = [True, with_lse, with_max]
    sizes = [(z.b, z.s, z.h, *more) for more in ((z.e,), (), ())]
    pulls = tuple(
        rng.standard_normal(x)
        for x, asked in zip(sizes, is_asked, strict=True)
        if asked
    )

    def call(x: dict[str, Any]) -> Any:
        asked = {"return_residual": with_lse, "return_max_logit": with_max}
        return _call(options, x, layout, **asked)

    def dense(x: dict[str, Any]) -> Any:
        operands = [x[name] for name in ("query", "key", "value")]
        keywords = _joined([option.truth(x) for option in options])
        found = dense_attention(*operands, seen=seen, with_max=True, **keywords)
        return tuple(x for x, asked in zip(found, is_asked, strict=True) if asked)

    got = with_gradients(call, arrays, pulls)
    want = with_gradients(dense, arrays, pulls)
    assert got[1].keys() == want[1].keys() == arrays.keys()
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, got, want)


def _no_step(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return jnp.log1p(jnp.abs(score))


# What is refused of any call: arguments, the error and what its message says. Arrays
# beside others like them are compared with these, or joined with them, first.
_REFUSED: dict[str, tuple[Callable[[Sizes], dict[str, Any]], type, str]] = {
    "a bias that does not fit": (
        lambda z: {"mask": masks.Additive(np.zeros((z.t, z.s)))},
        ValueError,
        r"sdpa: bias.* f64\[\d+,\d+,{t},{s}\].* not broadcast to",
    ),
    "a mask that does not fit": (
        lambda z: {"mask": masks.Where(np.ones((z.s, z.b), bool))},
        ValueError,
        r"sdpa: mask.* bool\[\d+,\d+,{s},{b}\].* not broadcast to",
    ),
    "lengths that do not fit": (
        lambda z: {"mask": masks.Lengths(key=np.ones(z.b + 1, int))},
        ValueError,
        r"sdpa: (key_value_seq_lengths.* i(32|64)\[{b1}\]|mask.* bool\[{b1},\d+,)",
    ),
    "segments that do not fit": (
        lambda z: {"mask": masks.Segments(np.ones(z.e + 99, int))},
        ValueError,
        r"Segments: query is i64\[{e99}\]. It must have one number per query",
    ),
    "unlike packed sequences": (
        lambda z: {"mask": masks.Packed(np.array([0, 1, 2]), np.array([0, 1]))},
        ValueError,
        "Packed: the queries have 2 sequences, but the keys 1.",
    ),
    "sinks that do not fit": (
        lambda z: {"sinks": np.zeros(z.h + 1)},
        ValueError,
        r"sdpa: sinks is f64\[{h1}\]\.",
    ),
    "dropout without a key": (
        lambda z: {"dropout_rate": 0.5, "dropout_key": None},
        ValueError,
        "sdpa: dropout_rate is 0.5 but dropout_key is None.",
    ),
    "a scale that is not finite": (
        lambda z: {"scale": float("inf")},
        ValueError,
        "sdpa: scale=inf is not finite",
    ),
    "a score_mod that no kernel has": (
        lambda z: {"score_mod": _no_step, "implementation": "cudnn"},
        UnsupportedError,
        "sdpa: score_mod _no_step cannot be part of a kernel: it uses 'log1p'",
    ),
}


@pytest.mark.parametrize("refused", _REFUSED)
@examples(3)
@given(number=_NUMBERS, z=_SIZES, names=_NAMES, layout=_LAYOUTS)
def test_what_is_refused_alone_is_refused_beside_other_options(
    refused: str, number: int, z: Sizes, names: list[str], layout: str
) -> None:
    make, error, message = _REFUSED[refused]
    rng = np.random.default_rng(number)
    # There is one Packed in a call at most.
    options = _draw(rng, z, [x for x in names if x != "packed"])
    arrays = _arrays(rng, z, options)
    more = {"h1": z.h + 1, "b1": z.b + 1, "e99": z.e + 99}
    text = message.format(**z._asdict(), **more)
    for some in ([], options):
        with pytest.raises(error, match=f"^{text}"):
            _call(some, arrays, layout, **make(z))
