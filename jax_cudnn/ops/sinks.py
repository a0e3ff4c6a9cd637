# SPDX-License-Identifier: Apache-2.0
"""What does attention become when each head has a sink, a key without a value?

The sink takes its share of the softmax, so the output of the keys is scaled by theirs.
The gradient of the keys is that of a part of all keys (sdpa_parts.py): cuDNN's kernel,
given the output and the log-sum-exp of the keys and the sink. With L this log-sum-exp,
O the output, dL and dO their cotangents, the gradient of a sink is the sum over rows of
exp(sink - L) (dL - rowsum(O dO)).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.lowering import run_by_hand
from jax_cudnn.ops.arguments import as_operand, check_dtype, describe
from jax_cudnn.ops.attend import Operands, attend, of_rows
from jax_cudnn.ops.layouts import Layout, rows_from, rows_to
from jax_cudnn.ops.sdpa_parts import part_gradients


def check_sinks(op: str, sinks: ArrayLike | None, heads: int) -> jax.Array | None:
    """Return the sinks of the query heads as an array, or None for none."""
    if sinks is None:
        return None
    array = as_operand(op, "sinks", sinks)
    check_dtype(op, "sinks", array, advice="Convert them to f32.")
    if array.shape != (heads,):
        raise ValueError(
            f"{op}: sinks is {describe(array)}. It must have one number per query "
            f"head, shape [{heads}]."
        )
    return array


def with_sinks(
    output: jax.Array, lse: jax.Array, sinks: jax.Array, layout: Layout = "bshd"
) -> tuple[jax.Array, jax.Array]:
    """Return output and log-sum-exp (..., s, h) with the sinks.

    A sink takes its share of the softmax and adds nothing to the output. So what the
    keys have is scaled by their share, 1 / (1 + exp(sink - lse)). The sinks are (h,),
    or one for each row, which broadcast to the log-sum-exp.
    """
    sinks = _like_rows(sinks, lse)
    # A query that sees no key has the sink alone, whatever that is.
    is_dead = lse == -jnp.inf
    finite = jnp.where(is_dead, 0, lse)
    share = jnp.where(is_dead, 0, jax.nn.sigmoid(finite - sinks))
    scaled = output.astype(lse.dtype) * rows_to(layout, share)[..., None]
    # Where there is no sink either, it gets no gradient.
    alone = jnp.where(sinks == -jnp.inf, -jnp.inf, sinks)
    both = jnp.where(is_dead, alone, jnp.logaddexp(finite, sinks))
    return scaled.astype(output.dtype), both


def _like_rows(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """Return sinks with the axes and the dtype of the log-sum-exp."""
    return jnp.expand_dims(sinks.astype(lse.dtype), tuple(range(lse.ndim - sinks.ndim)))


def attend_beside(
    sinks: jax.Array | None,
    attributes: SdpaAttributes,
    call: Options,
    operands: Operands,
    *,
    with_lse: bool,
) -> tuple[jax.Array, ...]:
    """Return the output in the layout and, if asked for, log-sum-exp (b, s, h).

    The sinks, if there are any, are one number for each head.
    """
    if sinks is not None and operands.bias is None and not attributes.score_mod:
        results = attend_with_sinks(attributes, call, operands.apart, sinks)
        return results if with_lse else results[:1]
    # With a bias or a score_mod, rows may lie where the kernel that is given a
    # log-sum-exp loses the number of keys (legalize/far_rows.py). The gradient
    # below mends these.
    with_stats = with_lse or sinks is not None
    if not _is_in_place(operands):
        operands = operands.apart
    output, *stats = attend(operands, attributes, call, with_stats=with_stats)
    if not stats:
        return (output,)
    lse = jnp.swapaxes(stats[0][..., 0], 1, 2)
    if sinks is not None:
        output, lse = with_sinks(output, lse, sinks, operands.layout)
    return (output, lse) if with_lse else (output,)


def _is_in_place(operands: Operands) -> bool:
    """Whether a graph has this array of queries, keys and values as it is."""
    qkv = operands.qkv
    return qkv is not None and operands.dropout_seed is None and qkv.array.size > 0


def attend_with_sinks(
    attributes: SdpaAttributes, call: Options, operands: Operands, sinks: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the output in the layout and log-sum-exp (b, s, h), sinks included.

    There is no bias among the operands.
    """
    function = _Attention(attributes=attributes, call=call, layout=operands.layout)
    return run_by_hand(function, {**operands.given, "sinks": sinks})


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Attention as a function of the operands that are there, the sinks among them."""

    attributes: SdpaAttributes
    call: Options
    layout: Layout

    # Those of sdpa, so that the same remat policies keep them.
    names = ("cudnn_sdpa_output", "cudnn_sdpa_stats")
    differentiable = ("query", "key", "value", "sinks")

    def _split(self, given: Mapping[str, jax.Array]) -> tuple[Operands, jax.Array]:
        return Operands.of(given, self.layout), given["sinks"]

    def forward(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        operands, sinks = self._split(given)
        output, stats = attend(operands, self.attributes, self.call, with_stats=True)
        lse = jnp.swapaxes(stats[..., 0], 1, 2)
        return with_sinks(output, lse, sinks, self.layout)

    def gradients(
        self,
        given: Mapping[str, jax.Array],
        results: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | None],
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        """Return the gradients of query, key, value and sinks."""
        del wanted  # The kernel computes all gradients at once.
        operands, sinks = self._split(given)
        (output, lse), (grad_output, grad_lse) = results, cotangents
        if grad_output is None:
            grad_output = jnp.zeros_like(output)
        found = part_gradients(
            operands,
            self.attributes,
            self.call,
            output=output,
            stats=of_rows(lse),
            grad_output=grad_output,
            grad_stats=None if grad_lse is None else of_rows(grad_lse),
        )
        slopes = sink_slopes(
            sinks,
            output=output,
            lse=lse,
            grad_output=grad_output,
            grad_lse=grad_lse,
            layout=self.layout,
        )
        return {**found, "sinks": jnp.sum(slopes, axis=(0, 1)).astype(sinks.dtype)}


def sink_slopes(
    sinks: jax.Array,
    *,
    output: jax.Array,
    lse: jax.Array,
    grad_output: jax.Array,
    grad_lse: jax.Array | None,
    layout: Layout = "bshd",
) -> jax.Array:
    """Return the gradient of each row's sink, as the log-sum-exp (b, s, h).

    The sinks are (h,), or broadcast to this. Output and log-sum-exp are with them.
    """
    wide = _like_rows(sinks, lse)
    products = output.astype(lse.dtype) * grad_output.astype(lse.dtype)
    # A query that sees no key has the sink alone. Its cotangent is not read.
    is_zero = rows_from(layout, jnp.all(output == 0, axis=-1))
    slope = rows_from(layout, -jnp.sum(products, -1))
    slope = jnp.where((lse == wide) & is_zero, 0, slope)
    if grad_lse is not None:
        slope = slope + grad_lse
    # Both may be infinite, where the sink is all that there is.
    gap = jnp.where(wide == lse, 0, wide - lse)
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(gap))
    return share * slope
