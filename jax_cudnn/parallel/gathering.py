# SPDX-License-Identifier: Apache-2.0
"""Attention in which each device gathers all keys, forward and backward.

The gathered keys are not kept for the backward pass, but gathered again.
"""

import jax

from jax_cudnn.parallel.blocks import (
    Cotangents,
    Keys,
    Partial,
    attend_step,
    gradient_step,
    no_gradients,
)
from jax_cudnn.parallel.derivatives import Method, OperandGradients
from jax_cudnn.parallel.order import from_zigzag, to_zigzag
from jax_cudnn.parallel.problem import Problem, Shares
from jax_cudnn.parallel.ring import operand_gradients, visible_queries
from jax_cudnn.parallel.schedule import Step, gathered_step


def _forward(problem: Problem, shares: Shares) -> Partial:
    step, ordered = _step(problem, shares), _in_order(problem, shares)
    total = attend_step(
        problem,
        step,
        ordered,
        _gathered(problem, shares),
        visible_queries(problem, shares),
        None,
    )
    return Partial(total.output.astype(shares.query.dtype), total.stats)


def _backward(
    problem: Problem, shares: Shares, cotangents: Cotangents, with_bias: bool
) -> OperandGradients:
    step, ordered = _step(problem, shares), _in_order(problem, shares)
    keys = _gathered(problem, shares)
    sums = gradient_step(
        problem,
        step,
        ordered,
        keys,
        visible_queries(problem, shares),
        cotangents,
        no_gradients(ordered, keys, with_bias=with_bias),
    )
    bias = sums.bias if sums.bias is None else _as_stored(problem, sums.bias, 3)
    key, value = (
        jax.lax.psum_scatter(
            _as_stored(problem, x, 1),
            problem.axis_name,
            scatter_dimension=1,
            tiled=True,
        )
        for x in (sums.key, sums.value)
    )
    return operand_gradients(shares, sums._replace(key=key, value=value, bias=bias))


ALL_GATHER = Method(forward=_forward, backward=_backward)


def _step(problem: Problem, shares: Shares) -> Step:
    return gathered_step(
        count=problem.count,
        order=problem.order,
        queries=shares.query.shape[1],
        keys=shares.key.shape[1],
        band=problem.band,
    )


def _gathered(problem: Problem, shares: Shares) -> Keys:
    """Return the keys of all devices, in the order of the sequence."""
    key, value = (
        _natural(
            problem, jax.lax.all_gather(x, problem.axis_name, axis=1, tiled=True), 1
        )
        for x in (shares.key, shares.value)
    )
    return Keys(key=key, value=value, first=0, visible=shares.key_lengths)


def _in_order(problem: Problem, shares: Shares) -> Shares:
    """Return the shares with the columns of bias and mask in the sequence's order."""
    bias, mask = (
        x if x is None else _natural(problem, x, 3) for x in (shares.bias, shares.mask)
    )
    return shares._replace(bias=bias, mask=mask)


def _natural(problem: Problem, x: jax.Array, axis: int) -> jax.Array:
    if problem.order == "contiguous" or x.shape[axis] == 1:
        return x
    return from_zigzag(x, problem.count, axis)


def _as_stored(problem: Problem, x: jax.Array, axis: int) -> jax.Array:
    if problem.order == "contiguous" or x.shape[axis] == 1:
        return x
    return to_zigzag(x, problem.count, axis)
