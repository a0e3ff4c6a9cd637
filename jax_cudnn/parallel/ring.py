# SPDX-License-Identifier: Apache-2.0
"""Attention in which keys travel around a ring of devices, forward and backward.

In each step a device attends to the keys at hand, while the next ones are on their way.
Backward, the sums of the gradients of keys and values travel one step after them, so
that they too are sent while kernels run.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jax_cudnn.parallel.blocks import (
    Cotangents,
    Gradients,
    Keys,
    Partial,
    TokenPositions,
    attend_step,
    gradient_step,
    no_gradients,
)
from jax_cudnn.parallel.derivatives import Method, OperandGradients
from jax_cudnn.parallel.order import positions_of, visible_tokens
from jax_cudnn.parallel.problem import Problem, Shards
from jax_cudnn.parallel.schedule import Step, ring_steps


def _forward(problem: Problem, shards: Shards) -> Partial:
    steps = _steps(problem, shards)
    at_hand = (shards.key, shards.value)
    queries = query_places(problem, shards)
    total: Partial | None = None
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        coming = at_hand
        if following is not None:
            coming = _moved(problem, at_hand, following.shift - step.shift)
        keys = _keys(problem, shards, step, at_hand)
        total = attend_step(problem, step, shards, queries, keys, total)
        if following is not None:
            at_hand, total = _together(coming, total)
    assert total is not None
    return Partial(total.output.astype(shards.query.dtype), total.stats)


def _backward(
    problem: Problem,
    shards: Shards,
    cotangents: Cotangents,
    wanted: tuple[str, ...],
) -> OperandGradients:
    steps = _steps(problem, shards)
    at_hand = (shards.key, shards.value)
    queries = query_places(problem, shards)
    sums = no_gradients(shards, _keys(problem, shards, steps[0], at_hand), wanted)
    # The gradient of device 0's keys is begun by device 0. Device 1 adds its part one
    # step later, then device 2, ... In the end it is sent back to device 0.
    # Of the keys at hand, as far as the devices that had them before know it.
    travelling: tuple[jax.Array, jax.Array] | None = None
    shift = 0
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        coming = at_hand
        if following is not None:
            coming = _moved(problem, at_hand, following.shift - step.shift)
        if travelling is not None:
            travelling = _moved(problem, travelling, step.shift - shift)
        keys = _keys(problem, shards, step, at_hand)
        alone = sums._replace(
            key=jnp.zeros_like(sums.key), value=jnp.zeros_like(sums.value)
        )
        sums = gradient_step(problem, step, shards, queries, keys, cotangents, alone)
        travelling = (
            (sums.key, sums.value)
            if travelling is None
            else (travelling[0] + sums.key, travelling[1] + sums.value)
        )
        shift = step.shift
        if following is not None:
            at_hand, (travelling, sums) = _together(coming, (travelling, sums))
    assert travelling is not None
    key, value = _moved(problem, travelling, -shift)
    return operand_gradients(shards, sums._replace(key=key, value=value))


_Coming = TypeVar("_Coming")
_Done = TypeVar("_Done")


def operand_gradients(shards: Shards, sums: Gradients) -> OperandGradients:
    """Return sums of gradients rounded to the operands' dtypes."""
    found = {"query": sums.query, "key": sums.key, "value": sums.value, **sums.scores}
    return {role: x.astype(getattr(shards, role).dtype) for role, x in found.items()}


def query_places(problem: Problem, shards: Shards) -> TokenPositions:
    """Return where this device's queries are, as far as that matters."""
    return _places(problem, shards, "query", problem.device)


def needs_positions(shards: Shards) -> bool:
    """Whether what a call is given depends on the positions of its tokens."""
    predicates = bool(shards.predicates) or shards.query_starts is not None
    return predicates or shards.dropout_seed is not None


def _places(
    problem: Problem, shards: Shards, kind: str, device: jax.Array
) -> TokenPositions:
    """Return where the queries or keys of a device are, as far as that matters."""
    size = getattr(shards, kind).shape[1]
    count, order = problem.count, problem.order
    starts, lengths = (getattr(shards, f"{kind}_{x}") for x in ("starts", "lengths"))

    def before(places: jax.Array) -> jax.Array:
        return visible_tokens(places, device, count, size, order)

    positions, begins, ends = None, None, None
    if needs_positions(shards):
        positions = positions_of(device, count, size, order)
    if lengths is not None:
        ends = before(lengths if starts is None else starts + lengths)
    if starts is not None:
        begins = before(starts)
    return TokenPositions(positions=positions, begins=begins, ends=ends)


def _steps(problem: Problem, shards: Shards) -> tuple[Step, ...]:
    return ring_steps(
        count=problem.count,
        order=problem.order,
        queries=shards.query.shape[1],
        keys=shards.key.shape[1],
        band=problem.band,
        is_packed=shards.query_starts is not None,
    )


RING = Method(steps=_steps, forward=_forward, backward=_backward)


def _keys(
    problem: Problem, shards: Shards, step: Step, at_hand: tuple[jax.Array, jax.Array]
) -> Keys:
    # In the step of shift 1, device 0 of 4 has the keys of device 3.
    source = (problem.device - step.shift) % problem.count
    is_read = bool(shards.scores) or shards.mask is not None
    return Keys(
        key=at_hand[0],
        value=at_hand[1],
        first=source * shards.key.shape[1] if is_read else 0,
        places=_places(problem, shards, "key", source),
    )


def _moved(
    problem: Problem, arrays: tuple[jax.Array, jax.Array], by: int
) -> tuple[jax.Array, jax.Array]:
    """Return what the device so many places before holds, around the ring."""
    count = problem.count
    if by % count == 0:
        return arrays
    pairs = [(i, (i + by) % count) for i in range(count)]
    first, second = (jax.lax.ppermute(x, problem.axis_name, pairs) for x in arrays)
    return first, second


def _together(coming: _Coming, done: _Done) -> tuple[_Coming, _Done]:
    """Return both, neither before the other is there.

    Otherwise the compiler might send all keys at once, and hold those of all devices.
    """
    return jax.lax.optimization_barrier((coming, done))
