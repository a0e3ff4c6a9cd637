# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.qkv_sdpa`: attention over queries, keys and values in one array."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.call import run_sdpa
from jax_cudnn.ops.attention.options import AttentionCall, SdpaOptions
from jax_cudnn.ops.attention.qkv import QkvLayout, check_qkv
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.common.arguments import as_operand
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.signatures import takes


@overload
def qkv_sdpa(
    qkv: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    layout: QkvLayout = ...,
    key_value_heads: int | None = ...,
    return_residual: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[SdpaOptions],
) -> jax.Array: ...


@overload
def qkv_sdpa(
    qkv: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    layout: QkvLayout = ...,
    key_value_heads: int | None = ...,
    return_residual: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[SdpaOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def qkv_sdpa(
    qkv: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    layout: QkvLayout = ...,
    key_value_heads: int | None = ...,
    return_residual: bool = ...,
    return_max_logit: Literal[True],
    **options: Unpack[SdpaOptions],
) -> tuple[jax.Array, ...]: ...


@takes(AttentionCall, SdpaOptions)
def qkv_sdpa(
    qkv: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    layout: QkvLayout = "bs3hd",
    key_value_heads: int | None = None,
    return_residual: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[SdpaOptions],
) -> jax.Array | tuple[jax.Array, ...]:
    r"""Return self-attention, from one array that contains q, k and v.

    For a fused projection, whose result has queries, keys and values in one array.
    cuDNN's kernels read all three from this array in place, and write their gradients
    into one array of the same shape, without slices, copies or concatenations. The
    result equals :func:`jax_cudnn.sdpa` of the three parts, with as many keys as
    queries, s = t.

    Axis letters: b batch, s length, h query heads, k key heads, d head size; 3 is an
    axis of size 3, for query, key and value in this order.

    Args:
      qkv: queries, keys and values, with the axes that `layout` says; bf16, f16, f32 or
        f64. Without a batch axis, b is left out.
      bias: as in :class:`AttentionCall`.
      mask: as in :class:`AttentionCall`.
      layout: the order of qkv's axes. "bs3hd" (default), "bsh3d", "sb3hd", "sbh3d" and
        "b3hsd" have as many key heads as query heads. "bshd", "sbhd" and "bhsd" have
        h + 2k heads side by side: those of queries, then of keys, then of values (GQA).
      key_value_heads: k, for the last three layouts; h must be a multiple of it.
        Default None: as many as query heads, a third of all.
      **options: as in :class:`AttentionCall`.
      return_residual: whether to return the log-sum-exp of the scores as well.
      return_max_logit: whether to return the largest score of each query as well.

    Returns:
      The output, in `layout` without its 3 and with h heads: (b, s, h, d) for "bs3hd".
      With `return_residual` or `return_max_logit`, a tuple of this array and what they
      ask for, (b, s, h) in each layout, as in :func:`jax_cudnn.sdpa`.

    Raises:
      ValueError: a `layout` that is unknown or does not fit the array, heads that do
        not fit `key_value_heads`, and what :func:`jax_cudnn.sdpa` refuses.
      TypeError: a `key_value_heads` that is not an int, and what
        :func:`jax_cudnn.sdpa` refuses.
      UnsupportedError: as :func:`jax_cudnn.sdpa` does.
      LibraryError: likewise.

    Notes:
      In these cases queries, keys and values are copied out of the array first: head
      sizes that are not multiples of 8, a scale that is not positive, packed sequences,
      the gradient of the log-sum-exp, a key count of 128 n + 64 in the gradient, or
      `score_mod` with steps of its own in the gradient where keys are padded.
      :func:`jax_cudnn.plans.inspect` says for each call whether it copies. The output
      is a new array.

      Over several devices, a layout with a 3 is divided along the batch and the heads.
      Heads side by side are not divided, since a part of them would mix queries with
      keys: use a layout with a 3, or three arrays.

      Megatron's layout for GQA, (k, h/k + 2, d), is not supported, because its query
      heads are not evenly spaced. Slice it, and pass the parts to
      :func:`jax_cudnn.sdpa`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> x = jax.random.normal(jax.random.key(0), (2, 5, 16))
      >>> w = jax.random.normal(jax.random.key(1), (16, 3, 4, 8))
      >>> qkv = jnp.einsum("bsm,mchd->bschd", x, w)
      >>> jax_cudnn.qkv_sdpa(qkv, is_causal=True).shape
      (2, 5, 4, 8)
    """
    given = AttentionCall(bias=bias, mask=mask, **options)
    call = given.options("qkv_sdpa")
    array = as_operand("qkv_sdpa", "qkv", qkv)
    parts = check_qkv("qkv_sdpa", array, layout, key_value_heads)
    with on_behalf_of("qkv_sdpa", "sdpa"):
        return run_sdpa(
            *parts.types(),
            given,
            call,
            parts.part_layout,
            return_residual=return_residual,
            return_max_logit=return_max_logit,
            qkv=parts,
        )
