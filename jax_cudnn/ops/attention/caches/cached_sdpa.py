# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.cached_sdpa`: attention over keys and values in a cache."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.caches.call import run_cached
from jax_cudnn.ops.attention.layouts import Layout
from jax_cudnn.ops.attention.options import CachedCall, CachedOptions
from jax_cudnn.ops.common.signatures import takes


@overload
def cached_sdpa(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    layout: Layout = ...,
    return_residual: Literal[False] = ...,
    **options: Unpack[CachedOptions],
) -> jax.Array: ...


@overload
def cached_sdpa(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    layout: Layout = ...,
    return_residual: Literal[True],
    **options: Unpack[CachedOptions],
) -> tuple[jax.Array, jax.Array]: ...


@takes(CachedCall, CachedOptions, is_causal=True)
def cached_sdpa(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    layout: Layout = "bshd",
    return_residual: bool = False,
    **options: Unpack[CachedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Return attention of the last tokens of sequences to a cache, for decoding.

    For each sequence and head,

    .. math::

        S_{st} = \mathrm{scale} \sum_d Q_{sd} K_{td}, \qquad
        O_{se} = \sum_t \frac{e^{S_{st}}}{\sum_{t'} e^{S_{st'}}} V_{te}

    where the sums over t include the tokens below the sequence's key length that query
    s may see. The queries are the last tokens of their sequence: query s is token
    ``x = key length - query length + s``. With `is_causal` it sees the tokens 0 to x.
    Scores, softmax and sums are kept in f32 (f64 for f64 operands). A query that sees
    no token, or is at or past its query length, gives 0 with gradient 0.

    A sequence may have more tokens than the cache has room for. A query that sees a
    token without room (each query sees itself) gives NaN, and NaN reaches the
    gradients. All other queries are correct.

    The key length counts the queries' own tokens: write their keys and values into the
    cache first (:func:`jax_cudnn.kv_cache.update`). Elements of the cache past that
    length are not used; see the notes for NaN there.

    This is :func:`jax_cudnn.sdpa` with ``mask=masks.Causal("cache")`` and the key
    lengths, but a few queries (drafted tokens) take about as long as one. To
    differentiate many queries, use `sdpa`, which has cuDNN's backward kernel.

    Axis letters: b sequences, s query length, t tokens that the cache has room for,
    h query heads, k key heads, d head size, e value head size.

    Args:
      query: (b, s, h, d); bf16, f16, f32 or f64. s is 1, or more with tokens that
        were drafted. h must be a multiple of k: each key head serves h/k consecutive
        query heads.
      key_cache: (b, t, k, d), of query's dtype.
      value_cache: (b, t, k, e), of query's dtype; e may differ from d.
      key_value_seq_lengths: integers (b,), the tokens of each sequence, those of the
        queries included, even if there is room for t tokens only. Lengths below 0
        count as 0.
      layout: the order of the axes of query, caches and output: "bshd" (default),
        "bhsd" or "sbhd", with s standing for tokens and h for heads: caches of "bhsd"
        are (b, k, t, d). Kernels read each without a copy; write such caches by
        ``update(..., layout="bhsd")``.
      **options: as in :class:`CachedCall`.
      return_residual: whether to return the log-sum-exp of the scores as well.
        Default False.

    Returns:
      (b, s, h, e), or as `layout` says, of query's dtype. With `return_residual`, a
      pair of this array and the log-sum-exp (natural logarithm), (b, s, h) in each
      layout, f32 (f64 for f64). The sinks are part of it. For queries that see no
      token, padding among them, it is the sink of the head, and -inf without sinks.

    Raises:
      ValueError: shapes that do not fit, more queries than there is room for, query
        heads that are not a multiple of the key heads, an unknown `implementation` or
        `layout`, a `scale` that is not finite,
        a window in which no query sees a token.
      TypeError: dtypes that are not supported or differ, lengths that are not integers,
        a `scale` that is not a Python number.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU), or symbolic dimensions, which cuDNN
        has no plan for (raised at once); operands whose types have shardings that
        contradict each other.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      cuDNN supports bf16 and f16, and head sizes that are multiples of 8. Two to 16
      queries run as query heads of one query, which read the cache once. Tokens that
      only some of them see are then added by the log-sum-exp, so the output is rounded
      twice. cuDNN's kernel for prompts runs more queries, several queries with a window
      of fewer tokens than queries, and one query without causality. This kernel
      multiplies elements past a length by 0 (9.19 on an H200), so NaN or infinities
      there reach the output. In all other calls they do not.

      All of JAX's transformations apply. XLA computes the derivatives.
      Examples of `jax.vmap` become more sequences of one call. Operands that are
      sharded over devices stay so along the sequences and the key heads. Lengths and
      sinks may be sharded in any way: they are resharded to match the others.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 2, 48, 2, 8))
      >>> q = jax.random.normal(jax.random.key(1), (2, 1, 4, 8))
      >>> jax_cudnn.cached_sdpa(q, k, v, jnp.array([20, 47])).shape
      (2, 1, 4, 8)
    """
    return run_cached(
        "cached_sdpa",
        query,
        {"key_cache": key_cache, "value_cache": value_cache},
        key_value_seq_lengths,
        CachedCall(**options),
        layout=layout,
        return_residual=return_residual,
    )
