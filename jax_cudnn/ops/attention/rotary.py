# SPDX-License-Identifier: Apache-2.0
"""Rotates queries and keys by their positions (rotary position embedding, RoPE)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.graph.rules import broadcasts_to
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_dtype,
    check_flag,
    describe,
    in_front,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """The settings of a rotary embedding, for the attention layers of `jax_cudnn.flax`.

    Attributes:
      base: as in :func:`jax_cudnn.apply_rotary`, like the others.
      fraction: see there.
      interleaved: see there.
      frequencies: see there; kept as a tuple of floats.
    """

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    frequencies: Sequence[float] | None = None

    def __post_init__(self) -> None:
        _check_settings("Rotary", self.base, self.fraction, self.interleaved)
        if self.frequencies is not None:
            given = np.asarray(self.frequencies, np.float64)
            _check_rank("Rotary", given)
            object.__setattr__(self, "frequencies", tuple(given.tolist()))

    def __call__(self, x: ArrayLike, positions: ArrayLike) -> jax.Array:
        """Return :func:`jax_cudnn.apply_rotary` of these settings."""
        return apply_rotary(
            x,
            positions,
            base=self.base,
            fraction=self.fraction,
            interleaved=self.interleaved,
            frequencies=self.frequencies,
        )


def apply_rotary(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
    frequencies: ArrayLike | Sequence[float] | None = None,
) -> jax.Array:
    r"""Return queries or keys with a rotary position embedding.

    Of the d features of a head, the first r = d * fraction (rounded down) are r / 2
    pairs (a, b). A token at position p turns pair i by an angle:

    .. math::

        a' + \mathrm{i} b' = (a + \mathrm{i} b)\, e^{\mathrm{i} p \omega_i}, \qquad
        \omega_i = \mathrm{base}^{-2 i / r}

    The other features do not change. So the product of a query and a key depends on
    the difference of their positions only (Su et al., arXiv:2104.09864). Angles, sines
    and products are f32 (f64 for f64); the result is rounded once.

    Axis letters: ... any number of batch axes, s length, h heads, d head size.

    Args:
      x: (..., s, h, d); bf16, f16, f32 or f64. Differentiable.
      positions: integers or floats (s,), or of any shape that broadcasts to (..., s);
        missing axes are inserted in front. Divide them by a factor for linear scaling.
      base: the base of the frequencies, a number above 0. Default 10,000, as in the
        paper, GPT-NeoX and Llama 2; 500,000 in Llama 3, 1,000,000 in Qwen 2.
      fraction: which part of the features is rotated, above 0 and up to 1. Default 1:
        all. 0.25 in GPT-NeoX and Pythia, 0.5 in Phi-1 and GLM.
      interleaved: which features are a pair. False (default): features i and i + r/2,
        the two halves of the head. So it is in GPT-NeoX, and for Llama, Mistral, Qwen,
        Gemma and Phi in Hugging Face's checkpoints, and in Flax's `nnx.RoPE`. True:
        features 2i and 2i + 1. So it is in the paper, GPT-J, CodeGen and Cohere's
        models, and in Meta's own checkpoints of Llama.
      frequencies: (r/2,), the frequencies in radians per position, for models that
        scale them (Llama 3.1, YaRN). Default None: those above.

    Returns:
      (..., s, h, d), of the dtype of `x`.

    Raises:
      ValueError: `x` of fewer than three axes; `positions` or `frequencies` that do not
        fit; a number r of rotated features that is odd or 0; a `base` or `fraction` out
        of its range.
      TypeError: `x` of another dtype; `positions` that are neither integers nor floats;
        a `base` or `fraction` that is not a Python number.

    Notes:
      At positions around 100,000, f32 angles of the highest frequencies have errors of
      about 0.01. This holds for every implementation with f32 angles.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_cudnn import apply_rotary
      >>> query = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))
      >>> apply_rotary(query, jnp.arange(5), base=500_000.0).shape
      (2, 5, 4, 8)
    """
    x = as_operand("apply_rotary", "x", x)
    check_dtype("apply_rotary", "x", x)
    if x.ndim < 3:
        raise ValueError(
            f"apply_rotary: x is {describe(x)}. It must be (batch axes, length, heads, "
            "head size). For a single head insert its axis: x[:, None, :]."
        )
    _check_settings("apply_rotary", base, fraction, interleaved)
    d = x.shape[-1]
    rotated = _rotated(d, fraction)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    omega = _frequencies(base, rotated, frequencies, wide)
    # One angle for all heads.
    places = _positions(positions, x, wide)[..., None, None]
    angles = places * jnp.reshape(omega, in_front(omega.shape, x.ndim))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = _pairs(x[..., :rotated].astype(wide), interleaved)
    turned = _join(a * cos - b * sin, b * cos + a * sin, interleaved)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rotated:]], axis=-1)


def _pairs(x: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join(a: jax.Array, b: jax.Array, interleaved: bool) -> jax.Array:
    if not interleaved:
        return jnp.concatenate([a, b], axis=-1)
    return jnp.reshape(jnp.stack([a, b], axis=-1), (*a.shape[:-1], 2 * a.shape[-1]))


def _check_settings(op: str, base: float, fraction: float, interleaved: bool) -> None:
    for name, value in (("base", base), ("fraction", fraction)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                f"{op}: {name} is {value!r}. It must be a number known when the "
                "program is traced. Pass traced frequencies as `frequencies`."
            )
    if not (math.isfinite(base) and base > 0):
        raise ValueError(f"{op}: base={base}. It must be a finite number above 0.")
    if not 0 < fraction <= 1:
        raise ValueError(
            f"{op}: fraction={fraction}. It must be above 0 and at most 1: the part of "
            "the features that is rotated. Without rotation, leave the embedding out."
        )
    check_flag(op, "interleaved", interleaved)


def _rotated(d: int, fraction: float) -> int:
    rotated = int(d * fraction)
    if rotated == 0 or rotated % 2:
        raise ValueError(
            f"apply_rotary: {rotated} of {d} features are to be rotated "
            f"(fraction={fraction}). They are rotated in pairs, so their number must "
            "be even and not 0. Change the head size or the fraction."
        )
    return rotated


def _check_rank(op: str, frequencies: np.ndarray | jax.Array) -> None:
    if frequencies.ndim != 1:
        raise ValueError(
            f"{op}: frequencies have shape {list(frequencies.shape)}. Pass one number "
            "for each pair of rotated features."
        )


def _frequencies(
    base: float,
    rotated: int,
    given: ArrayLike | Sequence[float] | None,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    if given is None:
        exponents = np.arange(0, rotated, 2, dtype=np.float64) / rotated
        return jnp.asarray(float(base) ** -exponents, dtype)
    array = jnp.asarray(given)
    _check_rank("apply_rotary", array)
    if array.shape != (rotated // 2,):
        raise ValueError(
            f"apply_rotary: {array.shape[0]} frequencies were passed, and {rotated} "
            f"features are to be rotated. Pass {rotated // 2}, one for each pair."
        )
    return array.astype(dtype)


def _positions(
    positions: ArrayLike, x: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    array = as_operand("apply_rotary", "positions", positions)
    if not (
        jnp.issubdtype(array.dtype, jnp.integer)
        or jnp.issubdtype(array.dtype, jnp.floating)
    ):
        raise TypeError(
            f"apply_rotary: positions is {describe(array)}. They must be integers or "
            "floats. Convert them to int32."
        )
    full = x.shape[:-2]
    shape = in_front(array.shape, len(full))
    if not array.ndim or not broadcasts_to(shape, full):
        raise ValueError(
            f"apply_rotary: positions is {describe(array)}, which does not broadcast "
            f"to (batch axes, length) = {list(full)}. Each of its axes must be 1 or "
            "the full size. Insert, expand or slice axes."
        )
    return jnp.reshape(array, shape).astype(dtype)
