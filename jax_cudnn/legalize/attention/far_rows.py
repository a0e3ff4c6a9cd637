# SPDX-License-Identifier: Apache-2.0
"""Computes by XLA the gradient of attention rows whose log-sum-exp is far from 0.

Kernels compute probabilities again as exp(score - stats) in f32. A row whose bias is
-1e9 for every key, as padding has it, has stats of -1e9: f32 has no digits left there
for the number of keys, and the probabilities are too large by that number. The saved
log-sum-exp cannot be repaired, and a bias that is shifted row by row costs as much as
reading and writing all of it in each call.

So the kernel gets a log-sum-exp for such rows that makes their probabilities 0, and the
reference adds their gradients, a few heads and rows at a time, where a cotangent is not
0. Whether there are such rows, the log-sum-exp tells before the kernel runs.

All of this is in every program with a bias and rarely runs, so it is written to compile
fast: docs/internals/legalisation.md says how.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import SdpaAttributes, Tensor
from jax_cudnn.graph.attention.score_mod import OPERANDS, largest
from jax_cudnn.legalize.attention.masks import DEAD_STATS, unfolded
from jax_cudnn.legalize.attention.passes import attention_pass, attributes_of
from jax_cudnn.legalize.common.editor import Env, GraphEditor, SlowPath
from jax_cudnn.reference.attention import sdpa
from jax_cudnn.reference.interpreter import to_logical

# Below it, f32 numbers are at most 2^-13 apart: a probability is then off by a part of
# that, which is less than half an ulp of f16.
_FAR = 2.0**11
# A kernel multiplies the log-sum-exp by log2(e) in f32.
_LARGEST_STATS = 2e38
# Scores that the reference may keep at once; a few arrays of them, 64 MiB each.
_MOST_SCORES = 2**24


def may_be_far(editor: GraphEditor) -> bool:
    """Whether there may be such rows: a bias makes them, or unbounded steps."""
    attributes = attributes_of(editor)
    if attributes.is_partial:
        return False  # Nobody would know their digits.
    steps = attributes.score_mod
    return "bias" in editor.tensors or (bool(steps) and largest(steps) > _FAR / 2)


@attention_pass(when=may_be_far)
def take_far_rows(editor: GraphEditor) -> None:
    """Take rows with |stats| over 2^11 from the kernel and add their gradients.

    It sees what the user gave and gets.
    """
    rows = _FarRows(
        attributes=attributes_of(editor),
        inputs={role: editor.tensors[role] for role in editor.inputs},
        outputs={role: editor.tensors[role] for role in editor.outputs},
    )

    def before(env: Env) -> None:
        stats = env["stats"]
        # Above every score of the row, also where those are huge.
        least, most = (stats.dtype.type(x) for x in (DEAD_STATS, _LARGEST_STATS))
        hidden = jax.lax.clamp(least, 8 * stats, most)
        env["stats"] = jax.lax.select(is_far(stats), hidden, stats)

    def after(env: Env, results: Env) -> None:
        results.update(rows.add_to(results, env))

    editor.slow_path = SlowPath(
        is_needed=lambda env: jnp.any(is_far(env["stats"])), before=before, after=after
    )


@jax.jit
def is_far(stats: jax.Array) -> jax.Array:
    """Whether a row's log-sum-exp has lost digits; -inf, where it sees no key, not."""
    return (jnp.abs(stats) > _FAR) & (stats != -jnp.inf)


