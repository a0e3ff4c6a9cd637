# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows in float64, group by group, in NumPy."""

from typing import Any, NamedTuple

import numpy as np


class Grouped(NamedTuple):
    """A grouped product with its bias, and the gradients for a cotangent."""

    output: np.ndarray
    rows: np.ndarray
    matrices: np.ndarray
    bias: np.ndarray


def grouped(
    rows: Any, matrices: Any, sizes: Any, bias: Any = None, cotangent: Any = None
) -> Grouped:
    """Return the product of (m, k) and (g, k, n); without a cotangent, gradients are 0.

    Rows beyond the last group are not read, nor are their cotangents.
    """
    rows, matrices = (np.asarray(x).astype(np.float64) for x in (rows, matrices))
    groups, _, columns = matrices.shape
    wide = np.zeros((groups, columns))
    if bias is not None:
        wide = np.asarray(bias).astype(np.float64)
    ct = np.zeros((len(rows), columns))
    if cotangent is not None:
        ct = np.asarray(cotangent).astype(np.float64)
    found = Grouped(
        np.zeros(ct.shape),
        np.zeros_like(rows),
        np.zeros_like(matrices),
        np.zeros((groups, columns)),
    )
    end = 0
    for group, size in enumerate(np.asarray(sizes)):
        part = slice(end, end := end + int(size))
        found.output[part] = rows[part] @ matrices[group] + wide[group]
        found.rows[part] = ct[part] @ matrices[group].T
        found.matrices[group] = rows[part].T @ ct[part]
        found.bias[group] = ct[part].sum(0)
    return found
