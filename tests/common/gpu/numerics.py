# SPDX-License-Identifier: Apache-2.0
"""Judges GPU results by their error, relative to the same dtype's in XLA.

`truth` is the reference on the operands converted to f32, with exact f32 products.
`reference` is the same formula in the operands' own dtype (implementation="xla").
A result passes if its error is at most ``BOUND`` times the reference's error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BOUND = 2.0
# The largest single error is a noisier figure than the norm of all: with millions of
# elements, two roundings that add up against one give a factor of 2 by themselves.
MAX_BOUND = 4.0
# Operands are standard normal, so what is summed has size 1 to 10, and f32 sums of it
# carry about 1e-6. Where the truth is 0 by cancellation, that is all there is to see.
FLOOR = 1e-5


def to_f32(x: Any) -> Any:
    """Convert 16-bit float arrays to f32 and leave the rest alone."""
    if x is None or not jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating):
        return x
    return jnp.asarray(x, jnp.float32)


def sinks_noise(sinks: Any, lse: Any, output: Any, cotangent: Any) -> np.ndarray:
    """Return how far off a kernel's gradient of the sinks may be, for each head.

    It is a sum of products with the output, (b, s, h, e), which is made of rounded
    weights and rounded twice. These errors add up like random steps: five deviations.
    """
    wide = [np.asarray(x, np.float64) for x in (sinks, lse, output, cotangent)]
    sinks, lse, output, cotangent = wide
    terms = np.exp(sinks - lse)[..., None] * output * cotangent
    return 2.0**-6 * np.sqrt(np.sum(terms**2, (0, 1, 3)))


def judge(
    names: Sequence[str],
    results: Sequence[jax.Array],
    references: Sequence[jax.Array],
    truths: Sequence[Any],
    noises: Sequence[Any] | None = None,
) -> Mapping[str, float]:
    """Assert the bounds for each named result; return the error ratios.

    ``noises`` are errors, an array or 0 for each result, that are granted in any case:
    a sum of a few numbers has an error that says little, and that can be 0 by luck.
    """
    ratios: dict[str, float] = {}
    for name, x, reference, truth, noise in zip(
        names, results, references, truths, noises or [0.0] * len(names), strict=True
    ):
        # A reference can be exact by luck (one key, say): half an ulp of the result's
        # dtype is granted to everyone.
        unit = float(jnp.finfo(x.dtype).eps) / 2
        error, allowed = _norm_error(x, truth), _norm_error(reference, truth)
        allowed = max(allowed, unit * _norm(truth), FLOOR * truth.size**0.5)
        allowed = max(allowed, float(np.linalg.norm(noise)))
        ratios[name] = error / allowed
        assert error <= BOUND * allowed, (
            f"{name}: error {error:.3e} exceeds {BOUND} x {allowed:.3e}"
        )
        error, allowed = _largest_error(x, truth), _largest_error(reference, truth)
        allowed = max(allowed, unit * _largest(truth), FLOOR)
        allowed = max(allowed, float(np.max(noise, initial=0.0)))
        assert error <= MAX_BOUND * allowed, (
            f"{name}: largest error {error:.3e} exceeds {MAX_BOUND} x {allowed:.3e}"
        )
    return ratios


def worse(references: Sequence[Any], truth: Any) -> Any:
    """Return the reference with the larger error in norm."""
    return max(references, key=lambda reference: _norm_error(reference, truth))


def _finite(x: jax.Array, truth: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return both as float64 where truth is finite; elsewhere they must be equal."""
    x64, truth64 = np.asarray(x, np.float64), np.asarray(truth, np.float64)
    finite = np.isfinite(truth64)
    np.testing.assert_array_equal(np.isfinite(x64), finite)
    np.testing.assert_array_equal(x64[~finite], truth64[~finite])
    return x64[finite], truth64[finite]


def _norm_error(x: jax.Array, truth: jax.Array) -> float:
    x64, truth64 = _finite(x, truth)
    return float(np.linalg.norm(x64 - truth64))


def _largest_error(x: jax.Array, truth: jax.Array) -> float:
    x64, truth64 = _finite(x, truth)
    return float(np.max(np.abs(x64 - truth64), initial=0.0))


def _norm(truth: jax.Array) -> float:
    return float(np.linalg.norm(_finite(truth, truth)[1]))


def _largest(truth: jax.Array) -> float:
    return float(np.max(np.abs(_finite(truth, truth)[1]), initial=0.0))
