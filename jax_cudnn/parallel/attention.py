# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.parallel.sdpa`: attention of one device's tokens, inside shard_map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.lowering import align_varying
from jax_cudnn.ops.attention.attend import of_rows
from jax_cudnn.ops.attention.options import AttentionCall, SdpaOptions
from jax_cudnn.ops.attention.score_mod import Positions
from jax_cudnn.ops.attention.sinks import with_sinks
from jax_cudnn.ops.attention.visibility.masks import Mask
from jax_cudnn.ops.attention.visibility.predicates import Tokens
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.signatures import takes
from jax_cudnn.parallel.arguments import Layout, check_arguments
from jax_cudnn.parallel.axes import AxisName, axis_size
from jax_cudnn.parallel.blocks import Partial, accumulator
from jax_cudnn.parallel.derivatives import Method as BlockMethod
from jax_cudnn.parallel.derivatives import attention
from jax_cudnn.parallel.gathering import ALL_GATHER
from jax_cudnn.parallel.heads import attend_by_heads
from jax_cudnn.parallel.order import all_positions, natural, positions_of
from jax_cudnn.parallel.padding import tokens_inside, with_padding, without_padding
from jax_cudnn.parallel.problem import (
    Method,
    Problem,
    Shards,
    base_of,
    bias_shift,
    of_stats,
    overrun_of,
    with_row_bias,
    without_row_bias,
)
from jax_cudnn.parallel.ring import RING
from jax_cudnn.parallel.schedule import Order


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    axis_name: AxisName,
    method: Method = ...,
    order: Order = ...,
    return_residual: Literal[False] = ...,
    **options: Unpack[SdpaOptions],
) -> jax.Array: ...


@overload
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | Mask | None = ...,
    *,
    axis_name: AxisName,
    method: Method = ...,
    order: Order = ...,
    return_residual: Literal[True],
    **options: Unpack[SdpaOptions],
) -> tuple[jax.Array, jax.Array]: ...


