# SPDX-License-Identifier: Apache-2.0
"""The softmax of rows of logits: weights, sinks, maxima, and what joins parts of it.

Letters as in graph/attention/sdpa.py. What is of a row has a last axis of size 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Weights(NamedTuple):
    """exp(logits - top) of each row, where top is their maximum, and their sum.

    Of a row that sees no key the sum is given as 1/2, and the log-sum-exp is -inf. A
    sink is part of sum and log-sum-exp; the weights may then be relative to it.
    """

    unnormalised: jax.Array
    total: jax.Array
    top: jax.Array
    is_dead: jax.Array

    @property
    def probabilities(self) -> jax.Array:
        """The softmax."""
        return self.unnormalised / self.total

    @property
    def stats(self) -> jax.Array:
        """The log-sum-exp."""
        return jnp.where(self.is_dead, -jnp.inf, self.top + jnp.log(self.total))


class PartOfSoftmax(NamedTuple):
    """The part of a softmax that some keys have; ``stats`` is that of all keys."""

    probabilities: jax.Array
    stats: jax.Array
    is_dead: jax.Array


def largest_logits(logits: jax.Array) -> jax.Array:
    """Return the largest logit of each row, -inf without slope where all are hidden.

    Of equal ones the first has the slope. It is found by its index: XLA may compute
    logits twice, with other rounding, and then none of them equals their maximum.
    """
    if logits.shape[-1] == 0:
        return jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
    axis = logits.ndim - 1
    index = jax.lax.argmax(jax.lax.stop_gradient(logits), axis, jnp.int32)
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis)
    top = jnp.sum(
        jnp.where(places == index[..., None], logits, 0), axis=-1, keepdims=True
    )
    return jnp.where(top == -jnp.inf, -jnp.inf, top)


def slopes_of_largest(logits: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Return the gradient of `largest_logits`."""
    return jax.vjp(largest_logits, logits)[1](cotangent.astype(logits.dtype))[0]


def share_and_sum(stats: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the share of the softmax that keys have, and the log-sum-exp, with sinks.

    Given the log-sum-exp without them; both broadcast. The share is
    1 / (1 + exp(sink - stats)).
    """
    sinks = sinks.astype(stats.dtype)
    # A query that sees no key has the sink alone, whatever that is.
    is_dead = stats == -jnp.inf
    finite = jnp.where(is_dead, 0, stats)
    share = jnp.where(is_dead, 0, jax.nn.sigmoid(finite - sinks))
    # Where there is no sink either, it gets no gradient.
    alone = jnp.where(sinks == -jnp.inf, -jnp.inf, sinks)
    return share, jnp.where(is_dead, alone, jnp.logaddexp(finite, sinks))


def share_of_sinks(sinks: jax.Array, stats: jax.Array) -> jax.Array:
    """Return the share (b, h, s, 1) of the softmax that the sinks have.

    The log-sum-exp is that with them.
    """
    wide = sinks.astype(stats.dtype)
    # Both may be infinite, where the sink is all that there is.
    gap = jnp.where(wide == stats, 0, wide - stats)
    return jnp.where(stats == -jnp.inf, 0, jnp.exp(gap))


def output_products(
    output: jax.Array, grad_output: jax.Array, stats: jax.Array, sinks: jax.Array
) -> jax.Array:
    """Return rowsum(O dO) beside the log-sum-exp with the sinks, both (..., 1).

    A row that sees no key has the sink alone: the cotangent of its output is not read.
    """
    products = output.astype(stats.dtype) * grad_output.astype(stats.dtype)
    is_zero = jnp.all(output == 0, axis=-1, keepdims=True)
    total = jnp.sum(products, axis=-1, keepdims=True)
    return jnp.where((stats == sinks) & is_zero, 0, total)


def weights_of(logits: jax.Array, sinks: jax.Array | None = None) -> Weights:
    """Return the weights of the logits over keys, before they are divided.

    Sinks, (b|1, h|1, 1, 1), are part of what they are divided by.
    """
    # Maxima with constants keep rows without keys finite. XLA for a GPU then computes
    # the softmax of a row in one kernel. A choice by a condition, such as whether the
    # row has a key, would make it three kernels, each of which reads the logits.
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(logits.dtype)
        # A sink of infinity is all that there is, whatever the shift.
        top = jnp.maximum(top, jnp.where(sinks == jnp.inf, -jnp.inf, sinks))
    # A row without keys has maximum -inf; any finite shift keeps it at exp(-inf) = 0.
    top = jax.lax.stop_gradient(jnp.maximum(top, jnp.finfo(top.dtype).min))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    is_dead = total == 0
    # Where there is a key or a sink, the largest of them gives 1.
    total = jnp.maximum(total, 0.5)
    return Weights(
        unnormalised=weights,
        total=total,
        top=top,
        is_dead=is_dead,
    )


def part_of_softmax(logits: jax.Array, stats: jax.Array) -> PartOfSoftmax:
    """Return the probabilities of these keys among all that the log-sum-exp is of."""
    is_dead = stats == -jnp.inf
    weights = jnp.exp(logits - jnp.where(is_dead, 0, stats))
    return PartOfSoftmax(
        probabilities=jnp.where(is_dead, 0, weights), stats=stats, is_dead=is_dead
    )


def combined(
    outputs: Sequence[jax.Array], stats: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return attention over two sets of keys, given output and log-sum-exp of each.

    Log-sum-exps are (*any), outputs (*any, e); -inf stands for no key. Both results are
    f32 (f64 if an operand is f64).
    """
    is_double = any(x.dtype == jnp.float64 for x in (*outputs, *stats))
    wide = jnp.float64 if is_double else jnp.float32
    l1, l2 = (x.astype(wide) for x in stats)
    # Any finite number would do where there is no key.
    top = jnp.maximum(l1, l2)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = [jnp.exp(x - top) for x in (l1, l2)]
    total = weights[0] + weights[1]
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    output = sum(
        (weight / total)[..., None]
        * jnp.where((x == -jnp.inf)[..., None], 0, part.astype(wide))
        for weight, x, part in zip(weights, (l1, l2), outputs, strict=True)
    )
    assert not isinstance(output, int)
    return output, jnp.where(is_empty, -jnp.inf, top + jnp.log(total))
