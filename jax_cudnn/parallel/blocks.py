# SPDX-License-Identifier: Apache-2.0
"""Runs a device's calls of one step: attention on parts of its queries and keys.

Forward, the results of calls are combined in f32. Backward, each call's gradients
follow from the output and the log-sum-exp of all keys, and are summed in f32.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import align_varying
from jax_cudnn.ops.attend import Operands, attend
from jax_cudnn.ops.sdpa_parts import part_gradients
from jax_cudnn.parallel.combining import combine
from jax_cudnn.parallel.problem import Problem, Shares
from jax_cudnn.parallel.schedule import Call, Step

_State = TypeVar("_State")
# The first column of a call: known while tracing, or depending on the device.
_First = int | jax.Array


class Keys(NamedTuple):
    """The keys at hand: where they come from, and how far they are within lengths.

    ``first`` is the column of bias and mask that belongs to the first of them, and
    ``visible`` (b, 1, 1, 1) how many of the first ones lengths let queries see.
    """

    key: jax.Array
    value: jax.Array
    first: _First
    visible: jax.Array | None


class Partial(NamedTuple):
    """Attention over some keys: output (b, s, h, e) and log-sum-exp (b, s, h)."""

    output: jax.Array
    stats: jax.Array


class Cotangents(NamedTuple):
    """What a gradient starts from, for all keys: results and their cotangents.

    Output and its cotangent are (b, s, h, e), the others (b, h, s, 1).
    """

    output: jax.Array
    stats: jax.Array
    grad_output: jax.Array
    grad_stats: jax.Array | None


class Gradients(NamedTuple):
    """Sums of gradients in f32 (f64 for f64), of the keys and values at hand."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


