# SPDX-License-Identifier: Apache-2.0
"""Copies tokens to rows that lie expert by expert, and adds rows up to tokens.

A `Permutation` says both ways where each row is. So both functions, and the transposes
of both, are gathers: no gradient is a scatter that adds rows in an unknown order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.lowering import min_dim
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_int,
    check_integers,
    describe,
)
from jax_cudnn.ops.common.pytrees import as_pytree
from jax_cudnn.reference.products.grouped_matmul import Groups


@functools.partial(as_pytree, module="jax_cudnn.moe")
@dataclass(frozen=True)
class Permutation:
    """Which row each choice of a token has once the rows lie expert by expert.

    A choice is a pair of a token and one of its k experts. With t tokens and e experts:

    Attributes:
      source: (m,) i32, which choice each row is a copy of: token * k + its number, or
        t * k for a row that is no copy of any.
      target: (t, k) i32, the row of each choice; m for a choice that is dropped.
      group_sizes: (e,) i32, how many rows each expert has, for
        :func:`jax_cudnn.ragged_dot`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> moe.permutation(jnp.array([[1], [0], [1]]), num_experts=2).source
      Array([1, 0, 2], dtype=int32)
    """

    source: jax.Array
    target: jax.Array
    group_sizes: jax.Array


def permutation(
    experts: ArrayLike, num_experts: int, *, capacity: int | None = None
) -> Permutation:
    """Return the permutation that brings the rows of each expert side by side.

    The rows of an expert are ordered by the number of the choice, then by token. Where
    there is a capacity, the first rows of each expert in this order are kept and the
    others dropped: first choices go before second ones.

    Args:
      experts: (t, k) integers from 0 to num_experts - 1; all others are dropped. Those
        of a token should differ.
      num_experts: e.
      capacity: the largest number of rows that an expert gets. Default None: no limit.

    Returns:
      A :class:`Permutation` with m = t * k rows, or min(t * k, e * capacity).

    Raises:
      TypeError: `experts` are no integers, or `num_experts` or `capacity` no int.
      ValueError: `experts` are not (t, k); `num_experts` or `capacity` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> experts = jnp.array([[1, 0], [1, 2]])
      >>> moe.permutation(experts, 3).group_sizes
      Array([1, 2, 1], dtype=int32)
      >>> moe.permutation(experts, 3, capacity=1).target
      Array([[1, 0],
             [3, 2]], dtype=int32)
    """
    chosen = check_integers("moe.permutation", "experts", experts)
    # A narrow dtype may not hold the number of experts, nor i32 what is out of range.
    if chosen.dtype.itemsize < 4:
        chosen = chosen.astype(jnp.int32)
    if chosen.ndim != 2:
        raise ValueError(
            f"moe.permutation: experts is {describe(chosen)}. It must be (tokens, "
            "choices). Reshape it."
        )
    limits = {"num_experts": num_experts}
    if capacity is not None:
        limits["capacity"] = capacity
    for name, value in limits.items():
        if check_int("moe.permutation", name, value) < 1:
            raise ValueError(
                f"moe.permutation: {name}={value} must be at least 1. Pass a larger "
                "number."
            )
    is_known = (chosen >= 0) & (chosen < num_experts)
    chosen = jnp.where(is_known, chosen.astype(jnp.int32), num_experts)
    kept = total_counts(chosen, num_experts)
    rows = chosen.size
    if capacity is not None:
        kept = jnp.minimum(kept, min_dim(capacity, chosen.size))
        rows = min_dim(rows, num_experts * capacity)
    return permutation_of(chosen, kept, rows)


def counts(experts: jax.Array, num_experts: int) -> jax.Array:
    """Return how many tokens have each expert as their first, second, ... choice.

    That is (k, e) i32 for experts (t, k).
    """
    numbers = jnp.arange(num_experts, dtype=experts.dtype)
    hits = experts.T[:, :, None] == numbers[None, None]
    return jnp.sum(hits, axis=1, dtype=jnp.int32)


def total_counts(experts: jax.Array, num_experts: int) -> jax.Array:
    """Return how many choices there are of each expert, (e,) i32."""
    return jnp.sum(counts(experts, num_experts), axis=0, dtype=jnp.int32)


def permutation_of(experts: jax.Array, kept: jax.Array, rows: int) -> Permutation:
    """Return the permutation to so many rows, of which each expert keeps the first.

    ``kept`` are (e,) numbers of rows, none larger than those that there are.
    """
    t, k = experts.shape
    # Two tokens with experts [[1, 0], [1, 2]]. First choices come before second ones:
    # `chosen` is (1, 1, 0, 2), and sorted stably, `order` is (2, 0, 1, 3). Entry 2 is
    # the second choice of token 0, which is choice 0 * 2 + 1: `source` is (1, 0, 2, 3).
    chosen = experts.T.reshape(-1).astype(jnp.int32)
    is_known = (chosen >= 0) & (chosen < len(kept))
    chosen = jnp.where(is_known, chosen, len(kept))
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    found = Groups.of_sizes(total_counts(experts, len(kept)))
    number, place = _places(kept, rows)
    order = order.at[found.starts.at[number].get(mode="clip") + place].get(mode="clip")
    # From a number by choice and token to one by token and choice.
    source = order % t * k + order // t if t else order
    source = jnp.where(number < len(kept), source, t * k)
    return Permutation(source, inverse(source, t * k).reshape(t, k), kept)


def _places(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return for each row the number of its group, and its place within the group.

    A row of no group has the number of groups as its number.
    """
    groups = Groups.of_sizes(sizes)
    number = groups.of_rows(rows)
    starts = groups.starts.at[number].get(mode="clip")
    return number, jnp.arange(rows, dtype=jnp.int32) - starts


