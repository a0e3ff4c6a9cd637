# SPDX-License-Identifier: Apache-2.0
"""Runs a device's calls of one step: attention on parts of its queries and keys.

Forward, the results of calls are combined in f32. Backward, each call's gradients
follow from the output and the log-sum-exp of all keys, and are summed in f32.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.graph.attention.score_mod import Steps, largest
from jax_cudnn.lowering import align_varying
from jax_cudnn.ops.attention.attend import Operands, attend
from jax_cudnn.ops.attention.parts import part_gradients
from jax_cudnn.ops.attention.visibility.predicates import Predicate, Tokens
from jax_cudnn.parallel.combining import combine
from jax_cudnn.parallel.order import run_length
from jax_cudnn.parallel.problem import Problem, Shards, membership, predicates_of
from jax_cudnn.parallel.schedule import Call, Step
from jax_cudnn.reference.attention.dropout import kept_at

_State = TypeVar("_State")
# The first column of a call: known while tracing, or depending on the device.
_First = int | jax.Array


class TokenPositions(NamedTuple):
    """The positions of the tokens at hand, as far as they matter.

    ``positions`` are those in the sequence. ``ends`` (b, sequences, 1, 1) is how many
    of the tokens at hand lie before the end of each sequence, and ``begins`` how many
    before its first token; where it is None, sequences begin with the first token.
    """

    positions: jax.Array | None = None
    begins: jax.Array | None = None
    ends: jax.Array | None = None


class Keys(NamedTuple):
    """The keys at hand, and where they come from.

    ``first`` is the column of bias and mask that belongs to the first of them, and
    ``is_own`` whether they are those of the device's own tokens, or of all devices.
    """

    key: jax.Array
    value: jax.Array
    first: _First
    places: TokenPositions
    is_own: bool = True


class Partial(NamedTuple):
    """Attention over some keys: output (b, s, h, e) and log-sum-exp (b, s, h)."""

    output: jax.Array
    stats: jax.Array


class Cotangents(NamedTuple):
    """The results for all keys, and their cotangents: a gradient starts from these.

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
    scores: dict[str, jax.Array]


