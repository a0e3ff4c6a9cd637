# SPDX-License-Identifier: Apache-2.0
"""What a device computes its share of: checked arguments, and the arrays it holds."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.lowering import align_varying
from jax_cudnn.ops.arguments import check_flag, options, why_symbolic
from jax_cudnn.ops.attend import Operands
from jax_cudnn.ops.callers import on_behalf_of
from jax_cudnn.ops.sdpa_operands import canonicalize, check_scale, check_window
from jax_cudnn.parallel.axes import AxisName, axis_size
from jax_cudnn.parallel.order import all_positions, check_order, positions_of
from jax_cudnn.parallel.schedule import Band, Order


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is known of a call while it is traced; hashable."""

    axis_name: AxisName
    count: int
    order: Order
    scale: float
    is_causal: bool
    window: tuple[int, ...]
    call: Options

    @property
    def band(self) -> Band:
        """Which keys causality and the window let a query see."""
        return Band.of(is_causal=self.is_causal, window=self.window)

    @property
    def device(self) -> jax.Array:
        """The number of this device along the axis."""
        return jax.lax.axis_index(self.axis_name)

    def attributes(
        self, *, is_causal: bool = False, window: tuple[int, ...] = ()
    ) -> SdpaAttributes:
        """Return the attributes of a call on a part of the queries and keys."""
        return SdpaAttributes(scale=self.scale, is_causal=is_causal, window=window)


class Shares(NamedTuple):
    """A device's share of the operands; absent ones are None.

    Letters as in `sdpa`, with s and t for one device's tokens and n devices:

    * query (b, s, h, d), key (b, t, k, d), value (b, t, k, e);
    * bias and mask ([b], [h], [s], [n t]), in brackets what may be 1, the keys of all
      devices one after another;
    * query_lengths and key_lengths (b, 1, 1, 1), of whole sequences;
    * shift ([b], [h], [s], 1), to be subtracted from the bias (see `bias_shift`). The
      log-sum-exp is that of the scores with it subtracted.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    shift: jax.Array | None = None


class Checked(NamedTuple):
    """A call's arguments, checked, and what its result is made of."""

    problem: Problem
    operands: Operands
    has_batch: bool
    with_stats: bool


def check_arguments(
    op: str,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    axis_name: AxisName,
    order: Order,
    scale: float | None,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    local_window_size: int | tuple[int, int] | None,
    implementation: Implementation | None,
    plan: PlanOptions | None,
    return_residual: bool,
) -> Checked:
    """Return the arguments of one of the functions with these arguments, checked."""
    count = axis_size(op, axis_name)
    order = check_order(op, order)
    call = options(op, implementation, plan)
    with on_behalf_of(op, "sdpa"):
        operands, has_batch = canonicalize(
            query,
            key,
            value,
            bias,
            mask,
            query_seq_lengths,
            key_value_seq_lengths,
            shares=count,
        )
        d = operands.query.shape[3]
        problem = Problem(
            axis_name=axis_name,
            count=count,
            order=order,
            scale=check_scale(scale, d, operands.query.dtype),
            is_causal=check_flag("sdpa", "is_causal", is_causal),
            window=check_window(local_window_size),
            call=call,
        )
        with_stats = check_flag("sdpa", "return_residual", return_residual)
    if reason := why_symbolic(**operands.given):
        raise ValueError(f"{op}: {reason} Make the program for one shape.")
    for name, x in (("query", operands.query), ("key", operands.key)):
        if order == "zigzag" and x.shape[1] % 2:
            raise ValueError(
                f"{op}: each device holds {x.shape[1]} tokens of {name}. In zigzag "
                "order it holds two chunks of equal length. Pad the sequence to a "
                f"multiple of 2 * {count} tokens, and pass its length."
            )
    return Checked(
        problem=problem,
        operands=_aligned(problem, operands),
        has_batch=has_batch,
        with_stats=with_stats,
    )


def _aligned(problem: Problem, operands: Operands) -> Operands:
    """Return the operands, marked as differing between all devices of the axis.

    What devices share gets the sum of their gradients on the way back.
    """
    *aligned, _ = align_varying([*operands.given.values(), problem.device])
    return operands._replace(**dict(zip(operands.given, aligned, strict=True)))


# --- biases ---------------------------------------------------------------------------


def without_row_bias(
    operands: Operands,
) -> tuple[Operands, jax.Array | None]:
    """Return the operands without a bias that is one number for all keys of a row.

    It moves the row's log-sum-exp, and hides the row if it is -inf (`with_row_bias`).
    """
    bias = operands.bias
    if bias is None or bias.shape[3] != 1:
        return operands, None
    return operands._replace(bias=None), bias


def with_row_bias(
    bias: jax.Array | None, output: jax.Array, stats: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return output (b, s, h, e) and log-sum-exp (b, s, h) with such a bias."""
    if bias is None:
        return output, stats
    rows = jnp.swapaxes(bias[..., 0], 1, 2).astype(stats.dtype)
    is_hidden = rows == -jnp.inf
    output = jnp.where(is_hidden[..., None], jnp.zeros((), output.dtype), output)
    # Neither side of a row without keys gets a gradient.
    is_dead = is_hidden | (stats == -jnp.inf)
    return output, jnp.where(is_dead, -jnp.inf, stats + rows)


# Log-sum-exps that are further than this from 0 lose digits that matter, see
# legalize/far_rows.py. In every float dtype, numbers that are larger differ by numbers
# that it holds exactly, as far as these matter beside the largest.
_FAR = 2.0**10


def bias_shift(problem: Problem, operands: Operands) -> jax.Array | None:
    """Return what to subtract from each row of the bias, as ([b], [h], [s], 1).

    That is the row's largest number where this is far from 0, as in a row of -1e9. The
    softmax does not depend on it. The parts of a row meet through their log-sum-exps,
    which have no digits left for the number of keys beside -1e9.

    Batch entries and heads that share a bias share the shift: a bias of their own would
    take many times the memory.
    """
    bias = operands.bias
    if bias is None:
        return None
    is_seen = _seen(problem, operands)
    seen = bias if is_seen is None else jnp.where(is_seen, bias, -jnp.inf)
    shared = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
    largest = jnp.max(seen, axis=(*shared, 3), keepdims=True)
    largest = jax.lax.stop_gradient(largest)
    is_far = jnp.isfinite(largest) & (jnp.abs(largest) > _FAR)
    return jnp.where(is_far, largest, jnp.zeros((), largest.dtype))


def _seen(problem: Problem, operands: Operands) -> jax.Array | None:
    """Return which keys of all devices each query sees, None for all of them."""
    count, order = problem.count, problem.order
    s, t = operands.query.shape[1], operands.key.shape[1]
    columns = jnp.asarray(all_positions(count, t, order))[None, None, None, :]
    is_seen = operands.mask
    if operands.key_lengths is not None:
        is_inside = columns < operands.key_lengths
        is_seen = is_inside if is_seen is None else is_seen & is_inside
    if not problem.band.is_everything:
        rows = positions_of(problem.device, count, s, order)[None, None, :, None]
        difference = columns - rows
        lowest, highest = (
            int(max(-(2**30), min(x, 2**30)))
            for x in (problem.band.lowest, problem.band.highest)
        )
        is_near = (lowest <= difference) & (difference <= highest)
        is_seen = is_near if is_seen is None else is_seen & is_near
    return is_seen
