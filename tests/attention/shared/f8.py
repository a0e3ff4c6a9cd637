# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of f8 attention: NumPy's answer in float64, and what may differ.

Written from the formula in the docstring of `jax_cudnn.f8.sdpa`; ml_dtypes rounds.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
# The scale of exp(S - max) by dtype: the largest power of two.
_WEIGHT_SCALES = {np.dtype(E4M3): 2.0**8, np.dtype(E5M2): 2.0**15}


def wide(x: Any) -> np.ndarray:
    """Return any array in f32; NumPy has no f8 of its own."""
    return np.asarray(x).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """Relative error of rounding, its absolute error near 0, and the largest number."""

    unit: float
    tiny: float
    most: float

    @classmethod
    def of(cls, dtype: Any) -> "Dtype":
        info = ml_dtypes.finfo(dtype)
        return cls(
            unit=float(info.eps) / 2,
            tiny=float(info.smallest_subnormal) / 2,
            most=float(info.max),
        )


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return x as a dtype holds it, saturated, in float64."""
    most = float(ml_dtypes.finfo(dtype).max)
    # By way of f32, as ml_dtypes does from f64; a second rounding is rare.
    return np.clip(x, -most, most).astype(np.float32).astype(dtype).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Attention in float64; `error` bounds what rounding does to each output.

    ``kernel`` is the output with weights rounded to f8, before it is rounded itself.
    """

    output: np.ndarray
    kernel: np.ndarray
    lse: np.ndarray
    error: np.ndarray
    lse_error: np.ndarray


def dense(
    query: Any,
    key: Any,
    value: Any,
    *,
    scales: tuple[float, float, float],
    scale: float | None = None,
    seen: Any = True,
    sum_unit: float | None = None,
) -> Truth:
    """Return the truth for f8 operands (b, s, h, d), (b, t, k, d) and (b, t, k, e).

    ``seen`` broadcasts to (b, h, s, t). A sum of products has an error of ``sum_unit``
    times the sum of their sizes, by default that of f32 for each term. Scores that are
    off by x make weights that are off by exp(x) - 1.
    """
    dtype = np.asarray(query).dtype
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    groups = q.shape[2] // max(k.shape[2], 1)
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    q_scale, k_scale, v_scale = (float(np.float32(x)) for x in scales)
    factor = (q.shape[3] ** -0.5 if scale is None else scale) * q_scale * k_scale
    scores = np.einsum("bshd,bthd->bhst", q, k) * factor
    sizes = np.einsum("bshd,bthd->bhst", np.abs(q), np.abs(k)) * abs(factor)
    noise = sizes * (sum_unit or (q.shape[3] + 4) * 2.0**-24)
    seen = np.broadcast_to(seen, scores.shape)
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    is_dead = top == -np.inf
    weights = np.exp(scores - np.where(is_dead, 0, top))
    total = np.where(is_dead, 1, weights.sum(axis=-1, keepdims=True))
    lse = np.where(is_dead, -np.inf, np.where(is_dead, 0, top) + np.log(total))[..., 0]
    # The maximum is off as well.
    noise = np.expm1(2 * np.max(np.where(seen, noise, 0), axis=-1, initial=0))
    mixed = np.einsum("bhst,bthe->bshe", weights / total, v) * v_scale
    c = _WEIGHT_SCALES[np.dtype(dtype)]
    kernel = np.einsum("bhst,bthe->bshe", rounded(weights * c, dtype), v) * v_scale
    kernel = kernel / c / np.swapaxes(total, 1, 2)
    f8 = Dtype.of(dtype)
    spread = np.einsum("bhst,bthe->bshe", weights / total, np.abs(v)) * v_scale
    flat = np.einsum("bhst,bthe->bshe", seen / total, np.abs(v)) * v_scale
    terms = sum_unit or (v.shape[1] + 8) * 2.0**-24
    relative = f8.unit + terms + 3 * np.swapaxes(noise, 1, 2)[..., None]
    return Truth(
        output=mixed,
        kernel=kernel,
        lse=np.swapaxes(lse, 1, 2),
        error=relative * spread + f8.tiny / c * flat,
        lse_error=np.swapaxes(noise, 1, 2)
        + (v.shape[1] + 8) * 2.0**-24 * (1 + np.abs(np.swapaxes(top[..., 0], 1, 2))),
    )


def check(
    truth: Truth,
    output: Any,
    output_scale: float,
    *,
    lse: Any = None,
    amax: Any = None,
) -> None:
    """Raise AssertionError where results differ by more than rounding explains."""
    stored = np.asarray(output)
    most = np.inf
    error = truth.error
    if stored.dtype.itemsize == 1:
        f8 = Dtype.of(stored.dtype)
        most = f8.most * output_scale
        unit, tiny = f8.unit, f8.tiny * output_scale
    else:
        unit, tiny = float(ml_dtypes.finfo(stored.dtype).eps) / 2, 1e-7
    error = error * (1 + unit) + (unit + 2.0**-22) * np.abs(truth.output) + tiny
    found = stored.astype(np.float64) * output_scale
    gap = np.abs(found - np.clip(truth.output, -most, most))
    assert np.all(gap <= error), (gap.max(), np.max(gap / error))
    if lse is not None:
        found = np.asarray(lse, np.float64)
        is_dead = truth.lse == -np.inf
        np.testing.assert_array_equal(found == -np.inf, is_dead)
        with np.errstate(invalid="ignore"):
            gap = np.where(is_dead, 0, np.abs(found - truth.lse))
        bound = np.where(is_dead, 0, truth.lse_error)
        assert np.all(gap <= bound), (gap.max(), bound.max())
    if amax is not None:
        gap = abs(float(amax) - np.max(np.abs(truth.output), initial=0))
        assert gap <= np.max(truth.error, initial=0) * (1 + 2.0**-20)


def gradients(
    operands: Any, output: Any, grad_output: Any, grad_lse: Any, seen: np.ndarray
) -> list[np.ndarray]:
    """Return those of query, key and value, given the output that the kernel reads.

    dS = P (dO V^T - rowsum(O dO) + dL), as a gradient kernel has it.
    """
    q, k, v = (np.asarray(x, np.float64) for x in operands)
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    scale = q.shape[3] ** -0.5
    scores = np.where(seen, np.einsum("bshd,bthd->bhst", q, k) * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = weights / weights.sum(axis=-1, keepdims=True)
    o, do = (np.asarray(x, np.float64) for x in (output, grad_output))
    delta = np.einsum("bshe,bshe->bhs", o, do)
    delta = delta - np.swapaxes(np.asarray(grad_lse, np.float64), 1, 2)
    ds = p * (np.einsum("bshe,bthe->bhst", do, v) - delta[..., None])

    def of_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(axis=3)

    return [
        scale * np.einsum("bhst,bthd->bshd", ds, k),
        of_heads(scale * np.einsum("bhst,bshd->bthd", ds, q)),
        of_heads(np.einsum("bhst,bshe->bthe", p, do)),
    ]
