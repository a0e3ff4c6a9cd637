# SPDX-License-Identifier: Apache-2.0
"""Random arrays that NumPy draws, the same ones in every run.

XLA compiles `jax.random` for each shape, which takes longer than most tests.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def normal(
    seed: int,
    shape: Sequence[int],
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    size: float = 1.0,
) -> jax.Array:
    """Return normal numbers with a standard deviation."""
    numbers = np.random.default_rng(seed).standard_normal(tuple(shape))
    return jnp.asarray((size * numbers).astype(dtype))
