# SPDX-License-Identifier: Apache-2.0
"""Graphs of block-scaled matmuls, and the truth of MXFP8 and NVFP4 in float64 NumPy."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jax_cudnn.graph import DTypeName, Graph, Tensor, block_scaled_graph
from tests.products.shared.f8_dense import ROUNDS_TWICE

# The size of a block, and the dtypes of numbers and scales.
FORMATS: dict[str, tuple[int, DTypeName, DTypeName]] = {
    "MXFP8": (32, "f8_e4m3fn", "f8_e8m0fnu"),
    "NVFP4": (16, "f4_e2m1fn", "f8_e4m3fn"),
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def block_graph(
    name: str,
    m: int,
    n: int,
    blocks: int,
    *,
    dtype: DTypeName = "bf16",
    batch: int = 1,
    shared: Sequence[str] = (),
) -> Graph:
    """Return the graph of a product; the sides in `shared` have no batch."""
    size, numbers, scales = FORMATS[name]
    inputs: dict[str, Tensor] = {}
    for side, rows, order in (("a", m, (0, 1, 2)), ("b", n, (0, 2, 1))):
        kinds: dict[str, DTypeName] = {side: numbers, f"scale_{side}": scales}
        for role, kind in kinds.items():
            count = blocks * size if role == side else blocks
            stored = (1 if side in shared else batch, rows, count)
            dims = tuple(stored[axis] for axis in order)
            inputs[role] = Tensor(name=role, dtype=kind, dims=dims, order=order)
    if name == "NVFP4":
        inputs["scale_output"] = Tensor(
            name="scale_output", dtype="f32", dims=(batch, 1, 1), order=(0, 1, 2)
        )
    return block_scaled_graph(inputs, dtype)


def rounded(x: Any, name: str) -> np.ndarray:
    """Return what the copy of a matrix stands for, with blocks along its last axis."""
    x = np.asarray(x, np.float64)
    found = np.zeros_like(x)
    size = FORMATS[name][0]
    finite = np.where(np.isfinite(x), x, np.nan)
    starts = range(0, x.shape[1], size)
    largest = [
        np.abs(finite[i, j : j + size]).max() for i in range(x.shape[0]) for j in starts
    ]
    known = [each for each in largest if not np.isnan(each)]
    whole = np.float32(max(known, default=0)) * np.float32(1 / (448 * 6))
    for i in range(x.shape[0]):
        for j in starts:
            block = finite[i, j : j + size]
            amax = largest[i * len(starts) + j // size]
            if name == "MXFP8":
                found[i, j : j + size] = _mxfp8(block, amax)
            else:
                found[i, j : j + size] = _nvfp4(block, amax, whole)
    return found


def _mxfp8(block: np.ndarray, amax: float) -> np.ndarray:
    if np.isnan(amax):
        return np.full_like(block, np.nan)
    if amax == 0:
        return np.zeros_like(block)
    scale = 2.0 ** max(np.ceil(np.log2(amax / 448)), -126)
    return _e4m3(block / scale) * scale


def _nvfp4(block: np.ndarray, amax: float, whole: np.float32) -> np.ndarray:
    if np.isnan(amax):
        return np.full_like(block, np.nan)
    if amax == 0:
        return np.zeros_like(block)
    stored = np.float32(amax) * np.float32(1 / 6) * (np.float32(1) / whole)
    scale = np.float32(_e4m3(np.minimum(stored, 448))) * whole
    if scale == 0:
        return np.zeros_like(block)
    # The nearest of the numbers, and of two that are as near, the one of even code.
    apart = np.abs(np.abs(np.float32(block) * (np.float32(1) / scale))[:, None] - _E2M1)
    nearest = [
        min(np.flatnonzero(row == row.min()), key=lambda code: code % 2)
        for row in apart
    ]
    return np.sign(block) * _E2M1[nearest] * float(scale)


def _e4m3(x: Any) -> np.ndarray:
    """Round to f8_e4m3fn, as XLA does here."""
    narrow = np.asarray(x).astype(np.float16) if ROUNDS_TWICE else np.asarray(x)
    return narrow.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def truth(x: Any, w: Any, grad: Any, name: str) -> list[np.ndarray]:
    """Return the product of matrices and the gradients by both, of rounded operands."""
    x, w, grad = (np.asarray(each, np.float64) for each in (x, w, grad))

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Sum over the last axes of both, along which they are rounded."""
        return rounded(a, name) @ rounded(b, name).T

    return [product(x, w.T), product(grad, w), product(x.T, grad.T)]