def placed(sizes: jax.Array, first: jax.Array, rows: int) -> jax.Array:
    """Return where each row of groups comes from: row i of group j from first[j] + i.

    A row of no group comes from ``rows``, which is nowhere.
    """
    number, place = _places(sizes, rows)
    found = first.at[number].get(mode="clip") + place
    return jnp.where(number < len(sizes), found, rows)


def inverse(source: jax.Array, count: int) -> jax.Array:
    """Return which row each of so many choices has, len(source) for one that has none.

    ``source`` says which choice each row has, ``count`` for none.
    """
    rows = source.shape[0]
    empty = jnp.full((count,), rows, jnp.int32)
    return empty.at[source].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")


def permute(x: ArrayLike, permutation: Permutation) -> jax.Array:
    """Return a row for each choice, expert by expert: a copy of the choice's token.

    Rows that are no copy are 0. Differentiable; the gradient of a token is the sum of
    its rows', gathered and added in f32 in the order of its choices.

    Args:
      x: (t, d), of any dtype.
      permutation: of t tokens, by :func:`permutation`.

    Returns:
      (m, d), of x's dtype.

    Raises:
      TypeError: `x` is no array, or `permutation` no :class:`Permutation`.
      ValueError: `x` is not (t, d).

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> x = jnp.array([[1.0], [2.0], [3.0]])
      >>> moe.permute(x, moe.permutation(jnp.array([[1], [0], [1]]), 2)).T
      Array([[2., 1., 3.]], dtype=float32)
    """
    tokens = as_operand("moe.permute", "x", x)
    _check_permutation("moe.permute", permutation)
    if tokens.ndim != 2 or tokens.shape[0] != permutation.target.shape[0]:
        raise ValueError(
            f"moe.permute: x is {describe(tokens)}. It must be (tokens, width) for the "
            f"{permutation.target.shape[0]} tokens of the permutation. Reshape it."
        )
    return spread(tokens, permutation.source, permutation.target)


