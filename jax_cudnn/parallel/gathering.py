# SPDX-License-Identifier: Apache-2.0
"""Attention in which each device gathers all keys, forward and backward.

The gathered keys are not kept for the backward pass, but gathered again.
"""

import jax
import jax.numpy as jnp

from jax_cudnn.parallel.blocks import (
    Cotangents,
    Keys,
    Partial,
    TokenPositions,
    attend_step,
    gradient_step,
    no_gradients,
)
from jax_cudnn.parallel.derivatives import Method, OperandGradients
from jax_cudnn.parallel.order import natural, ordered
from jax_cudnn.parallel.problem import Problem, Shards
from jax_cudnn.parallel.ring import needs_positions, operand_gradients, query_places
from jax_cudnn.parallel.schedule import Step, gathered_step


def _forward(problem: Problem, shards: Shards) -> Partial:
    (step,), moved = _steps(problem, shards), _in_order(problem, shards)
    total = attend_step(
        problem,
        step,
        moved,
        query_places(problem, shards),
        _gathered(problem, shards),
        None,
    )
    return Partial(total.output.astype(shards.query.dtype), total.stats)


def _backward(
    problem: Problem,
    shards: Shards,
    cotangents: Cotangents,
    wanted: tuple[str, ...],
) -> OperandGradients:
    (step,), moved = _steps(problem, shards), _in_order(problem, shards)
    keys = _gathered(problem, shards)
    sums = gradient_step(
        problem,
        step,
        moved,
        query_places(problem, shards),
        keys,
        cotangents,
        no_gradients(moved, keys, wanted),
    )
    scores = {role: _as_stored(problem, x, 3) for role, x in sums.scores.items()}
    key, value = (
        jax.lax.psum_scatter(
            _as_stored(problem, x, 1),
            problem.axis_name,
            scatter_dimension=1,
            tiled=True,
        )
        for x in (sums.key, sums.value)
    )
    return operand_gradients(shards, sums._replace(key=key, value=value, scores=scores))


def _steps(problem: Problem, shards: Shards) -> tuple[Step, ...]:
    step = gathered_step(
        count=problem.count,
        order=problem.order,
        queries=shards.query.shape[1],
        keys=shards.key.shape[1],
        band=problem.band,
        is_packed=shards.query_starts is not None,
    )
    return (step,)


ALL_GATHER = Method(steps=_steps, forward=_forward, backward=_backward)


def _gathered(problem: Problem, shards: Shards) -> Keys:
    """Return the keys of all devices, in the order of the sequence."""
    key, value = (
        _natural(
            problem, jax.lax.all_gather(x, problem.axis_name, axis=1, tiled=True), 1
        )
        for x in (shards.key, shards.value)
    )
    starts, ends, positions = shards.key_starts, shards.key_lengths, None
    if starts is not None and ends is not None:
        ends = starts + ends
    if needs_positions(shards):
        positions = jnp.arange(key.shape[1], dtype=jnp.int32)
    places = TokenPositions(positions=positions, begins=starts, ends=ends)
    return Keys(key=key, value=value, first=0, places=places, is_own=False)


def _in_order(problem: Problem, shards: Shards) -> Shards:
    """Return the shards with the columns of scores and mask in the sequence's order."""
    moved = {role: _natural(problem, x, 3) for role, x in shards.scores.items()}
    if shards.mask is not None:
        moved["mask"] = _natural(problem, shards.mask, 3)
    return shards._replace(**moved)


def _natural(problem: Problem, x: jax.Array, axis: int) -> jax.Array:
    one = x.shape[axis] == 1
    return x if one else natural(x, problem.count, problem.order, axis)


def _as_stored(problem: Problem, x: jax.Array, axis: int) -> jax.Array:
    one = x.shape[axis] == 1
    return x if one else ordered(x, problem.count, problem.order, axis)