@dataclass(frozen=True, kw_only=True)
class _FarRows:
    """The far rows of a gradient, its tensors by role as the user has them."""

    attributes: SdpaAttributes
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def _counts(self) -> tuple[int, int]:
        """The numbers of batch entries and of key heads that are computed at once.

        One of each, but all that share a bias where its gradient is their sum: that is
        rounded once then.
        """
        b, k = self.inputs["key"].dims[:2]
        if "grad_bias" not in self.outputs:
            return 1, 1
        bias = self.inputs["bias"]
        return (b if bias.dims[0] == 1 else 1, k if bias.dims[1] == 1 else 1)

    def add_to(self, results: Env, env: Env) -> Env:
        """Return the kernel's results with the gradients of far rows added."""
        b, k = self.inputs["key"].dims[:2]
        at_once = self._counts
        grid = (b // at_once[0], k // at_once[1])
        is_read = self._is_read(env)
        split = (grid[0], at_once[0], grid[1], -1)
        is_group_read = jnp.any(jnp.reshape(is_read, split), axis=(1, 3)).ravel()
        end = is_group_read.size
        # 4 batch entries of 2 key heads are 8 groups. If only groups 3 and 6 have far
        # rows, `pending` is (8, 8, 8, 3, 8, 8, 6, 8): the loop goes from 3 to 6 to 8.
        numbers = jax.lax.iota(jnp.int32, end)
        # The numbers of the groups to compute; `end` in the places of the others.
        pending = jax.lax.select(is_group_read, numbers, jnp.full_like(numbers, end))

        def following(number: jax.Array) -> jax.Array:
            later = jax.lax.select(
                pending > number, pending, jnp.full_like(pending, end)
            )
            return jnp.min(later)

        def body(state: tuple[jax.Array, Env]) -> tuple[jax.Array, Env]:
            number, sums = state
            group = _Group(
                place=_place(number, grid),
                counts=at_once,
                heads=self.inputs["query"].dims[1] // k,
            )
            return following(number), self._add_group(group, sums, env, is_read)

        state = (jnp.min(pending), {role: results[role] for role in self.outputs})
        return jax.lax.while_loop(lambda state: state[0] < end, body, state)[1]

    def _is_read(self, env: Env) -> jax.Array:
        """Return, as (b, h, s, 1), which rows are far and have a cotangent."""
        has_cotangent = (
            to_logical(
                self.inputs[role],
                jnp.any(
                    env[role] != 0, self.inputs[role].order.index(3), keepdims=True
                ),
            )
            for role in ("grad_output", "grad_stats")
            if role in env
        )
        stats = to_logical(self.inputs["stats"], env["stats"])
        return is_far(stats) & functools.reduce(jax.lax.bitwise_or, has_cotangent)

    def _add_group(
        self, group: "_Group", sums: Env, env: Env, is_read: jax.Array
    ) -> Env:
        given = {
            role: _taken(env[role], *group.span(role, tensor))
            for role, tensor in self.inputs.items()
            if role not in ("output", "stats")
        }
        is_of_rows = "bias" in self.inputs and self.inputs["bias"].dims[3] == 1
        if is_of_rows and "sinks" not in self.inputs:
            # The forward kernel never saw it either: the softmax does not depend on it.
            del given["bias"]
        stats = replace(self.inputs["stats"], order=(0, 1, 2, 3))
        given["is_read"] = _taken(is_read, *group.span("stats", stats))
        found = _gradients(self.attributes, given, self.outputs)
        return {
            role: _added(sums[role], found[role], *group.span(role, tensor))
            for role, tensor in self.outputs.items()
        }


# Of a group: the numbers of its batch entries and of its key heads. One that is known
# is a number of Python's, of which nothing is computed in the program.
_Place = tuple[jax.Array | int, jax.Array | int]


def _place(number: jax.Array, grid: tuple[int, int]) -> _Place:
    if 1 in grid:
        return (0, number) if grid[0] == 1 else (number, 0)
    count = jnp.int32(grid[1])
    return jax.lax.div(number, count), jax.lax.rem(number, count)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Batch entries and key heads, with the query heads that those serve."""

    place: _Place
    counts: tuple[int, int]
    heads: int

    def span(self, role: str, tensor: Tensor) -> tuple[tuple[Any, ...], "_Span"]:
        """Return where the group's part of a tensor starts, and its form."""
        starts: dict[int, Any] = {}
        sizes = list(tensor.dims)
        for axis, (index, count) in enumerate(
            zip(self.place, self.counts, strict=True)
        ):
            is_of_keys = role.removeprefix("grad_") in ("key", "value")
            size = count * (self.heads if axis == 1 and not is_of_keys else 1)
            if tensor.dims[axis] not in (1, size):
                sizes[axis] = size
                starts[axis] = index * size if size != 1 else index
        return tuple(starts.values()), _Span(tuple(starts), tuple(sizes), tensor.order)


class _Span(NamedTuple):
    """Part of a stored tensor: the axes that it is cut along, its sizes, the order."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def slice_of(self, x: jax.Array, starts: tuple[Any, ...]) -> jax.Array:
        """Return the part as it is stored."""
        sizes = [self.sizes[axis] for axis in self.order]
        return jax.lax.dynamic_slice(
            x, self._starts(starts), sizes, allow_negative_indices=False
        )

    def put(self, x: jax.Array, part: jax.Array, starts: tuple[Any, ...]) -> jax.Array:
        """Return the stored tensor with the part replaced."""
        return jax.lax.dynamic_update_slice(
            x, part, self._starts(starts), allow_negative_indices=False
        )

    def _starts(self, starts: tuple[Any, ...]) -> list[Any]:
        known = dict(zip(self.axes, starts, strict=True))
        # All of one dtype, also where JAX makes 64-bit arrays of numbers.
        return [known.get(axis, np.int32(0)) for axis in self.order]


# Functions of their own, which a program has once for all tensors of a form.
@functools.partial(jax.jit, static_argnums=2)
def _taken(x: jax.Array, starts: tuple[Any, ...], span: _Span) -> jax.Array:
    """Return a part of a tensor, its axes in logical order."""
    if starts:
        # Apart from what reads it: else XLA copies all of the tensor, transposed.
        part = jax.lax.optimization_barrier(span.slice_of(x, starts))
    else:
        part = unfolded(x)
    return jnp.transpose(part, [span.order.index(axis) for axis in range(4)])


@functools.partial(jax.jit, static_argnums=3)
def _added(
    x: jax.Array, more: jax.Array, starts: tuple[Any, ...], span: _Span
) -> jax.Array:
    """Return a tensor with something added to a part of it."""
    old = span.slice_of(x, starts)
    total = old.astype(more.dtype) + jnp.transpose(more, span.order)
    return span.put(x, total.astype(x.dtype), starts)


def _gradients(
    attributes: SdpaAttributes,
    given: Mapping[str, jax.Array],
    wanted: Collection[str],
) -> Env:
    """Return the gradients of the rows that are read, in f32 (f64 for f64), by blocks.

    ``given`` holds logical arrays by role, and ``is_read`` as (b, h, s, 1).
    """
    b, h, s, _ = given["query"].shape
    t = given["key"].shape[2]
    blocks = -(-s // max(1, min(s, _MOST_SCORES // (b * h * t))))
    if blocks == 1:
        return _of_rows(attributes, given, wanted)
    # Ten rows in three blocks of 4 rows: the blocks begin at rows 0, 4 and 6. Rows 6
    # and 7 are in two blocks, and `is_read` is False for them in the last one.
    size = -(-s // blocks)
    more = [role for role in ("bias", "sinks") if f"grad_{role}" in wanted]
    roles = ["query", "key", "value", *more]

    def block(number: jax.Array, totals: Env) -> Env:
        # The last block may begin before its rows, to be of the same size.
        start = jnp.minimum(number * size, s - size)
        rows = start + jnp.arange(size, dtype=jnp.int32)[None, None, :, None]
        part = {
            role: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)
            if role in _ALONG_ROWS and x.shape[2] != 1
            else x
            for role, x in given.items()
        }
        part["is_read"] = part["is_read"] & (rows >= number * size)
        found = _of_rows(attributes, part, wanted, first_row=start, row_count=s)
        return {
            role: _add_rows(totals[role], found[role], start)
            if role in _ALONG_ROWS
            else totals[role] + found[role]
            for role in totals
        }

    # Like the operands, so that they vary inside shard_map as those do.
    is_double = given["query"].dtype == jnp.float64
    dtype = jnp.float64 if is_double else jnp.float32
    totals = {f"grad_{role}": jnp.zeros_like(given[role], dtype) for role in roles}
    return jax.lax.fori_loop(0, blocks, block, totals)


def _of_rows(
    attributes: SdpaAttributes,
    given: Mapping[str, jax.Array],
    wanted: Collection[str],
    **rows: Any,
) -> Env:
    """Return the reference's gradients of the rows that are read."""
    part = dict(given)
    is_read = part.pop("is_read")
    for role in ("grad_output", "grad_stats"):
        if role in part:
            part[role] = jnp.where(is_read, part[role], 0)
    return sdpa.gradients(attributes, part, wanted=wanted, is_rare=True, **rows)


_ALONG_ROWS = (
    *("query", "bias", "mask", *OPERANDS, "grad_output", "grad_stats", "is_read"),
    *("grad_query", "grad_bias"),
)


def _add_rows(total: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    if total.shape[2] == 1:
        return total + rows
    old = jax.lax.dynamic_slice_in_dim(total, start, rows.shape[2], axis=2)
    return jax.lax.dynamic_update_slice_in_dim(total, old + rows, start, axis=2)
