# SPDX-License-Identifier: Apache-2.0
"""Results with bounds of a kernel's error, for problems that are drawn."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Judged:
    """A result in float64, and how far a kernel's may be from it, entry by entry."""

    value: Any
    bound: Any


def worst_ratio(got: Any, judged: Judged) -> float:
    """Return the largest error over its bound; infinity where only one is a number.

    NaN and infinities are right where the value has the same ones.
    """
    wide = np.asarray(jnp.asarray(got).astype(jnp.float32), np.float64)
    value = judged.value
    is_finite = np.isfinite(value)
    if wide.shape != value.shape or not np.array_equal(
        wide[~is_finite], value[~is_finite], equal_nan=True
    ):
        return np.inf
    error = np.abs(wide[is_finite] - value[is_finite])
    # The smallest normal number of a dtype bounds what is flushed to 0.
    bound = judged.bound[is_finite] + 2.0**-24
    if not np.isfinite(error).all():
        return np.inf
    return float(np.max(error / bound, initial=0.0))