def zeros_like(x: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return zeros that differ between devices as x does, in the eyes of shard_map."""
    return align_varying([jnp.zeros(shape, dtype), x])[0]


def accumulator(x: jax.Array) -> jnp.dtype:
    """Return the dtype in which sums of x are kept."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def no_gradients(shares: Shares, keys: Keys, *, with_bias: bool) -> Gradients:
    """Return gradients of zero, for the keys at hand and a bias of all keys."""
    like, dtype = shares.query, accumulator(shares.query)
    bias = None
    if with_bias:
        assert shares.bias is not None
        # Each number of it gets one gradient, unless rows share it.
        is_sum = shares.bias.shape[2] != shares.query.shape[1]
        bias_dtype = dtype if is_sum else shares.bias.dtype
        bias = zeros_like(like, shares.bias.shape, bias_dtype)
    return Gradients(
        query=zeros_like(like, shares.query.shape, dtype),
        key=zeros_like(like, keys.key.shape, dtype),
        value=zeros_like(like, keys.value.shape, dtype),
        bias=bias,
    )


def attend_step(
    problem: Problem,
    step: Step,
    shares: Shares,
    keys: Keys,
    visible_queries: jax.Array | None,
    before: Partial | None,
) -> Partial:
    """Return attention over the keys of before, if any, and those of this step."""

    def run(call: Call, first: _First, state: Partial | None) -> Partial:
        part = _operands(call, first, shares, keys, visible_queries)
        attributes = problem.attributes(is_causal=call.is_causal, window=call.window)
        output, stats = attend(part, attributes, problem.call, with_stats=True)
        stats = jnp.transpose(stats[..., 0], (0, 2, 1))
        new = Partial(output=output, stats=stats)
        return _combined(state, new, call.rows)

    if before is None and not _begins_with_all_rows(step, shares):
        before = _nothing_seen(shares)
    total = _run(problem, step, run, before)
    assert total is not None, "either before is not None, or each device has a call"
    return total


def gradient_step(
    problem: Problem,
    step: Step,
    shares: Shares,
    keys: Keys,
    visible_queries: jax.Array | None,
    cotangents: Cotangents,
    before: Gradients,
) -> Gradients:
    """Return gradients with those of this step added."""

    def run(call: Call, first: _First, state: Gradients) -> Gradients:
        part = _operands(call, first, shares, keys, visible_queries)
        stats = _rows(cotangents.stats, call, axis=2)
        if part.bias is not None:
            stats = _without_far_rows(stats)
        grad_stats = cotangents.grad_stats
        found = part_gradients(
            part,
            problem.attributes(is_causal=call.is_causal, window=call.window),
            problem.call,
            output=_rows(cotangents.output, call, axis=1),
            stats=stats,
            grad_output=_rows(cotangents.grad_output, call, axis=1),
            grad_stats=None if grad_stats is None else _rows(grad_stats, call, axis=2),
            with_bias=state.bias is not None,
        )
        rows, bias = call.rows[0], state.bias
        if bias is not None:
            bias = _with_bias_part(bias, found["bias"], rows, keys.first + first)
        return Gradients(
            query=_added(state.query, found["query"], (0, rows)),
            key=_added(state.key, found["key"], (0, first)),
            value=_added(state.value, found["value"], (0, first)),
            bias=bias,
        )

    return _run(problem, step, run, before)


# --- programs -------------------------------------------------------------------------


def _run(
    problem: Problem,
    step: Step,
    run: Callable[[Call, _First, _State], _State],
    state: _State,
) -> _State:
    """Run this device's program of a step: its calls, one after another."""
    width = max(len(calls) for calls in step.programs)
    table = [(*each, *([0] * (width - len(each)))) for each in step.columns_of]

    def program(number: int) -> Callable[[_State], _State]:
        calls = step.programs[number]
        mine = {
            columns
            for columns, each in zip(table, step.program_of, strict=True)
            if each == number
        }

        def branch(state: _State) -> _State:
            for i, call in enumerate(calls):
                starts = {columns[i] for columns in mine}
                first = starts.pop() if len(starts) == 1 else firsts()[i]
                state = run(call, first, state)
            return state

        return branch

    def firsts() -> jax.Array:
        return jnp.asarray(table, jnp.int32)[problem.device]

    if len(step.programs) == 1:
        return program(0)(state)
    number = jnp.asarray(step.program_of, jnp.int32)[problem.device]
    branches = [program(i) for i in range(len(step.programs))]
    return jax.lax.switch(number, branches, state)


def _operands(
    call: Call,
    first: _First,
    shares: Shares,
    keys: Keys,
    visible_queries: jax.Array | None,
) -> Operands:
    """Return the operands of one call."""
    count = call.columns[1]

    def scores_like(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        x = _rows(x, call, axis=2)
        return x if x.shape[3] == 1 else _slice(x, keys.first + first, count, axis=3)

    bias = scores_like(shares.bias)
    if bias is not None and shares.shift is not None:
        bias = bias - _rows(shares.shift, call, axis=2)
    return Operands(
        query=_rows(shares.query, call, axis=1),
        key=_slice(keys.key, first, count, axis=1),
        value=_slice(keys.value, first, count, axis=1),
        bias=bias,
        mask=scores_like(shares.mask),
        query_lengths=_within(visible_queries, *call.rows),
        key_lengths=_within(keys.visible, first, count),
    )


def _within(visible: jax.Array | None, first: _First, count: int) -> jax.Array | None:
    return None if visible is None else jnp.clip(visible - first, 0, count)


def _rows(x: jax.Array, call: Call, axis: int) -> jax.Array:
    return x if x.shape[axis] == 1 else _slice(x, *call.rows, axis=axis)


def _slice(x: jax.Array, first: _First, count: int, axis: int) -> jax.Array:
    if isinstance(first, int):
        return jax.lax.slice_in_dim(x, first, first + count, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, first, count, axis=axis)


def _begins_with_all_rows(step: Step, shares: Shares) -> bool:
    """Whether the first call of each device is on all of its queries."""
    everything = (0, shares.query.shape[1])
    return all(calls and calls[0].rows == everything for calls in step.programs)


def _nothing_seen(shares: Shares) -> Partial:
    """Return attention over no key."""
    b, s, h, _ = shares.query.shape
    e, dtype = shares.value.shape[3], accumulator(shares.query)
    output = zeros_like(shares.query, (b, s, h, e), dtype)
    return Partial(output=output, stats=jnp.full_like(output[..., 0], -jnp.inf))


def _combined(state: Partial | None, part: Partial, rows: tuple[int, int]) -> Partial:
    """Return attention over the keys of both; the part is that of some rows."""
    if state is None:
        return part._replace(output=part.output.astype(part.stats.dtype))
    first, count = rows
    old = Partial(*(_slice(x, first, count, axis=1) for x in state))
    new = combine(*old, *part)
    return Partial(*(_put(x, y, (0, first)) for x, y in zip(state, new, strict=True)))


def _put(x: jax.Array, part: jax.Array, starts: tuple[_First, ...]) -> jax.Array:
    if x.shape == part.shape:
        return part
    return jax.lax.dynamic_update_slice(x, part, _indices(x, starts))


def _indices(x: jax.Array, starts: tuple[_First, ...]) -> list[jax.Array]:
    """Return where a part of x begins, along all axes and in one dtype."""
    zeros = (0,) * (x.ndim - len(starts))
    return [jnp.asarray(each, jnp.int32) for each in (*starts, *zeros)]


# As in legalize/far_rows.py: rows further from 0, and a log-sum-exp above every score.
_FAR = 2.0**11
_ABOVE_ALL = 1e30


def _without_far_rows(stats: jax.Array) -> jax.Array:
    """Return log-sum-exps that give rows no probabilities where these would be wrong.

    Such are rows that no shift of the bias brought near 0. In f32, exp(score - it)
    would be anything up to inf there.
    """
    if stats.dtype == jnp.float64:
        return stats
    is_far = (jnp.abs(stats) > _FAR) & (stats != -jnp.inf)
    return jnp.where(is_far, jnp.asarray(_ABOVE_ALL, stats.dtype), stats)


def _added(total: jax.Array, part: jax.Array, starts: tuple[_First, ...]) -> jax.Array:
    old = total
    if total.shape != part.shape:
        old = jax.lax.dynamic_slice(total, _indices(total, starts), part.shape)
    return _put(total, old + part.astype(total.dtype), starts)


def _with_bias_part(
    total: jax.Array, part: jax.Array, row: int, column: _First
) -> jax.Array:
    """Return the gradient of a bias with that of a block of it added."""
    if total.shape[2] == 1:
        row = 0
        # The block has rows of its own where it was shifted.
        part = jnp.sum(part, axis=2, keepdims=True, dtype=total.dtype)
    return _added(total, part, (0, 0, row, column))
