# SPDX-License-Identifier: Apache-2.0
"""Functions of attention's scores that are in common use, and their composition."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.score_mod import ScoreMod, heads_of_call
from jax_cudnn.ops.common.arguments import as_operand, describe

# Of the relative position key - query, an int32 scalar; returns a row of a table.
Bucket = Callable[[jax.Array], jax.Array]


def compose(*score_mods: ScoreMod) -> ScoreMod:
    """Return the score_mod that applies several, the first one first.

    Args:
      *score_mods: functions of (score, batch, head, query_index, key_index). Without
        any, the score stays as it is.

    Example:
      >>> from jax_cudnn import score_mods
      >>> capped = score_mods.compose(
      ...     score_mods.alibi(score_mods.alibi_slopes(4)), score_mods.softcap(30.0)
      ... )
    """

    def composed(
        score: jax.Array,
        batch: jax.Array,
        head: jax.Array,
        query_index: jax.Array,
        key_index: jax.Array,
    ) -> jax.Array:
        for each in score_mods:
            score = each(score, batch, head, query_index, key_index)
        return score

    return composed


def softcap(cap: float | jax.Array) -> ScoreMod:
    r"""Return a score_mod that keeps scores between -cap and cap.

    .. math::

        S' = \mathrm{cap} \tanh(S / \mathrm{cap})

    as in Gemma 2 (arXiv:2408.00118, section 2).

    Args:
      cap: a number above 0, or an array of one number.

    Raises:
      ValueError: a number that is not above 0 or not finite, an array of several.
    """
    if isinstance(cap, int | float) and not 0 < cap < math.inf:
        raise ValueError(
            f"softcap: cap={cap} is not above 0 and finite. Pass 30.0, say."
        )
    if np.ndim(cap):
        raise ValueError(
            f"softcap: cap is {describe(jnp.asarray(cap))}. It must be one number. For "
            "one a head, write a score_mod that reads caps[head]."
        )

    def capped(score: jax.Array, *_: jax.Array) -> jax.Array:
        number = jnp.asarray(cap, score.dtype)
        return number * jnp.tanh(score / number)

    return capped


def alibi(slopes: ArrayLike) -> ScoreMod:
    r"""Return a score_mod that lowers scores by the distance of query and key.

    .. math::

        S'_{st} = S_{st} - \mathrm{slopes}_h |s - t|

    as in ALiBi (arXiv:2108.12409), which attends causally; pass `is_causal=True` for
    that.

    Args:
      slopes: (h,), one for each query head; see :func:`alibi_slopes`.

    Raises:
      ValueError: slopes with other axes; in the call, another number of query heads.
    """
    array = as_operand("alibi", "slopes", slopes)
    if array.ndim != 1:
        raise ValueError(
            f"alibi: slopes is {describe(array)}. It must have one number per query "
            "head, shape [heads]."
        )

    def lowered(
        score: jax.Array,
        batch: jax.Array,
        head: jax.Array,
        query_index: jax.Array,
        key_index: jax.Array,
    ) -> jax.Array:
        del batch
        if (heads := heads_of_call()) not in (None, array.shape[0]):
            raise ValueError(
                f"alibi: slopes is {describe(array)}, and there are {heads} query "
                f"heads. Pass one slope for each, such as alibi_slopes({heads})."
            )
        distance = jnp.abs(query_index - key_index).astype(score.dtype)
        return score - array.astype(score.dtype)[head] * distance

    return lowered


def alibi_slopes(heads: int) -> jax.Array:
    """Return the slopes (heads,) of the ALiBi paper, f32.

    If `heads` is a power of two, slope i is 2^(-8 i / heads), counted from 1.
    Otherwise, with p the next smaller power of two, the slopes for p heads come first,
    and then every other slope for 2 p heads.

    Args:
      heads: how many query heads there are, at least 1.

    Raises:
      ValueError: `heads` below 1.
    """
    if heads < 1:
        raise ValueError(f"alibi_slopes: heads={heads} is below 1. Pass 1 or more.")
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    more = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return jnp.asarray([*first, *more][:heads], jnp.float32)


def relative_bias(table: ArrayLike, bucket: Bucket | None = None) -> ScoreMod:
    r"""Return a score_mod that adds a learned number for each relative position.

    .. math::

        S'_{st} = S_{st} + \mathrm{table}_{\mathrm{bucket}(t - s),\, h}

    Args:
      table: (n, h), floats; differentiable. With the dtype of the query, the kernel
        computes the gradient's sum; else XLA does.
      bucket: the row for a relative position key - query, an int32 scalar. Default
        None: row n // 2 is for distance 0, and positions beyond the ends of the table
        use its first or last row. :func:`t5_buckets` returns the function that T5 uses.

    Raises:
      ValueError: a table with other axes, or with another number of rows than
        `t5_buckets` has; in the call, another number of query heads.
    """
    array = as_operand("relative_bias", "table", table)
    if array.ndim != 2:
        raise ValueError(
            f"relative_bias: table is {describe(array)}. It must be (positions, heads)."
        )
    if isinstance(bucket, _T5Buckets) and array.shape[0] != bucket.count:
        raise ValueError(
            f"relative_bias: table is {describe(array)}, and there are {bucket.count} "
            f"buckets. It must be (buckets, heads), with {bucket.count} rows. "
            "Transpose it, or pass its number of rows to t5_buckets."
        )
    row = functools.partial(_centred, array.shape[0]) if bucket is None else bucket

    def biased(
        score: jax.Array,
        batch: jax.Array,
        head: jax.Array,
        query_index: jax.Array,
        key_index: jax.Array,
    ) -> jax.Array:
        del batch
        if (heads := heads_of_call()) not in (None, array.shape[1]):
            raise ValueError(
                f"relative_bias: table is {describe(array)}, and there are {heads} "
                f"query heads. It must be (positions, heads), with {heads} columns."
            )
        return score + array[row(key_index - query_index), head].astype(score.dtype)

    return biased


def _centred(count: int, position: jax.Array) -> jax.Array:
    return jnp.clip(position + count // 2, 0, count - 1)


def t5_buckets(
    count: int = 32, farthest: int = 128, *, bidirectional: bool = True
) -> Bucket:
    """Return T5's bucket of a relative position, for `relative_bias`.

    Half of the buckets are for single positions, and the others for ranges that grow
    with the distance up to `farthest` (arXiv:1910.10683, section 2.1).

    Args:
      count: how many buckets there are; the table has as many rows.
      farthest: the distance from which on all share a bucket.
      bidirectional: whether keys after the query have buckets of their own, as in
        encoders. If False, they share the bucket of distance 0, as in decoders.

    Raises:
      ValueError: no bucket is for a single position, or `farthest` is one of these.
    """
    return _T5Buckets(count, farthest, bidirectional)


@dataclass(frozen=True)
class _T5Buckets:
    count: int
    farthest: int
    bidirectional: bool

    def __post_init__(self) -> None:
        if self._exact < 1 or self.farthest <= self._exact:
            least = 4 if self.bidirectional else 2
            raise ValueError(
                f"t5_buckets: count={self.count} and farthest={self.farthest}. There "
                f"must be at least {least} buckets, and farthest must be more than "
                f"{max(self._exact, 1)}, the distances with a bucket of their own."
            )

    @property
    def _half(self) -> int:
        return self.count // 2 if self.bidirectional else self.count

    @property
    def _exact(self) -> int:
        return self._half // 2

    def __call__(self, position: jax.Array) -> jax.Array:
        half, exact, is_both = self._half, self._exact, self.bidirectional
        offset = jnp.where(position > 0, half, 0) if is_both else 0
        distance = jnp.abs(position) if is_both else jnp.maximum(-position, 0)
        ratio = jnp.maximum(distance, 1).astype(jnp.float32) / exact
        growth = jnp.log(ratio) / math.log(self.farthest / exact) * (half - exact)
        far = jnp.minimum(exact + growth.astype(jnp.int32), half - 1)
        return offset + jnp.where(distance < exact, distance, far)
