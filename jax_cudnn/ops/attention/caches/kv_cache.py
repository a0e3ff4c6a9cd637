# SPDX-License-Identifier: Apache-2.0
"""Writes new tokens into a cache of keys or values without copying the cache."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.ops.attention.caches.scatter import CacheAxes, typed_for, written
from jax_cudnn.ops.attention.layouts import (
    PAGE_LAYOUTS,
    Layout,
    PageLayout,
    check_layout,
)
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_integers,
    clipped,
    describe,
    is_more,
)


def update(
    cache: ArrayLike,
    new: ArrayLike,
    lengths: ArrayLike,
    new_lengths: ArrayLike | None = None,
    *,
    layout: Layout = "bshd",
) -> jax.Array:
    """Return a cache with new tokens appended to each sequence.

    ``new[b, i]`` becomes ``cache[b, lengths[b] + i]``. Tokens past the end of the cache
    are dropped: :func:`jax_cudnn.cached_sdpa`, given the lengths with these tokens,
    returns NaN for their queries. Keys and values have separate caches.

    XLA writes into the cache in place if nothing else needs its old content: within a
    jitted function, or if the cache is a donated argument (``jax.jit(step,
    donate_argnames=...)``).

    A cache that is sharded over devices, along any axes, stays sharded: each device
    writes the tokens of its shard, and new tokens are sent if needed. The result is
    sharded like the cache.

    Axis letters: b sequences, s new tokens, t tokens that the cache has room for.

    Args:
      cache: (b, t, ...), for example (b, t, k, d) as :func:`jax_cudnn.sdpa` takes it;
        any dtype.
      new: (b, s, ...), with the dtype and the other axes of the cache.
      lengths: integers (b,), or one for all sequences: how many tokens the cache
        contains. Lengths below 0 count as 0.
      new_lengths: integers (b,), or one for all: how many of the new tokens are
        written, for example of prompts that were padded to s. Default None: s, which
        must then be t at most.
      layout: the order of the axes: "bshd" (default) as above, "bhsd" for a cache
        (b, k, t, ...) and new tokens (b, k, s, ...), or "sbhd" for (t, b, ...) and
        (s, b, ...). As in :func:`jax_cudnn.cached_sdpa`.

    Returns:
      An array of the shape and dtype of `cache`. It contains ``lengths + s`` tokens, or
      ``lengths + new_lengths``.

    Raises:
      ValueError: shapes that do not fit, more new tokens than the cache has room for,
        an unknown `layout`.
      TypeError: lengths that are not integers; `new` in another dtype than `cache`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import kv_cache
      >>> cache, new = jnp.zeros((2, 4, 1)), jnp.ones((2, 1, 1))
      >>> kv_cache.update(cache, new, jnp.array([1, 3]))[..., 0].astype(int).tolist()
      [[0, 1, 0, 0], [0, 0, 0, 1]]
    """
    op = "kv_cache.update"
    axes = CacheAxes.of(check_layout(op, layout))
    old, tokens = _arrays(op, "cache", cache, new)
    is_like = axes.are_alike(old, tokens)
    if not is_like or old.shape[axes.first] != tokens.shape[axes.first]:
        raise ValueError(
            f"{op}: cache is {describe(old)} and new {describe(tokens)}. They must be "
            f"({axes.in_words('sequences', 'tokens')}), and differ in the tokens "
            "only."
        )
    sequences, t = old.shape[axes.first], old.shape[axes.tokens]
    s = tokens.shape[axes.tokens]
    if new_lengths is None and is_more(s, t):
        raise ValueError(
            f"{op}: new has {s} tokens and cache room for {t}: cache is "
            f"{describe(old)} and new {describe(tokens)}. {_NO_ROOM}"
        )
    counts = _counts(op, lengths, new_lengths, sequences, s, t)
    tokens, *counts = typed_for(old, axes, tokens, counts, is_paged=False)
    positions = _positions(counts, s)
    return written(axes, old, tokens, positions)


def update_pages(
    pages: ArrayLike,
    new: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    new_lengths: ArrayLike | None = None,
    *,
    layout: PageLayout = "bshd",
) -> jax.Array:
    """Return pages with new tokens appended to their sequences.

    ``new[b, j]`` is token ``x = lengths[b] + j`` of its sequence, and becomes
    ``pages[page_table[b, x // i], x % i]`` for pages of i tokens. A token for which the
    table has no page is dropped. Keys and values have separate pages, and may share the
    table. As for :func:`update`, nothing is copied if the pages are donated, and pages
    that are sharded over devices stay sharded.

    Axis letters: b sequences, s new tokens, p pages, i tokens of a page, m pages of a
    sequence at most.

    Args:
      pages: (p, i, ...), for example (p, i, k, d) as :func:`jax_cudnn.paged_sdpa` takes
        them; any dtype.
      new: (b, s, ...), with the dtype and the other axes of the pages.
      page_table: integers (b, m), the pages of each sequence in their order. A number
        that is not a page, such as -1, means no page. Two sequences must not write to
        one page: the result would not be defined.
      lengths: integers (b,), or one for all: how many tokens each sequence has.
        Lengths below 0 count as 0.
      new_lengths: integers (b,), or one for all: how many of the new tokens are
        written, for example of prompts that were padded to s. Default None: s, which
        must then be m*i at most.
      layout: "bshd" (default) as above, or "bhsd" for pages (p, k, i, ...) and new
        tokens (b, k, s, ...). As in :func:`jax_cudnn.paged_sdpa`.

    Returns:
      An array of the shape and dtype of `pages`.

    Raises:
      ValueError: shapes that do not fit, more new tokens than the pages of a sequence
        have room for, an unknown `layout`.
      TypeError: page numbers or lengths that are not integers; `new` in another dtype
        than `pages`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import kv_cache
      >>> pages, new = jnp.zeros((3, 2, 1)), jnp.ones((1, 1, 1))
      >>> table, lengths = jnp.array([[2, 0]]), jnp.array([3])
      >>> kv_cache.update_pages(pages, new, table, lengths)[..., 0].astype(int).tolist()
      [[0, 1], [0, 0], [0, 0]]
    """
    op = "kv_cache.update_pages"
    axes = CacheAxes.of(check_layout(op, layout, *PAGE_LAYOUTS))
    old, tokens = _arrays(op, "pages", pages, new)
    if not axes.are_alike(old, tokens):
        raise ValueError(
            f"{op}: pages is {describe(old)} and new {describe(tokens)}. They must be "
            f"({axes.in_words('pages', 'tokens of a page')}) and "
            f"({axes.in_words('sequences', 'tokens')}), with the same other "
            "axes."
        )
    sequences = tokens.shape[axes.first]
    table = check_page_table(op, page_table, f"new {describe(tokens)}", sequences)
    p, size = old.shape[axes.first], old.shape[axes.tokens]
    most = table.shape[1]
    s, room = tokens.shape[axes.tokens], most * size
    if new_lengths is None and is_more(s, room):
        raise ValueError(
            f"{op}: new has {s} tokens of a sequence, and its {most} pages of {size} "
            f"tokens room for {room}: pages is {describe(old)}, new {describe(tokens)} "
            f"and page_table {describe(table)}. {_NO_ROOM}"
        )
    counts = _counts(op, lengths, new_lengths, sequences, s, room)
    if 0 in (p, size, most):
        return old
    tokens, table, *counts = typed_for(
        old, axes, tokens, [table, *counts], is_paged=True
    )
    positions = _positions(counts, s)
    place = jnp.clip(positions // size, 0, most - 1)
    number = jnp.take_along_axis(table, place, axis=1)
    is_page = (number >= 0) & (number < p) & (positions >= 0) & (positions < room)
    number = jnp.where(is_page, number.astype(jnp.int32), -1)
    return written(axes, old, tokens, positions % size, number)


def check_page_table(
    op: str, page_table: ArrayLike, beside: str, sequences: int
) -> jax.Array:
    """Return a table of pages (sequences, most pages), or raise what is wrong with it.

    ``beside`` says which operand has that many sequences.
    """
    table = check_integers(op, "page_table", page_table)
    if table.ndim != 2 or table.shape[0] != sequences:
        raise ValueError(
            f"{op}: page_table is {describe(table)} but {beside}. It must have the "
            f"pages of each sequence, shape [{sequences}, most pages of a sequence]."
        )
    return table


_NO_ROOM = (
    "Make room for all of them, or pass new_lengths, the tokens of each sequence that "
    "are written, if the others are padding."
)


def _arrays(
    op: str, name: str, cache: ArrayLike, new: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    old, tokens = as_operand(op, name, cache), as_operand(op, "new", new)
    if old.dtype != tokens.dtype:
        raise TypeError(
            f"{op}: new is {describe(tokens)} but {name} {describe(old)}. Both must "
            f"have one dtype. Convert new to {old.dtype}."
        )
    return old, tokens


def _counts(
    op: str,
    lengths: ArrayLike,
    new_lengths: ArrayLike | None,
    sequences: int,
    s: int,
    room: int,
) -> list[jax.Array]:
    """Return the lengths, and the new ones if there are any, as i32 (b,).

    Those above the room, and above the number of new tokens, count as these.
    """
    given = {"lengths": (lengths, room)}
    if new_lengths is not None:
        given["new_lengths"] = (new_lengths, s)
    found: list[jax.Array] = []
    for name, (value, most) in given.items():
        array = check_integers(op, name, value)
        if array.shape not in ((), (sequences,)):
            raise ValueError(
                f"{op}: {name} is {describe(array)}. It must be one number, or one per "
                f"sequence, shape [{sequences}]."
            )
        found.append(jnp.broadcast_to(clipped(array, most), (sequences,)))
    return found


def _positions(counts: Sequence[jax.Array], s: int) -> jax.Array:
    """Return where in its sequence each of s tokens goes, (b, s); -1 for nowhere."""
    numbers = jnp.arange(s, dtype=jnp.int32)[None]
    lengths, *new_lengths = (x[:, None] for x in counts)
    positions = lengths + numbers
    for most in new_lengths:
        positions = jnp.where(numbers < most, positions, -1)
    return positions
