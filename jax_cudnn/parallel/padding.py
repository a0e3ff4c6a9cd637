# SPDX-License-Identifier: Apache-2.0
"""Clears the tokens of no packed sequence where sequences become a mask.

They may be NaN. cuDNN's packed kernel does not read them, but a mask multiplies them by
0. The results of such queries are cleared too, since that clears their cotangents.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.ops.attention.visibility.predicates import InSequence, Tokens
from jax_cudnn.parallel.order import positions_of
from jax_cudnn.parallel.problem import Problem, Shards, membership, predicates_of
from jax_cudnn.parallel.schedule import Step


class Inside(NamedTuple):
    """Which of a device's queries and keys are in a sequence: bool (b, tokens)."""

    query: jax.Array
    key: jax.Array


def tokens_inside(
    problem: Problem, shards: Shards, steps: Iterable[Step]
) -> Inside | None:
    """Return which tokens are in a sequence; None where sequences become no mask."""
    found = predicates_of(problem, shards)
    packing = next((x for x in found if isinstance(x, InSequence)), None)
    if any(call.is_shifted for x in steps for calls in x.programs for call in calls):
        packing = packing or membership(shards)
    if packing is None:
        return None

    def tokens(x: jax.Array) -> Tokens:
        size = x.shape[1]
        places = positions_of(problem.device, problem.count, size, problem.order)
        return Tokens(size, places)

    return Inside(*packing.inside(tokens(shards.query), tokens(shards.key)))


def without_padding(shards: Shards, inside: Inside | None) -> Shards:
    """Return the shards with 0 for queries, keys and values of no sequence."""
    if inside is None:
        return shards
    return shards._replace(
        query=_cleared(inside.query, shards.query),
        key=_cleared(inside.key, shards.key),
        value=_cleared(inside.key, shards.value),
    )


def with_padding(
    shards: Shards, inside: Inside | None, output: jax.Array, *rows: jax.Array
) -> tuple[jax.Array, ...]:
    """Return output and log-sum-exp, with the constants that padding has there.

    Beside sinks, its log-sum-exp is the sink, which has a gradient.
    """
    if inside is None:
        return (output, *rows)
    if shards.sinks is None:
        rows = tuple(jnp.where(inside.query[..., None], x, -jnp.inf) for x in rows)
    return (_cleared(inside.query, output), *rows)


def _cleared(is_inside: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(is_inside[..., None, None], x, jnp.zeros((), x.dtype))