@takes(AttentionCall, SdpaOptions)
def sdpa(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: AxisName,
    method: Method = "ring",
    order: Order = "contiguous",
    return_residual: bool = False,
    **options: Unpack[SdpaOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Return attention over a sequence that is sharded over devices.

    Call it inside :func:`jax.shard_map`. Each device passes its own tokens, and gets
    the output of its own queries over the keys of all devices: the same rows as from
    :func:`jax_cudnn.sdpa` of the whole sequence. Causality, windows and lengths count
    positions in the whole sequence.

    Each device computes :func:`jax_cudnn.sdpa` on blocks of queries and keys, and adds
    them up by their log-sum-exps (see :func:`combine`), in f32 (f64 for f64). Blocks in
    which causality or a window masks every key are skipped. The outputs of the blocks
    are rounded to query's dtype, and their sum is rounded once more.

    Axis letters: n devices along the axis, b batch, s and t one device's queries and
    keys, h query heads, k key heads, d head size, e value head size. A device sends, in
    elements (i is 1 if keys reach all devices, and less if a window ends earlier):

    ============  =============================  =====================================
    `method`      forward                        backward, beside the forward's
    ============  =============================  =====================================
    "ring"        i (n-1) b t k (d+e)            the same, and 32-bit gradients of all
                                                 keys: i n b t k (d+e)
    "all_gather"  (n-1) b t k (d+e)              the same, and 32-bit gradients of all
                                                 keys: (n-1) b t k (d+e)
    "all_to_all"  (n-1)/n b (s h (d+e) +         what the forward pass sends
                  t k (d+e))
    ============  =============================  =====================================

    * "ring" (default) sends keys while it computes, and holds the keys of two devices
      at a time: for long sequences, any number of heads, and windows, which end the
      ring early.
    * "all_gather" holds the keys of all devices while it computes, and makes few, large
      calls: for few key heads (GQA, MQA), and where the ring's blocks are small.
    * "all_to_all" divides the heads instead of the tokens during the call. It sends
      least where n is large, all devices have the same work in any order of tokens, and
      every kernel of `sdpa` can be used. It needs h to be a multiple of n, and k a
      multiple or a divisor (then key heads are repeated). A mask or bias for which h is
      1 is gathered.

    For the backward pass, "ring" and "all_gather" save the operands and results of the
    device's own tokens. "all_to_all" saves twice as much.

    Under `is_causal` in contiguous order, the last device has about twice the average
    work, and the others wait for it. In zigzag order all have the same: order the
    tokens with :func:`to_zigzag`. Where the sequence consists of packed documents, all
    have the same in striped order (:func:`to_striped`), with "ring".

    All of JAX's transformations apply. Reverse mode runs cuDNN's backward kernel on
    each block, with the log-sum-exp of all keys. Forward mode and second order run the
    jax.numpy reference on each block.

    Args:
      query: (b, s, h, d) or (s, h, d), this device's tokens; bf16, f16, f32 or f64.
      key: (b, t, k, d) or (t, k, d), of query's dtype.
      value: (b, t, k, e) or (t, k, e), of query's dtype.
      bias: broadcasts to (b, h, s, n * t): the rows of this device's queries, with the
        keys of all devices, one device after another. It is sharded along the queries,
        not along the keys. Otherwise as in :func:`jax_cudnn.sdpa`.
      mask: bool, broadcasts to (b, h, s, n * t), like `bias`. Or one of
        :mod:`jax_cudnn.masks`. :class:`~jax_cudnn.masks.Segments` takes the numbers of
        this device's tokens. :class:`~jax_cudnn.masks.Where` and
        :class:`~jax_cudnn.masks.Additive` are like `mask` and `bias`. All others
        describe the whole sequence, in its original order, with arrays that are equal
        on all devices.
      axis_name: the mesh axis, or several, that the sequence is sharded over.
      method: "ring" (default), "all_gather" or "all_to_all".
      order: how the sequence's tokens are shared out: "contiguous" (default), each
        device holding tokens that follow one another, "zigzag", see
        :func:`to_zigzag`, or "striped", see :func:`to_striped`, which "all_gather" does
        not take. Queries, keys, and both token axes of bias and mask are in the same
        order.
      query_seq_lengths: integers (b,), the lengths of whole sequences, the same on all
        devices. Default None: all queries.
      key_value_seq_lengths: likewise, of keys.
      sinks: (h,), the scores of one more key, the same on all devices, as in
        :func:`jax_cudnn.sdpa`.
      dropout_key: as in :func:`jax_cudnn.sdpa`, the same on all devices of the axis.
        The same weights are dropped as there. Along further axes of the mesh, fold
        :func:`jax.lax.axis_index` into it.
      score_mod: as in :func:`jax_cudnn.sdpa`. Positions are those in the whole
        sequence; batch entries and heads are numbered as the operands have them. See
        the notes.
      implementation: as in :func:`jax_cudnn.sdpa`, for each block.
      plan: as in :func:`jax_cudnn.sdpa`, for each block.
      **options: as in :class:`AttentionCall`.
      return_residual: whether to return the log-sum-exp over the keys of all devices
        as well. Default False.

    Returns:
      (b, s, h, e) or (s, h, e), of query's dtype. With `return_residual`, a pair of
      this array and the log-sum-exp (b, s, h) or (s, h), f32 (f64 for f64) and
      differentiable. For queries that see no key, padding among them, it is the sink
      of the head, and -inf without sinks.

    Raises:
      ValueError: an axis that is not there; an unknown `method` or `order`, or
        "all_gather" in striped order; in zigzag order an odd number of tokens on a
        device; heads that "all_to_all" cannot share out; symbolic dimensions; and as
        :func:`jax_cudnn.sdpa`.
      TypeError: an `axis_name` that is no name; and as :func:`jax_cudnn.sdpa`.
      UnsupportedError: as :func:`jax_cudnn.sdpa`, for a block; a `score_mod` that no
        graph can hold.
      LibraryError: as :func:`jax_cudnn.sdpa`.

    Notes:
      With "ring" and "all_gather", a bias that is far from 0 for all keys of a row,
      such as -1e9, is shifted before it meets the scores. So these keep their digits,
      which they lose in :func:`jax_cudnn.sdpa`. Where batch entries or heads share the
      bias, and `mask` or lengths hide a row's other keys in some of them only, the row
      is not shifted there. Its output is then inexact, and its gradient 0.

      Segments, blocks, a prefix and positions at the end of a cache become an array of
      each block of queries and keys while it is computed. Packed sequences are cut to
      the tokens at hand, and run in cuDNN one by one; beside a window that reaches into
      the tokens of another device, and where causality or a window counts positions in
      queries and keys with other sequences, they are such an array too. With "ring",
      blocks of keys of other devices are left out where segments, sequences, a prefix
      or a cache's end leave nothing to see, as is found when the program runs.

      With `dropout_rate`, "ring" and "all_gather" have XLA write which weights each
      block keeps, an array like the block's scores: a kernel that draws for itself
      counts from the first query and key that it is given, by tiles of all its queries,
      and no seed or offset moves that to a block (seen with cuDNN 9.19). With
      "all_to_all" the notes of :func:`jax_cudnn.sdpa` apply.

      What a `score_mod` adds or reads by positions is an array like `bias`, for all
      keys. With "ring" and "all_gather", gradients of rows are 0 where a `score_mod`
      without a bound moves the log-sum-exp further than 2048 from 0.

      All devices run one program. What differs between them is chosen when it runs, by
      conditionals; communication is outside of these. "all_gather" in a causal call has
      a branch for each device, so that each has its own plan to build.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec
      >>> from jax_cudnn import parallel
      >>> mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,))
      >>> tokens = PartitionSpec(None, "seq")
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=tokens, out_specs=tokens)
      ... def attend(q, k, v):
      ...     return parallel.sdpa(q, k, v, axis_name="seq", is_causal=True)
      >>> attend(*jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 8))).shape
      (2, 6, 4, 8)
    """
    op = "parallel.sdpa"
    check_method(op, method)
    count = axis_size(op, axis_name)
    checked = check_arguments(
        op,
        {"query": query, "key": key, "value": value},
        AttentionCall(bias=bias, mask=mask, **options),
        _layout(axis_name, count, method, order),
        return_residual=return_residual,
    )
    results = attend_shards(op, checked.arrays, checked.problem)
    output, *residual = results if checked.has_batch else [x[0] for x in results]
    return (output, residual[0]) if residual else output


def _layout(axis_name: AxisName, count: int, method: Method, order: Order) -> Layout:
    """Return the layout of one device's share of all arrays."""

    def whole(x: jax.Array) -> jax.Array:
        x = jax.lax.all_gather(x, axis_name, axis=1, tiled=True)
        return natural(x, count, order)

    def positions(s: int, t: int) -> Positions:
        device = jax.lax.axis_index(axis_name)
        rows = positions_of(device, count, s, order)
        return rows, jnp.asarray(all_positions(count, t, order))

    return Layout(
        axis_name=axis_name,
        method=method,
        order=order,
        count=count,
        shards=count,
        whole=whole,
        positions=positions,
    )


