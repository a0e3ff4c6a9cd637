# SPDX-License-Identifier: Apache-2.0
"""Pooling by its definition, dense and in float64, one window at a time, in NumPy."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Pairs = Sequence[tuple[int, int]]


class Pooled(NamedTuple):
    """Results of an array (*N, *y, C), and the gradient of x for a cotangent."""

    output: np.ndarray
    grad: np.ndarray
    indices: np.ndarray


def pads_of(padding: Any, space: Sequence[int], window: Any, strides: Any) -> Pairs:
    """Return a padding's pairs; "SAME" as TensorFlow and XLA define it."""
    if padding == "VALID":
        return [(0, 0)] * len(space)
    if padding not in ("SAME", "SAME_LOWER"):
        return padding
    pairs: list[tuple[int, int]] = []
    for size, f, stride in zip(space, window, strides, strict=True):
        total = max((-(-size // stride) - 1) * stride + f - size, 0)
        small, large = total // 2, total - total // 2
        pairs.append((small, large) if padding == "SAME" else (large, small))
    return pairs


def _windows(
    space: Sequence[int], window: Any, strides: Any, pads: Pairs
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """Yield each window's place and the positions that it sees."""
    starts: list[range] = []
    for size, f, stride, (low, high) in zip(space, window, strides, pads, strict=True):
        starts.append(range(-low, size + high - f + 1, stride))
    for place in itertools.product(*(range(len(each)) for each in starts)):
        first = [each[i] for each, i in zip(starts, place, strict=True)]
        cut = [
            (-min(low, 0), size + min(high, 0))
            for size, (low, high) in zip(space, pads, strict=True)
        ]
        seen = itertools.product(
            *(
                range(max(i, a), min(i + f, b))
                for i, f, (a, b) in zip(first, window, cut, strict=True)
            )
        )
        yield place, list(seen)


def pooled(
    x: Any,
    kind: str,
    window: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    *,
    cotangent: Any = None,
) -> Pooled:
    """Return a pooling of (*N, *y, C); `kind` is "max", "avg" or "avg_exclude"."""
    x = np.asarray(x, np.float64)
    rank = len(window)
    strides = strides or (1,) * rank
    space = x.shape[x.ndim - 1 - rank : -1]
    pads = pads_of(padding, space, window, strides)
    flat = x.reshape(-1, *space, x.shape[-1])
    places = dict(_windows(space, window, strides, pads))
    counts = [
        max(place[i] for place in places) + 1 if places else 0 for i in range(rank)
    ]
    output = np.empty((flat.shape[0], *counts, flat.shape[-1]))
    indices = np.full(output.shape, -1)
    grad = np.zeros(flat.shape)
    given = np.zeros(output.shape)
    if cotangent is not None:
        given = np.asarray(cotangent, np.float64).reshape(output.shape)
    for n, c in itertools.product(range(flat.shape[0]), range(flat.shape[-1])):
        for place, seen in places.items():
            at = (n, *place, c)
            values = [flat[(n, *y, c)] for y in seen]
            if kind == "max":
                output[at] = max(values, default=-np.inf)
                nans = [i for i, value in enumerate(values) if np.isnan(value)]
                if nans:
                    output[at] = np.nan
                if seen:
                    best = nans[0] if nans else values.index(output[at])
                    indices[at] = np.ravel_multi_index(seen[best], space)
                    grad[(n, *seen[best], c)] += given[at]
                continue
            count = len(seen) if kind == "avg_exclude" else int(np.prod(window))
            output[at] = sum(values) / count if count else np.nan
            for y in seen:
                grad[(n, *y, c)] += given[at] / count
    shape = (*x.shape[: x.ndim - 1 - rank], *counts, x.shape[-1])
    return Pooled(output.reshape(shape), grad.reshape(x.shape), indices.reshape(shape))
