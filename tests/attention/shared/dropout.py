# SPDX-License-Identifier: Apache-2.0
"""Dropout's numbers, and attention with a given mask of kept weights, in NumPy.

Written from the docstring of reference/attention/dropout.py, position by position;
shares no code with the package.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


def numpy_philox(counter: Any, key: tuple[int, int], rounds: int) -> np.ndarray:
    """Return the four words of Philox4x32, along the first axis."""
    mask, shift = np.uint64(2**32 - 1), np.uint64(32)
    c = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in counter))
    k0, k1 = (np.uint64(x) for x in key)
    for _ in range(rounds):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> shift) ^ c[1] ^ k0, p1 & mask, (p0 >> shift) ^ c[3] ^ k1, p0 & mask]
        k0 = (k0 + np.uint64(0x9E3779B9)) & mask
        k1 = (k1 + np.uint64(0xBB67AE85)) & mask
    return np.stack(c)


def numpy_numbers(seed: int, offset: int, s: int, t: int) -> np.ndarray:
    """Return the 16-bit numbers (s, t) of one batch entry and head."""
    rows, columns = np.arange(s)[:, None], np.arange(t)[None, :]
    lane = 4 * (columns % 8) + rows % 8 // 2
    tile = columns // 16 * -(-s // 16) + rows // 16
    key = (seed % 2**32, seed % 2**64 >> 32)
    words = numpy_philox(((offset + lane) // 4, 0, tile, 0), key, 7)
    which = np.broadcast_to(2 * (rows // 8 % 2) + columns // 8 % 2, (s, t))
    word = np.take_along_axis(words, which[None], 0)[0].astype(np.int64)
    return np.where(rows % 2, word >> 16, word & 0xFFFF)


def numpy_kept(
    rate: float, seed: int, offsets: np.ndarray, s: int, t: int
) -> np.ndarray:
    """Return, as bool (b, h, s, t), what a rate of a multiple of 2^-16 keeps."""
    b, h = offsets.shape[:2]
    numbers = [numpy_numbers(seed, int(x), s, t) for x in offsets.ravel()]
    return np.reshape(numbers, (b, h, s, t)) < round((1 - rate) * 2**16)


def dropped_attention(
    given: Mapping[str, Any], factors: np.ndarray, sees: np.ndarray, scale: float
) -> dict[str, np.ndarray]:
    """Return the results and gradients of attention, dense and in float64.

    Operands (b, s, h, d) by argument, with ``grad_output``; weights are multiplied by
    ``factors`` (b, h, s, t) after the softmax, and ``sees`` says which keys a query
    sees: each at least one.
    """
    query, key, value, pull = (
        np.swapaxes(np.asarray(given[name], np.float64), 1, 2)
        for name in ("query", "key", "value", "grad_output")
    )
    group = query.shape[1] // key.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (key, value))
    scores = scale * query @ np.swapaxes(keys, 2, 3)
    if "bias" in given:
        scores = scores + np.asarray(given["bias"], np.float64)
    scores = np.where(sees, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights, extra = np.exp(scores - top), 0.0
    if "sinks" in given:
        sinks = np.asarray(given["sinks"], np.float64).reshape(1, -1, 1, 1)
        extra = np.exp(sinks - top)
    total = weights.sum(-1, keepdims=True) + extra
    p = weights / total
    dropped = p * factors
    slopes = factors * (pull @ np.swapaxes(values, 2, 3))
    mean = (p * slopes).sum(-1, keepdims=True)
    slopes = p * (slopes - mean)

    def summed(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    found = {
        "output": dropped @ values,
        "query": scale * slopes @ keys,
        "key": scale * summed(np.swapaxes(slopes, 2, 3) @ query),
        "value": summed(np.swapaxes(dropped, 2, 3) @ pull),
    }
    found = {name: np.swapaxes(x, 1, 2) for name, x in found.items()}
    found["residual"] = np.swapaxes((top + np.log(total))[..., 0], 1, 2)
    if "bias" in given:
        shape = np.shape(given["bias"])
        axes = tuple(i for i, n in enumerate(shape) if n == 1)
        found["bias"] = slopes.sum(axes, keepdims=True)
    if "sinks" in given:
        found["sinks"] = -(extra / total * mean).sum((0, 2, 3))
    return found