def attend_shards(
    op: str, arrays: Mapping[str, jax.Array], problem: Problem
) -> tuple[jax.Array, ...]:
    """Return output (b, s, h, e) and, if asked for, log-sum-exp (b, s, h).

    The arrays are those of `check_arguments`, as one device has them.
    """
    shards = Shards.of(_aligned(problem, arrays))
    by = {"ring": RING, "all_gather": ALL_GATHER}.get(problem.method)
    steps = by.steps(problem, shards) if by is not None else ()
    inside = tokens_inside(problem, shards, steps)
    shards = without_padding(shards, inside)
    if by is None:
        with on_behalf_of(op, "sdpa"):
            results = attend_by_heads(op, problem, shards)
    else:
        results = tuple(_by_blocks(by, problem, shards))
    output, *rows = with_padding(shards, inside, *results[: 1 + problem.with_lse])
    if (overrun := overrun_of(problem, shards)) is None:
        return (output, *rows)
    own = shards.query.shape[1]
    positions = positions_of(problem.device, problem.count, own, problem.order)
    return overrun.put(Tokens(own, positions), output, rows)


def _aligned(problem: Problem, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the arrays, marked as differing between all devices of the axis.

    What devices share gets the sum of their gradients on the way back.
    """
    *aligned, _ = align_varying([*arrays.values(), problem.device])
    return dict(zip(arrays, aligned, strict=True))


def check_method(op: str, method: Method) -> None:
    """Raise ValueError where there is no such method."""
    if method not in get_args(Method):
        raise ValueError(
            f"{op}: method={method!r} is not one of "
            f"{', '.join(map(repr, get_args(Method)))}."
        )


def _by_blocks(by: BlockMethod, problem: Problem, shards: Shards) -> Partial:
    shards, row_bias = without_row_bias(shards)
    shift = bias_shift(problem, shards)
    sinks = shards.sinks
    # Beside a bias that is one number for a row, sinks are added last.
    is_last = sinks is None or row_bias is not None
    moved, total = None, shift
    if sinks is not None and not is_last:
        moved, total = _moved(sinks, shift, shards)
    result = attention(by, problem, shards._replace(shift=shift, sinks=moved))
    for number in (total, row_bias):
        result = Partial(*with_row_bias(number, *result))
    if sinks is not None and is_last:
        result = Partial(*with_sinks(*result, sinks))
    return result


def _moved(
    sinks: jax.Array, shift: jax.Array | None, shards: Shards
) -> tuple[jax.Array, jax.Array]:
    """Return sinks ([b], [s], h) less the shift, and what log-sum-exps lack then.

    That is the sum of the shift and the sinks' base, to the last digit.
    """
    wide = jnp.reshape(sinks, (1, 1, -1)).astype(accumulator(shards.query))
    if shift is None:
        return wide, of_rows(base_of(wide))
    rows = of_stats(shift).astype(wide.dtype)
    moved = wide - rows
    is_above = jax.lax.stop_gradient(base_of(moved) > 0)
    return moved, of_rows(jax.lax.stop_gradient(jnp.where(is_above, wide, rows)))
