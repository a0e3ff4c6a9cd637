# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions and their gradients in NumPy's float64, a step at a time."""

from typing import Any, NamedTuple

import numpy as np


class Truth(NamedTuple):
    """The result, and the gradients for a cotangent."""

    output: np.ndarray
    grad_x: np.ndarray
    grad_w: np.ndarray
    grad_bias: np.ndarray


def dense(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    cotangent: Any = None,
    activation: str | None = "silu",
    ids: Any = None,
) -> Truth:
    """Return them for x (b, s, c), w (K, c) and ids (b, s), with zeros in front of x.

    A product with a step of another document is never formed.
    """
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    taps, steps = w.shape[0], x.shape[1]
    bias = np.zeros(x.shape[2]) if bias is None else np.asarray(bias, np.float64)
    ids = np.zeros(x.shape[:2], np.int64) if ids is None else np.asarray(ids)
    sums = np.zeros(x.shape) + bias
    pairs = [
        (n, t, t - k, taps - 1 - k)
        for n in range(x.shape[0])
        for t in range(steps)
        for k in range(min(taps, t + 1))
        if ids[n, t - k] == ids[n, t]
    ]
    for n, t, source, tap in pairs:
        sums[n, t] += x[n, source] * w[tap]
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-sums))
    output, slope = sums, np.ones_like(sums)
    if activation is not None:
        output, slope = sums * sigmoid, sigmoid * (1 + sums * (1 - sigmoid))
    given = np.ones_like(sums) if cotangent is None else cotangent
    moved = np.asarray(given, np.float64) * slope
    grad_x, grad_w = np.zeros_like(x), np.zeros_like(w)
    for n, t, source, tap in pairs:
        grad_x[n, source] += moved[n, t] * w[tap]
        grad_w[tap] += moved[n, t] * x[n, source]
    return Truth(output, grad_x, grad_w, moved.sum((0, 1)))
