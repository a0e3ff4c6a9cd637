# SPDX-License-Identifier: Apache-2.0
"""Evaluates a graph by the reference as one program.

XLA compiles each operation that runs by itself: together, they take a fraction of that.
"""

import jax

from jax_cudnn import reference

evaluate = jax.jit(
    reference.evaluate,
    static_argnums=0,
    static_argnames=("narrow_sums", "precision", "exact_dtypes"),
)
