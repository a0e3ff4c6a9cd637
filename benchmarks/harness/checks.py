# SPDX-License-Identifier: Apache-2.0
"""Compares contenders' results, before or beside their times."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class WrongError(AssertionError):
    """A contender's results differ from the others' by more than rounding."""


@jax.jit
def relative_errors(found: Sequence[Any], truth: Sequence[Any]) -> list[jax.Array]:
    """Return the norms of differences, relative to the norms of the truth."""

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(x**2))

    wide = [
        (x.astype(jnp.float32), y.astype(jnp.float32))
        for x, y in zip(found, truth, strict=True)
    ]
    return [norm(x - y) / jnp.maximum(norm(y), 1e-30) for x, y in wide]


def check(errors: Sequence[float], first: float, others: float, told: str = "") -> None:
    """Raise if the result, or a gradient after it, is wrong by more than a bound."""
    bounds = [first, *[others] * (len(errors) - 1)]
    # Written so that a NaN fails.
    if not all(e <= bound for e, bound in zip(errors, bounds, strict=True)):
        raise WrongError(f"{told}relative errors {errors} exceed {bounds}")
