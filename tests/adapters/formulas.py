# SPDX-License-Identifier: Apache-2.0
"""What other attention libraries document of their calls, as dense float64 formulas.

Nothing here knows jax_cudnn. Positions, masks and windows are written as each library
words them, in loops over queries and keys where that is the clearest.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
Seen = Callable[[int, int], bool]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    seen: Any = True,
    bias: Any = 0.0,
    scale: float | None = None,
    on_scores: Callable[[Array], Array] = lambda scores: scores,
    more: Any = 0.0,
    weights_only: bool = False,
) -> Array:
    """Return attention of (b, s, h, d), in which query heads share key heads in turn.

    ``seen`` is an array that broadcasts to (b, h, s, t), or a function of a query and
    a key. ``more`` is added to the sum by which a softmax divides.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = on_scores(scores) + np.asarray(bias, np.float64)
    if callable(seen):
        seen = table(seen, q.shape[1], k.shape[1])
    exponentials = np.where(np.asarray(seen), np.exp(scores), 0)
    sums = exponentials.sum(-1, keepdims=True) + np.asarray(more, np.float64)
    weights = exponentials / np.where(sums == 0, 1, sums)
    if weights_only:
        return weights
    return np.einsum("bhst,bthd->bshd", weights, v)


def log_sum_exp(q: Any, k: Any) -> Array:
    """Return the logarithm of each row's sum of exponentials, (b, h, s)."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    scores = np.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    return np.log(np.exp(scores).sum(-1))


def table(seen: Seen, s: int, t: int) -> Array:
    """Return whether each of s queries sees each of t keys."""
    return np.array([[seen(i, j) for j in range(t)] for i in range(s)])


def packed(q: Any, k: Any, v: Any, q_ends: Any, k_ends: Any, seen: Any) -> Array:
    """Return attention of sequences one after another in (tokens, h, d).

    ``seen`` is a function of a sequence's lengths that returns one of its positions.
    """
    found = np.zeros(q.shape, np.float64)
    for i, (start, end) in enumerate(itertools.pairwise(q_ends)):
        keys = slice(int(k_ends[i]), int(k_ends[i + 1]))
        s, t = int(end) - int(start), keys.stop - keys.start
        one = attention(
            q[None, start:end], k[None, keys], v[None, keys], seen=seen(s, t)
        )
        found[start:end] = one[0]
    return found
