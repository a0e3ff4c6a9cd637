# SPDX-License-Identifier: Apache-2.0
"""Evaluates graphs by the reference, each as one program.

XLA compiles each operation that runs by itself: as one program, all of them together
take a fraction of that time.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_cudnn import reference
from jax_cudnn.legalize import Rewrite

evaluate = jax.jit(
    reference.evaluate,
    static_argnums=0,
    static_argnames=("narrow_sums", "precision", "exact_dtypes"),
)


def evaluate_legal(
    rewrite: Rewrite,
    operands: Sequence[jax.Array],
    kernel: Callable[[Sequence[jax.Array]], Any] | None = None,
) -> tuple[jax.Array, ...]:
    """Return what a rewritten graph gives, computed by the reference or a kernel."""
    kernel = kernel or functools.partial(evaluate, rewrite.graph)
    return jax.jit(functools.partial(rewrite.run, kernel))(operands)


@functools.partial(jax.jit, static_argnums=0)
def with_pullback(
    function: Callable[..., Any], operands: Sequence[Any], cotangents: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Return what a function gives, and the gradients of the operands."""
    results, pullback = jax.vjp(function, *operands)
    return results, pullback(cotangents)
