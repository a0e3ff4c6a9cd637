# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.paged_sdpa`: attention over keys and values in pages."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.caches.call import run_cached
from jax_cudnn.ops.attention.layouts import PageLayout
from jax_cudnn.ops.attention.options import CachedCall, CachedOptions
from jax_cudnn.ops.common.signatures import takes


@overload
def paged_sdpa(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    layout: PageLayout = ...,
    return_residual: Literal[False] = ...,
    **options: Unpack[CachedOptions],
) -> jax.Array: ...


@overload
def paged_sdpa(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    layout: PageLayout = ...,
    return_residual: Literal[True],
    **options: Unpack[CachedOptions],
) -> tuple[jax.Array, jax.Array]: ...


@takes(CachedCall, CachedOptions, is_causal=True)
def paged_sdpa(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    *,
    layout: PageLayout = "bshd",
    return_residual: bool = False,
    **options: Unpack[CachedOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Return attention to keys and values in pages, for serving.

    Token j of sequence b is in slot ``j % i`` of page ``page_table[b, j // i]``, for
    pages of i tokens. Let :math:`K_{bj}` and :math:`V_{bj}` be its key and value. For
    each sequence and head, the result is that of :func:`jax_cudnn.sdpa`:

    .. math::

        S_{sj} = \mathrm{scale} \sum_d Q_{sd} K_{jd}, \qquad
        O_{se} = \sum_j \frac{e^{S_{sj}}}{\sum_{j'} e^{S_{sj'}}} V_{je}

    where the sums over j include the tokens below the sequence's key length that query
    s may see. The queries are the last tokens of their sequence: query s is token
    ``x = key length - query length + s``. With `is_causal` it sees the tokens 0 to x.
    Scores, softmax and sums are kept in f32 (f64 for f64 operands); the result is
    rounded once. A query that sees no token, or is at or past its query length,
    gives 0 with gradient 0.

    A sequence may have more tokens than its pages have room for. A query that sees a
    token without room (each query sees itself) gives NaN, and NaN reaches the
    gradients. All other queries are correct.

    The key length counts the queries' own tokens: write their keys and values into the
    pages first (:func:`jax_cudnn.kv_cache.update_pages`).

    Axis letters: b sequences, s query length, h query heads, k key heads, d head size,
    e value head size, p pages, i tokens of a page, m pages of a sequence at most.

    Args:
      query: (b, s, h, d); bf16, f16, f32 or f64. s is 1, or more with tokens that
        were drafted. h must be a multiple of k: each key head serves h/k consecutive
        query heads.
      key_pages: (p, i, k, d), of query's dtype.
      value_pages: (p, i, k, e), of query's dtype; e may differ from d.
      page_table: integers (b, m), the pages of each sequence in their order. Entries
        past a sequence's length are not used and may be any number, such as -1. A
        number below the length that is not a page counts as the nearest page.
      key_value_seq_lengths: integers (b,), the tokens of each sequence, those of the
        queries included, even if there is room for m*i tokens only. Lengths below 0
        count as 0.
      layout: the order of the axes of query, pages and output: "bshd" (default), or
        "bhsd" for queries (b, h, s, d), pages (p, k, i, d). Kernels read both without
        a copy; with "bhsd" write pages by ``update_pages(..., layout="bhsd")``.
      **options: as in :class:`CachedCall`.
      return_residual: whether to return the log-sum-exp of the scores as well.
        Default False.

    Returns:
      (b, s, h, e), or as `layout` says, of query's dtype. With `return_residual`, a
      pair of this array and the log-sum-exp (natural logarithm), (b, s, h) in each
      layout, f32 (f64 for f64). The sinks are part of it. For queries that see no
      token, padding among them, it is the sink of the head, and -inf without sinks.

    Raises:
      ValueError: shapes that do not fit, more queries than there is room for, pages
        without tokens or no page at all, query heads that are not a multiple of the key
        heads, an unknown `implementation` or `layout`, a `scale` that is not finite,
        a window in which no query sees a token.
      TypeError: dtypes that are not supported or differ, page numbers or lengths that
        are not integers, a `scale` that is not a Python number.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU), or symbolic dimensions, which cuDNN
        has no plan for (raised at once); operands whose types have shardings that
        contradict each other.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      cuDNN reads the pages in place. It supports bf16 and f16, pages whose number of
      tokens is a power of two, and head sizes that are multiples of 8, from cuDNN 9.5
      on (NVIDIA cuDNN frontend, "Attention", paged attention). XLA gathers the pages of
      all sequences first, in memory for b*m*i tokens, and keeps the scores, b*h*s*m*i
      numbers of f32. The notes of :func:`jax_cudnn.cached_sdpa` about several queries
      and about NaN past a length apply here, too.

      All of JAX's transformations apply. cuDNN has no backward kernel for pages, so XLA
      computes the derivatives. The gradient of the pages is as large as
      all pages. Under `jax.vmap`, examples that share the pages become more sequences
      of one call; examples with pages of their own run XLA's code, or one after the
      other with `implementation="cudnn"`.

      Operands that are sharded over devices stay so along the sequences and the key
      heads; pages are gathered otherwise. Lengths, page numbers and sinks may be
      sharded in any way: they are resharded to match the others. For pages that are
      spread over devices with their sequences, use `jax.shard_map`.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 9, 16, 2, 8))  # 9 pages
      >>> q = jax.random.normal(jax.random.key(1), (2, 1, 4, 8))
      >>> table = jnp.array([[3, 8, -1], [0, 5, 2]])
      >>> jax_cudnn.paged_sdpa(q, k, v, table, jnp.array([20, 47])).shape
      (2, 1, 4, 8)
    """
    return run_cached(
        "paged_sdpa",
        query,
        {"key_pages": key_pages, "value_pages": value_pages},
        key_value_seq_lengths,
        CachedCall(**options),
        page_table=page_table,
        layout=layout,
        return_residual=return_residual,
    )
