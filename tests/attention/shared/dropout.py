# SPDX-License-Identifier: Apache-2.0
"""Dropout's numbers in NumPy.

Written from the docstring of reference/attention/dropout.py, position by position;
shares no code with the package.
"""

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