def unpermute(
    rows: ArrayLike, permutation: Permutation, weights: ArrayLike | None = None
) -> jax.Array:
    r"""Return for each token the weighted sum of the rows of its choices.

    .. math::

        \mathrm{output}_t = \sum_k \mathrm{weights}_{tk} \,
            \mathrm{rows}_{\mathrm{target}(t, k)}

    The sum is kept in f32 (f64 for f64, complex numbers likewise) and rounded once. A
    dropped choice adds 0, whatever its weight. No other row reaches a token, NaN and
    infinities included.

    Args:
      rows: (m, n) floats or complex numbers.
      permutation: to m rows, by :func:`permutation`.
      weights: (t, k) floats. Default None: 1.

    Returns:
      (t, n), of the dtype of `rows`.

    Raises:
      TypeError: `rows` or `weights` are no arrays, or `permutation` is no
        :class:`Permutation`.
      ValueError: `rows` are not (m, n), or `weights` not (t, k).

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import moe
      >>> experts = moe.permutation(jnp.array([[1], [0], [1]]), 2)
      >>> moe.unpermute(jnp.array([[2.0], [1.0], [3.0]]), experts).T
      Array([[1., 2., 3.]], dtype=float32)
    """
    found = as_operand("moe.unpermute", "rows", rows)
    _check_permutation("moe.unpermute", permutation)
    m, shape = permutation.source.shape[0], permutation.target.shape
    if found.ndim != 2 or found.shape[0] != m:
        raise ValueError(
            f"moe.unpermute: rows is {describe(found)}. It must be (rows, width) for "
            f"the {m} rows of the permutation. Reshape it."
        )
    if weights is None:
        shares = jnp.ones(shape, wide_dtype(found))
    else:
        shares = as_operand("moe.unpermute", "weights", weights)
    if shares.shape != shape:
        raise ValueError(
            f"moe.unpermute: weights is {describe(shares)}. It must be {list(shape)}, "
            "one for each choice of each token. Reshape it."
        )
    choices = collect(found, permutation.source, permutation.target)
    total = weighted(choices, shares, permutation.target < m)
    return total.astype(found.dtype)


def _check_permutation(op: str, permutation: object) -> None:
    if not isinstance(permutation, Permutation):
        raise TypeError(
            f"{op}: permutation is {type(permutation).__name__}. It must be a "
            "moe.Permutation. Pass moe.permutation(routing.experts, num_experts), with "
            "the routing of moe.router."
        )


def wide_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Return the dtype in which sums are kept: f32, or f64, or complex like these."""
    is_wide = any(x.dtype in (jnp.float64, jnp.complex128) for x in arrays)
    if any(jnp.iscomplexobj(x) for x in arrays):
        return jnp.dtype(jnp.complex128 if is_wide else jnp.complex64)
    return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def weighted(choices: jax.Array, weights: jax.Array, is_kept: jax.Array) -> jax.Array:
    """Return the weighted sum of choices (t, k, n) that are kept, (t, n), unrounded."""
    dtype = wide_dtype(choices, weights)
    shares = jnp.where(is_kept, weights.astype(dtype), jnp.zeros((), dtype))
    return jnp.sum(choices.astype(dtype) * shares[:, :, None], axis=1)


# In forward mode the tangents are written as scatters, whose transposes are gathers.
# The order does not matter there: no two choices have the same row.


@jax.custom_jvp
def spread(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Return rows (m, d) of tokens (t, d), of which each has k rows: target is (t, k).

    A row with the source t * k is 0. The transpose adds up what `collect` returns.
    """
    k = target.shape[1]
    return x.at[source // k].get(mode="fill", fill_value=0)


@spread.defjvp
def _spread_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    x, source, target = primals
    moved = tangents[0]
    # Wide, so that the transpose adds in f32.
    copies = jnp.repeat(moved.astype(wide_dtype(x)), target.shape[1], axis=0)
    found = spread(x, source, target)
    # The zeros vary over devices as the result does: JAX's scatter of nothing returns
    # them as they are.
    rows = jnp.zeros_like(found)
    tangent = rows.at[target.reshape(-1)].add(copies.astype(x.dtype), mode="drop")
    return found, tangent


@jax.custom_jvp
def collect(rows: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Return the row of each choice, (t, k, n) for rows (m, n); 0 for one without."""
    return rows.at[target].get(mode="fill", fill_value=0)


@collect.defjvp
def _collect_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    rows, source, target = primals
    found = collect(rows, source, target)
    choices = jnp.zeros_like(found).reshape(target.size, *rows.shape[1:])
    tangent = choices.at[source].add(tangents[0], mode="drop")
    return found, tangent.reshape(found.shape)
