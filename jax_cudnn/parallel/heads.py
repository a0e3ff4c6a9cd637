# SPDX-License-Identifier: Apache-2.0
"""Attention in which devices exchange tokens for heads, before and after one call."""

import jax
import jax.numpy as jnp

from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.ops.attend import Operands, attend
from jax_cudnn.parallel.blocks import Partial
from jax_cudnn.parallel.order import from_zigzag, to_zigzag
from jax_cudnn.parallel.problem import Problem


def attend_by_heads(
    op: str, problem: Problem, operands: Operands, *, with_stats: bool
) -> Partial:
    """Return output and log-sum-exp, in which a device has whole sequences.

    The log-sum-exp is left empty where it is not asked for.
    """
    query, key, value = operands.query, operands.key, operands.value
    repeats = _repeats(op, problem.count, query.shape[2], key.shape[2])
    if repeats != 1:
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    is_natural = _needs_order(problem, operands)

    def to_heads(x: jax.Array) -> jax.Array:
        return _swapped(problem, x, split=2, concat=1, from_order=is_natural)

    def to_tokens(x: jax.Array) -> jax.Array:
        x = to_zigzag(x, problem.count) if is_natural else x
        return _swapped(problem, x, split=1, concat=2)

    local = Operands(
        query=to_heads(query),
        key=to_heads(key),
        value=to_heads(value),
        bias=_of_own_heads(problem, operands.bias, is_natural=is_natural),
        mask=_of_own_heads(problem, operands.mask, is_natural=is_natural),
        query_lengths=operands.query_lengths,
        key_lengths=operands.key_lengths,
    )
    attributes = SdpaAttributes(
        scale=problem.scale, is_causal=problem.is_causal, window=problem.window
    )
    results = attend(local, attributes, problem.call, with_stats=with_stats)
    output = to_tokens(results[0])
    if not with_stats:
        return Partial(output=output, stats=jnp.zeros((0,), jnp.float32))
    stats = jnp.transpose(results[1][..., 0], (0, 2, 1))
    return Partial(output=output, stats=to_tokens(stats))


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


def _needs_order(problem: Problem, operands: Operands) -> bool:
    """Whether the sequences have to be in their order: attention itself has none."""
    has_lengths = operands.query_lengths is not None or operands.key_lengths is not None
    return problem.order == "zigzag" and (has_lengths or not problem.band.is_everything)


def _swapped(
    problem: Problem, x: jax.Array, *, split: int, concat: int, from_order: bool = False
) -> jax.Array:
    x = jax.lax.all_to_all(
        x, problem.axis_name, split_axis=split, concat_axis=concat, tiled=True
    )
    return from_zigzag(x, problem.count, concat) if from_order else x


def _of_own_heads(
    problem: Problem, x: jax.Array | None, *, is_natural: bool
) -> jax.Array | None:
    """Return a bias or mask for all tokens and this device's heads.

    Given are all heads of the rows of this device's queries.
    """
    if x is None:
        return None
    has_heads, has_rows = x.shape[1] != 1, x.shape[2] != 1
    found: jax.Array = x
    if has_heads and has_rows:
        found = _swapped(problem, x, split=1, concat=2)
    elif has_rows:
        found = jax.lax.all_gather(x, problem.axis_name, axis=2, tiled=True)
    elif has_heads:
        size = x.shape[1] // problem.count
        found = jax.lax.dynamic_slice_in_dim(x, problem.device * size, size, axis=1)
    for axis in (2, 3):
        if is_natural and found.shape[axis] != 1:
            found = from_zigzag(found, problem.count, axis)
    return found
