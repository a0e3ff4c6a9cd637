# SPDX-License-Identifier: Apache-2.0
"""Draws problems of attention over caches and pages, like random_attentions.py.

What a query sees is written from the docstring of `jax_cudnn.paged_sdpa`, and shares
nothing with the package. The answer and its bound are those of
tests/attention/shared/random_attentions.py, with what is seen as its mask.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import jax_cudnn
from jax_cudnn.kv_cache import update, update_pages
from tests.attention.shared import random_attentions
from tests.common.judged import Judged

Arrays = dict[str, Any]

# What a kernel for prompts meets past the lengths: it multiplies that by 0.
_POISON = 1e4


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call of `paged_sdpa`, or of `cached_sdpa` where ``page`` is 0.

    Attributes:
      t: the tokens that each sequence has room for, a multiple of ``page``.
      page: the tokens of a page.
      window: how many tokens before and after its own a query sees; None for all.
      with_query_lengths: whether some sequences have fewer than s queries, or none.
      with_update: whether the queries' own keys and values are written by
        `jax_cudnn.kv_cache` first, in the same program.
    """

    seed: int
    dtype: str
    b: int
    s: int
    t: int
    h: int
    k: int
    d: int
    e: int
    page: int
    scale: float | None
    is_causal: bool
    window: tuple[int, int] | None
    with_query_lengths: bool
    with_sinks: bool
    returns_lse: bool
    with_update: bool

    def __str__(self) -> str:
        """Return the sizes, and what differs from a plain call."""
        plain = {"page": 0, "scale": None, "window": None}
        shown = [
            f"{name}={value}"
            for name, value in dataclasses.asdict(self).items()
            if value is not False and (name not in plain or value != plain[name])
        ]
        return ", ".join(["decode", *shown])

    @property
    def may_hold_nan(self) -> bool:
        """Whether what lies past the lengths may be NaN (notes of `cached_sdpa`)."""
        if self.s == 1 or self.window is None:
            return True
        return self.is_causal and self.window[0] >= self.s


