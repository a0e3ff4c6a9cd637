# SPDX-License-Identifier: Apache-2.0
"""Attention in which devices exchange tokens for heads, before and after one call."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.ops.attention.attend import Operands, attend_by_rows
from jax_cudnn.ops.attention.visibility.predicates import Tokens
from jax_cudnn.parallel.order import natural, ordered
from jax_cudnn.parallel.problem import SEQUENCES, Problem, Shards, predicates_of


def attend_by_heads(op: str, problem: Problem, shards: Shards) -> tuple[jax.Array, ...]:
    """Return output (b, s, h, e) and, if asked for, log-sum-exp (b, s, h).

    In between, a device has whole sequences.
    """
    query, key, value = shards.query, shards.key, shards.value
    repeats = _repeats(op, problem.count, query.shape[2], key.shape[2])
    if repeats != 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    is_natural = _needs_order(problem, shards)

    def to_heads(x: jax.Array) -> jax.Array:
        return _swapped(problem, x, split=2, concat=1, from_order=is_natural)

    def to_tokens(x: jax.Array) -> jax.Array:
        x = ordered(x, problem.count, problem.order) if is_natural else x
        return _swapped(problem, x, split=1, concat=2)

    # What belongs to scores, for the rows of this device's queries and all heads.
    of_scores = {**shards.scores}
    if shards.mask is not None:
        of_scores["mask"] = shards.mask
    given = {
        role: _of_own_heads(problem, x, query.shape[1], is_natural=is_natural)
        for role, x in of_scores.items()
    }
    tokens = (
        Tokens(query.shape[1] * problem.count),
        Tokens(key.shape[1] * problem.count),
    )
    for predicate in predicates_of(problem, shards):
        is_seen = _own_heads(problem, predicate.seen(*tokens), axis=1)
        given["mask"] = given["mask"] & is_seen if "mask" in given else is_seen
    if shards.dropout_offset is not None:
        given["dropout_offset"] = _own_heads(problem, shards.dropout_offset, axis=1)
    of_rows = {
        role: x
        for role, x in shards.given.items()
        if role in (*SEQUENCES, "dropout_seed")
    }
    local = Operands.of(
        {
            **given,
            **of_rows,
            "query": to_heads(query),
            "key": to_heads(key),
            "value": to_heads(value),
        }
    )
    attributes = replace(
        problem.attributes,
        dropout_batch=query.shape[0] if problem.attributes.dropout else 0,
    )
    if shards.sinks is not None:
        sinks = _own_heads(problem, shards.sinks, axis=0)
        local = local._replace(sinks=jnp.reshape(sinks, (1, -1, 1, 1)))
    results = attend_by_rows(local, attributes, problem.call, with_lse=problem.with_lse)
    return tuple(to_tokens(x) for x in results)


def _repeats(op: str, count: int, heads: int, key_heads: int) -> int:
    """Return how often each key head is repeated, so that each device gets one."""
    if heads % count == 0 and key_heads % count == 0:
        return 1
    if heads % count == 0 and key_heads and count % key_heads == 0:
        return count // key_heads
    raise ValueError(
        f"{op}: {heads} query heads and {key_heads} key heads cannot be shared out "
        f'among {count} devices. method="all_to_all" needs query heads that are a '
        "multiple of the devices, and key heads that are a multiple or a divisor of "
        'them. Use method="ring" or "all_gather", or an axis of fewer devices.'
    )


def _needs_order(problem: Problem, shards: Shards) -> bool:
    """Whether the sequences have to be in their order: attention itself has none."""
    if problem.order == "contiguous":
        return False
    has_sequences = any(getattr(shards, role) is not None for role in SEQUENCES)
    has_positions = has_sequences or not problem.band.is_everything
    return has_positions or bool(shards.predicates or problem.attributes.dropout)


def _swapped(
    problem: Problem, x: jax.Array, *, split: int, concat: int, from_order: bool = False
) -> jax.Array:
    # Of n devices, each has s tokens of h heads: (b, s, h, d). With split=2 and
    # concat=1, it has n s tokens of h / n heads: (b, n s, h / n, d).
    x = jax.lax.all_to_all(
        x, problem.axis_name, split_axis=split, concat_axis=concat, tiled=True
    )
    return natural(x, problem.count, problem.order, concat) if from_order else x


def _of_own_heads(
    problem: Problem, x: jax.Array, queries: int, *, is_natural: bool
) -> jax.Array:
    """Return a bias or mask for all tokens and this device's heads.

    Given are all heads of the rows of this device's queries. One row is shared by all
    queries, unless a device has one query: then the row may be its own.
    """
    has_heads, has_rows = x.shape[1] != 1, x.shape[2] != 1 or queries == 1
    found: jax.Array = x
    if has_heads and has_rows:
        found = _swapped(problem, x, split=1, concat=2)
    elif has_rows:
        found = jax.lax.all_gather(x, problem.axis_name, axis=2, tiled=True)
    elif has_heads:
        found = _own_heads(problem, x, axis=1)
    for axis in (2, 3):
        if is_natural and found.shape[axis] != 1:
            found = natural(found, problem.count, problem.order, axis)
    return found


def _own_heads(problem: Problem, x: jax.Array, axis: int) -> jax.Array:
    """Return what belongs to the heads that this device has while it computes."""
    if x.shape[axis] == 1 and x.ndim > 1:
        return x
    size = x.shape[axis] // problem.count
    return jax.lax.dynamic_slice_in_dim(x, problem.device * size, size, axis=axis)
