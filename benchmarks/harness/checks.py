# SPDX-License-Identifier: Apache-2.0
"""Compares contenders' results, and says why one has none."""

import traceback
from collections.abc import Callable, Sequence
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


def compared(
    found: tuple[Sequence[Any], Sequence[Any]],
    want: tuple[Sequence[Any], Sequence[Any]],
    bounds: tuple[float, float],
) -> list[float]:
    """Return the largest relative errors of results and of gradients, if there are.

    Raises:
      WrongError: one of them exceeds its bound.
    """
    errors: list[float] = []
    for what, arrays, truth, bound in zip(
        ("results", "gradients"), found, want, bounds, strict=True
    ):
        if not arrays:
            continue
        each = [float(x) for x in relative_errors(arrays, truth)]
        # Written so that a NaN fails.
        if not all(error <= bound for error in each):
            told = ", ".join(f"{error:.1e}" for error in each)
            raise WrongError(f"{what} are wrong by {told}, which exceeds {bound}")
        errors.append(float(f"{max(each):.2e}"))
    return errors


def attempt(name: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return what is made, or in words why it cannot be."""
    try:
        return make(*arguments)
    except Exception as error:
        traceback.print_exception(error, limit=-3)
        told = reason(error)
        print(f"  {name} failed: {told}", flush=True)
        return told


def reason(error: BaseException) -> str:
    """Return what went wrong, in a line."""
    parts = [error]
    if isinstance(error, BaseExceptionGroup):
        parts += error.exceptions
    lines = (f"{type(x).__name__}: {x}".strip().splitlines()[0] for x in parts)
    return "; ".join(lines)[:300]