def draw_problem(
    seed: int, *, longest: int = 4096, most_scores: int = 2**25
) -> Problem:
    """Return the problem of a seed: at most `most_scores` scores in all,
    and twice as many numbers in the caches.
    """
    rng = np.random.default_rng([seed, 2])
    page = int(rng.choice([0, 1, 4, 16, 32, 64, 128]))
    t = int(np.exp(rng.uniform(0, np.log(longest + 0.99))))
    t = -(-t // max(page, 1)) * max(page, 1)
    s = 1 if rng.random() < 0.4 else int(rng.integers(2, 9))
    group = int(rng.choice([1, 2, 4, 5, 8, 16]))
    k = int(rng.integers(1, 5))
    d = int(rng.choice([8, 40, 64, 64, 80, 96, 128, 128, 128, 192, 256]))
    e = d if rng.random() < 0.8 else int(rng.choice([16, 64, 128]))
    if rng.random() < 0.08:  # multi-head latent attention
        d, e = (576, 512) if rng.random() < 0.5 else (192, 128)
    b = int(rng.integers(1, 33))
    # Neither scores nor caches are to fill the memory that processes share.
    most = (most_scores // (k * group * s * t), 2 * most_scores // (k * t * (d + e)))
    b = max(1, min(b, *most))
    window = (int(rng.integers(0, t + 1)), int(rng.integers(0, 5)))
    return Problem(
        seed=seed,
        dtype=str(rng.choice(["bfloat16", "float16"])),
        b=b,
        s=s,
        t=t,
        h=k * group,
        k=k,
        d=d,
        e=e,
        page=page,
        scale=None if rng.random() < 0.8 else float(rng.choice([0.3, -0.2, 0.0, 1.0])),
        is_causal=bool(rng.random() < 0.85),
        window=window if rng.random() < 0.25 else None,
        # More queries than there is room for are padding in part.
        with_query_lengths=bool(s > 1 and (rng.random() < 0.4 or s > t)),
        with_sinks=bool(rng.random() < 0.2),
        returns_lse=bool(rng.random() < 0.4),
        with_update=bool(s <= t and rng.random() < 0.3),
    )


def make_arrays(problem: Problem) -> Arrays:
    """Return the operands as NumPy arrays by name.

    `dense_key` and `dense_value` are for the answer: what each sequence holds in its
    order. Pages are in random order, with some of no sequence among them; numbers of
    pages past a length are junk.
    """
    p = problem
    rng = np.random.default_rng([p.seed, 3])
    dtype = np.dtype(getattr(ml_dtypes, p.dtype, p.dtype))

    def normal(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims, np.float32).astype(dtype)

    lengths = rng.integers(1, p.t + 1, p.b)
    lengths[rng.random(p.b) < 0.1] = p.t
    lengths[rng.random(p.b) < 0.1] = 0
    arrays: Arrays = {
        "query": normal(p.b, p.s, p.h, p.d),
        "lengths": lengths.astype(np.int32),
        "dense_key": normal(p.b, p.t, p.k, p.d),
        "dense_value": normal(p.b, p.t, p.k, p.e),
    }
    if p.with_query_lengths:
        counts = rng.integers(1, p.s + 1, p.b)
        counts[rng.random(p.b) < 0.1] = 0
        arrays["query_lengths"] = counts.astype(np.int32)
    if p.with_sinks:
        arrays["sinks"] = rng.standard_normal(p.h, np.float32)
    poison = np.nan if p.may_hold_nan else _POISON
    is_past = np.arange(p.t) >= lengths[:, None]
    for name in ("key", "value"):
        stored = arrays[f"dense_{name}"].copy()
        stored[is_past] = poison
        arrays[name] = stored
    if p.with_update:
        _take_out(p, arrays, poison)
    if p.page:
        _put_in_pages(p, rng, arrays, poison)
    return arrays


def _take_out(p: Problem, arrays: Arrays, poison: float) -> None:
    """Move the last s tokens of each sequence, or what it has, to new arrays.

    A sequence of fewer tokens than s writes all of its own, and junk that is past its
    length.
    """
    starts = np.maximum(arrays["lengths"] - p.s, 0)
    arrays["starts"] = starts.astype(np.int32)
    places = starts[:, None] + np.arange(p.s)
    rows = np.arange(p.b)[:, None]
    for name in ("key", "value"):
        arrays[f"new_{name}"] = arrays[name][rows, places]
        arrays[name][rows, places] = poison


def _put_in_pages(
    p: Problem, rng: np.random.Generator, arrays: Arrays, poison: float
) -> None:
    """Put keys and values into pages of all sequences."""
    each = p.t // p.page
    count = p.b * each + 3
    order = rng.permutation(count)[: p.b * each].reshape(p.b, each)
    for name in ("key", "value"):
        stored = arrays[name]
        pages = np.full((count, p.page, *stored.shape[2:]), poison, stored.dtype)
        pages[order] = stored.reshape(p.b, each, p.page, *stored.shape[2:])
        arrays[name] = pages
    is_used = np.arange(each) * p.page < arrays["lengths"][:, None]
    if p.with_update:
        # New tokens of a short sequence lie past its length, on pages that it owns.
        is_used[:, : -(-p.s // p.page)] = True
    junk = rng.choice([-1, count, 2**31 - 1, -(2**31)], order.shape)
    arrays["page_table"] = np.where(is_used, order, junk).astype(np.int32)


def call(
    problem: Problem, operands: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """Call the operation on operands by name; return its results by name."""
    p = problem
    key, value = operands["key"], operands["value"]
    if p.with_update:
        where = operands["starts"]
        if p.page:
            table = operands["page_table"]
            key = update_pages(key, operands["new_key"], table, where)
            value = update_pages(value, operands["new_value"], table, where)
        else:
            key = update(key, operands["new_key"], where)
            value = update(value, operands["new_value"], where)
    keyed = {
        "query_seq_lengths": operands.get("query_lengths"),
        "scale": p.scale,
        "is_causal": p.is_causal,
        "local_window_size": p.window,
        "sinks": operands.get("sinks"),
        **options,
    }
    query, lengths = operands["query"], operands["lengths"]
    if p.page:
        table = operands["page_table"]
        output, lse = jax_cudnn.paged_sdpa(
            query, key, value, table, lengths, return_residual=True, **keyed
        )
    else:
        output, lse = jax_cudnn.cached_sdpa(
            query, key, value, lengths, return_residual=True, **keyed
        )
    return {"output": output, "lse": lse} if p.returns_lse else {"output": output}


def is_seen(problem: Problem, arrays: Arrays) -> np.ndarray:
    """Return which tokens the queries see, (b, 1, s, t)."""
    p = problem
    row, token = np.arange(p.s)[:, None], np.arange(p.t)[None]
    length = arrays["lengths"][:, None, None, None].astype(int)
    count = arrays.get("query_lengths", np.full(p.b, p.s))[:, None, None, None]
    place = length - count + row
    seen = (row < count) & (token < length)
    if p.is_causal:
        seen = seen & (token <= place)
    if p.window is not None:
        left, right = p.window
        seen = seen & (token >= place - left) & (token <= place + right)
    return seen


def judge(
    problem: Problem, arrays: Arrays, *, with_gradients: bool = False
) -> dict[str, Judged]:
    """Return the results of a problem with their bounds, by name."""
    assert not with_gradients, "cuDNN has no gradient over caches and pages"
    p = problem
    masked = random_attentions.Problem(
        **{name: getattr(p, name) for name in ("seed", "dtype", *"bsthkde", "scale")},
        band="",
        window=(0, 0),
        bias=None,
        bias_dtype="same",
        mask="bst",
        form="",
        with_lengths=False,
        with_sinks=p.with_sinks,
        with_lse=p.returns_lse,
    )
    given = {
        "query": arrays["query"],
        "key": arrays["dense_key"],
        "value": arrays["dense_value"],
        "mask": is_seen(p, arrays),
        "sinks": arrays.get("sinks"),
    }
    judged = random_attentions.judge(masked, given, with_gradients=False)
    return {name: judged[name] for name in ("output", "lse")[: 1 + p.returns_lse]}