def zeros_like(x: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return zeros that differ between devices as x does, in the eyes of shard_map."""
    return align_varying([jnp.zeros(shape, dtype), x])[0]


def accumulator(x: jax.Array) -> jnp.dtype:
    """Return the dtype in which sums of x are kept."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def no_gradients(shards: Shards, keys: Keys, wanted: tuple[str, ...]) -> Gradients:
    """Return sums of gradients, of the scores' operands those that are wanted."""
    like, dtype = shards.query, accumulator(shards.query)
    scores: dict[str, jax.Array] = {}
    for role, x in shards.scores.items():
        if role in wanted:
            # Each number of it gets one gradient, unless rows or keys share it.
            is_sum = x.shape[2] != shards.query.shape[1] or x.shape[3] == 1
            scores[role] = zeros_like(like, x.shape, dtype if is_sum else x.dtype)
    return Gradients(
        query=zeros_like(like, shards.query.shape, dtype),
        key=zeros_like(like, keys.key.shape, dtype),
        value=zeros_like(like, keys.value.shape, dtype),
        scores=scores,
    )


def attend_step(
    problem: Problem,
    step: Step,
    shards: Shards,
    queries: TokenPositions,
    keys: Keys,
    before: Partial | None,
) -> Partial:
    """Return attention over the keys of before, if any, and those of this step."""
    block = _Block(problem, step, shards, queries, keys)

    def run(call: Call, first: _First, state: Partial | None) -> Partial:
        output, stats = attend(
            block.operands(call, first),
            block.attributes(call),
            problem.call,
            with_stats=True,
        )
        stats = jnp.transpose(stats[..., 0], (0, 2, 1))
        new = Partial(output=output, stats=stats)
        return _combined(state, new, call.rows)

    if before is None and not _begins_with_all_rows(step, shards):
        before = _nothing_seen(shards)
    total = _run(block, run, before)
    assert total is not None, "either before is not None, or each device has a call"
    return total


def gradient_step(
    problem: Problem,
    step: Step,
    shards: Shards,
    queries: TokenPositions,
    keys: Keys,
    cotangents: Cotangents,
    before: Gradients,
) -> Gradients:
    """Return gradients with those of this step added."""
    block = _Block(problem, step, shards, queries, keys)

    def run(call: Call, first: _First, state: Gradients) -> Gradients:
        part = block.operands(call, first)
        stats = _rows(cotangents.stats, call, axis=2)
        if part.bias is not None or may_be_far(problem.attributes.score_mod):
            stats = _without_far_rows(stats)
        grad_stats = cotangents.grad_stats
        found = part_gradients(
            part,
            block.attributes(call),
            problem.call,
            output=_rows(cotangents.output, call, axis=1),
            stats=stats,
            grad_output=_rows(cotangents.grad_output, call, axis=1),
            grad_stats=None if grad_stats is None else _rows(grad_stats, call, axis=2),
            scores=tuple(state.scores),
        )
        rows = call.rows[0]
        return Gradients(
            query=_added(state.query, found["query"], (0, rows)),
            key=_added(state.key, found["key"], (0, first)),
            value=_added(state.value, found["value"], (0, first)),
            scores={
                role: _with_block(total, found[role], rows, keys.first + first)
                for role, total in state.scores.items()
            },
        )

    return _run(block, run, before)


# --- blocks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """A device's queries and the keys at hand in a step."""

    problem: Problem
    step: Step
    shards: Shards
    queries: TokenPositions
    keys: Keys

    def attributes(self, call: Call) -> SdpaAttributes:
        """Return the attributes of one call."""
        longest = self.problem.attributes.longest
        if call.is_shifted:
            longest = ()
        elif longest:
            sizes = (call.rows[1], call.columns[1])
            longest = tuple(map(min, zip(longest, sizes, strict=True)))
            longest = () if longest == sizes else longest
        return self.problem.attributes_of(call, longest)

    def operands(self, call: Call, first: _First) -> Operands:
        """Return the operands of one call, whose columns begin with the first."""
        shards, keys, count = self.shards, self.keys, call.columns[1]

        def scores_like(x: jax.Array) -> jax.Array:
            x = _rows(x, call, axis=2)
            if x.shape[3] == 1:
                return x
            return _slice(x, keys.first + first, count, axis=3)

        given = {role: scores_like(x) for role, x in shards.scores.items()}
        if "bias" in given and shards.shift is not None:
            given["bias"] = given["bias"] - _rows(shards.shift, call, axis=2)
        mask = None if shards.mask is None else scores_like(shards.mask)
        for predicate in self._predicates(call):
            is_seen = predicate.seen(*self._tokens(call, first))
            mask = is_seen if mask is None else mask & is_seen
        if mask is not None:
            given["mask"] = mask
        if shards.query_starts is None or not call.is_shifted:
            given |= _within("query", self.queries, *call.rows)
            given |= _within("key", keys.places, first, count)
            if "query_starts" in given and call.is_causal:
                given |= self._from_visible(given, call, first)
        if shards.dropout_seed is not None:
            given["dropout_mask"] = self._kept(call, first)
        return Operands.of(
            {
                **given,
                "query": _rows(shards.query, call, axis=1),
                "key": _slice(keys.key, first, count, axis=1),
                "value": _slice(keys.value, first, count, axis=1),
            }
        )

    def _from_visible(
        self, given: dict[str, jax.Array], call: Call, first: _First
    ) -> dict[str, jax.Array]:
        """Return sequences that begin with their first query that sees a key.

        Only in striped order may there be one before it, of which the device of the
        keys has no token as early.
        """
        if self.problem.order != "striped":
            return {}
        starts, lengths = given["query_starts"], given["query_lengths"]
        own, others = (
            jnp.take(tokens.numbers, places, mode="clip")
            for tokens, places in zip(
                self._tokens(call, first), (starts, given["key_starts"]), strict=True
            )
        )
        blind = jnp.minimum((own < others).astype(lengths.dtype), lengths)
        return {"query_starts": starts + blind, "query_lengths": lengths - blind}

    def _predicates(self, call: Call) -> tuple[Predicate, ...]:
        """Return the predicates that are a mask in a call."""
        found = predicates_of(self.problem, self.shards)
        packing = membership(self.shards) if call.is_shifted else None
        return found if packing is None else (*found, packing)

    def _tokens(self, call: Call, first: _First) -> tuple[Tokens, Tokens]:
        rows, columns = self.queries.positions, self.keys.places.positions
        assert rows is not None
        assert columns is not None
        count = call.columns[1]
        return (
            Tokens(call.rows[1], _slice(rows, *call.rows, axis=0)),
            Tokens(count, _slice(columns, first, count, axis=0)),
        )

    def _kept(self, call: Call, first: _First) -> jax.Array:
        """Return which probabilities dropout keeps, 1 or 0 in query's dtype."""
        problem, shards = self.problem, self.shards
        assert shards.dropout_seed is not None
        assert shards.dropout_offset is not None
        queries, keys = self._tokens(call, first)
        runs = (run_length(problem.order, shards.query.shape[1]), 0)
        if self.keys.is_own:
            runs = (runs[0], run_length(problem.order, shards.key.shape[1]))
        columns = [x for each in self.step.columns_of for x in each]
        is_kept = kept_at(
            problem.attributes.dropout,
            shards.dropout_seed,
            shards.dropout_offset,
            tuple(x.shape[1] * problem.count for x in (shards.query, shards.key)),
            (queries.numbers, keys.numbers),
            (
                math.gcd(runs[0], *call.rows),
                math.gcd(runs[1], call.columns[1], *columns),
            ),
        )
        return is_kept.astype(shards.query.dtype)

    def may_be_seen(self, call: Call, first: _First) -> jax.Array | None:
        """Return whether a call may have something to do; None where it has.

        The keys of the device's own tokens always do, and so does, in striped order,
        every device's part of the sequence.
        """
        if not self.step.shift or self.problem.order == "striped":
            return None
        bounds = [*predicates_of(self.problem, self.shards)]
        if (packing := membership(self.shards)) is not None:
            bounds.append(packing)
        if not bounds:
            return None
        tokens = self._tokens(call, first)
        found = (predicate.may_be_seen(*tokens) for predicate in bounds)
        return functools.reduce(jnp.logical_and, found)


# --- programs -------------------------------------------------------------------------


def _run(
    block: _Block, run: Callable[[Call, _First, _State], _State], state: _State
) -> _State:
    """Run this device's program of a step: its calls, one after another."""
    problem, step = block.problem, block.step

    def where_needed(call: Call, first: _First, state: _State) -> _State:
        is_needed = block.may_be_seen(call, first)
        if is_needed is None:
            return run(call, first, state)
        return jax.lax.cond(
            is_needed, lambda x: run(call, first, x), lambda x: x, state
        )

    # For example, the second step of two devices with 4 tokens each in zigzag order,
    # under a causal mask. Device 0 runs program 0, queries 2:4 with keys 0:4, and
    # device 1 program 1, queries 0:4 with keys 0:2. `table` is [(0,), (0,)]: the keys
    # of each device's only call begin at 0. A start that is the same for all devices of
    # a program is a number, and not read from an array.
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
                state = where_needed(call, first, state)
            return state

        return branch

    def firsts() -> jax.Array:
        return jnp.asarray(table, jnp.int32)[problem.device]

    if len(step.programs) == 1:
        return program(0)(state)
    number = jnp.asarray(step.program_of, jnp.int32)[problem.device]
    branches = [program(i) for i in range(len(step.programs))]
    return jax.lax.switch(number, branches, state)


def _within(
    kind: str, places: TokenPositions, first: _First, count: int
) -> dict[str, jax.Array]:
    """Return lengths and starts of the sequences, cut to a call's tokens, by role."""
    if places.ends is None:
        return {}
    ends = jnp.clip(places.ends - first, 0, count)
    if places.begins is None:
        return {f"{kind}_lengths": ends}
    begins = jnp.clip(places.begins - first, 0, count)
    return {f"{kind}_lengths": ends - begins, f"{kind}_starts": begins}


def _rows(x: jax.Array, call: Call, axis: int) -> jax.Array:
    return x if x.shape[axis] == 1 else _slice(x, *call.rows, axis=axis)


def _slice(x: jax.Array, first: _First, count: int, axis: int) -> jax.Array:
    if isinstance(first, int):
        return jax.lax.slice_in_dim(x, first, first + count, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, first, count, axis=axis)


def _begins_with_all_rows(step: Step, shards: Shards) -> bool:
    """Whether the first call of each device is on all of its queries."""
    everything = (0, shards.query.shape[1])
    return all(calls and calls[0].rows == everything for calls in step.programs)


def _nothing_seen(shards: Shards) -> Partial:
    """Return attention over no key."""
    b, s, h, _ = shards.query.shape
    e, dtype = shards.value.shape[3], accumulator(shards.query)
    output = zeros_like(shards.query, (b, s, h, e), dtype)
    return Partial(output=output, stats=jnp.full_like(output[..., 0], -jnp.inf))


def _combined(state: Partial | None, part: Partial, rows: tuple[int, int]) -> Partial:
    """Return attention over the keys of both; the part is that of some rows."""
    if state is None:
        return part._replace(output=part.output.astype(part.stats.dtype))
    first, count = rows
    old = Partial(*(_slice(x, first, count, axis=1) for x in state))
    # In JAX 0.10, jnp.where of arrays without elements forgets that devices differ.
    *new, _ = align_varying([*combine(*old, *part), old.stats])
    return Partial(*(_put(x, y, (0, first)) for x, y in zip(state, new, strict=True)))


def _put(x: jax.Array, part: jax.Array, starts: tuple[_First, ...]) -> jax.Array:
    if x.shape == part.shape:
        return part
    return jax.lax.dynamic_update_slice(x, part, _indices(x, starts))


def _indices(x: jax.Array, starts: tuple[_First, ...]) -> list[jax.Array]:
    """Return where a part of x begins, along all axes and in one dtype."""
    zeros = (0,) * (x.ndim - len(starts))
    return [jnp.asarray(each, jnp.int32) for each in (*starts, *zeros)]


# As in legalize/attention/far_rows.py: rows further from 0, and a log-sum-exp above
# every score.
_FAR = 2.0**11
_ABOVE_ALL = 1e30


def may_be_far(steps: Steps) -> bool:
    """Whether a score_mod may move rows far from 0."""
    return bool(steps) and largest(steps) > _FAR / 2


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


def _with_block(
    total: jax.Array, part: jax.Array, row: int, column: _First
) -> jax.Array:
    """Return the gradient of a bias or its like with that of a block of it added."""
    if total.shape[2] == 1:
        row = 0
        if part.shape[2] != 1:
            # The block has rows of its own where it was shifted.
            part = jnp.sum(part, axis=2, keepdims=True, dtype=total.dtype)
    return _added(total, part, (0, 0, row, 0 if total.shape[3] == 1 else column))
