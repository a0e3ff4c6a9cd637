# SPDX-License-Identifier: Apache-2.0
"""Padding of windows over an array, of a convolution or of a pooling."""

from collections.abc import Sequence

import jax
import numpy as np


def cut(
    x: jax.Array, padding: Sequence[tuple[int, int]]
) -> tuple[jax.Array, list[tuple[int, int]]]:
    """Return an array without what negative padding cuts, and the padding left.

    JAX cannot differentiate windows with negative padding.
    """
    if all(low >= 0 and high >= 0 for low, high in padding):
        return x, list(padding)
    widths = [(min(low, 0), min(high, 0), 0) for low, high in padding]
    x = jax.lax.pad(x, np.zeros((), x.dtype), widths)
    return x, [(max(low, 0), max(high, 0)) for low, high in padding]
