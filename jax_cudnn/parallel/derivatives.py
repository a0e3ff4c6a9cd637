# SPDX-License-Identifier: Apache-2.0
"""Differentiates attention over devices, in both modes, by gradients of its own.

Reverse mode runs the hand-written gradient, which keeps nothing but a device's own
operands and results. Forward mode differentiates the forward pass. Second order
differentiates either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import attention_results, run_with_gradient
from jax_cudnn.ops.attention.attend import of_rows
from jax_cudnn.ops.attention.sinks import sink_slopes, with_sinks
from jax_cudnn.parallel.blocks import Cotangents, Partial
from jax_cudnn.parallel.problem import SCORES, Problem, Shards, base_of
from jax_cudnn.parallel.schedule import Step

Steps = Callable[[Problem, Shards], tuple[Step, ...]]
# Return output, in query's dtype, and log-sum-exp (b, s, h).
Forward = Callable[[Problem, Shards], Partial]


# Gradients of a device's share of the operands by role, in their dtypes: of query, key
# and value, and of those of the scores' operands that are wanted.
OperandGradients = dict[str, jax.Array]
Backward = Callable[[Problem, Shards, Cotangents, tuple[str, ...]], OperandGradients]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to attention over several devices: forward, and its gradient.

    The gradient takes which operands' gradients are wanted, and is given output and
    log-sum-exp with the sinks. Both run the calls of the same steps.
    """

    steps: Steps
    forward: Forward
    backward: Backward


def attention(method: Method, problem: Problem, shards: Shards) -> Partial:
    """Return output and log-sum-exp of this device's queries over all keys."""
    return Partial(
        *run_with_gradient(_Attention(method=method, problem=problem), shards.given)
    )


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Attention as a function of the operands that are there."""

    method: Method
    problem: Problem

    differentiable = ("query", "key", "value", *SCORES, "sinks")

    def forward(self, given: Mapping[str, jax.Array]) -> Partial:
        shards = Shards.of(given)
        result = self.method.forward(self.problem, shards)
        if shards.sinks is None:
            return result
        sinks, base = _from_base(shards.sinks)
        return Partial(*with_sinks(result.output, result.stats - base, sinks))

    def again(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Return the results, which the same remat policies keep as those of `sdpa`."""
        return attention_results(run_with_gradient(self, dict(given)))

    def gradients(
        self,
        given: Mapping[str, jax.Array],
        results: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | None],
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        """Return the gradients of query, key and value, and what else is wanted."""
        shards, (output, stats) = Shards.of(given), results
        grad_output, grad_stats = cotangents
        if grad_output is None:
            grad_output = jnp.zeros_like(output)
        # Or else the compiler might see that both passes send the same keys, send them
        # once, and hold them from one to the other.
        (key, value), grad_output = jax.lax.optimization_barrier(
            ((shards.key, shards.value), grad_output)
        )
        shards = shards._replace(key=key, value=value)
        sinks, base = None, 0
        if shards.sinks is not None:
            sinks, base = _from_base(shards.sinks)
        cotangent = Cotangents(
            output=output,
            stats=of_rows(stats + base),
            grad_output=grad_output,
            grad_stats=None if grad_stats is None else of_rows(grad_stats),
        )
        found = self.method.backward(self.problem, shards, cotangent, wanted)
        if shards.sinks is not None and sinks is not None and "sinks" in wanted:
            slopes = sink_slopes(
                sinks,
                output=output,
                lse=stats,
                grad_output=grad_output,
                grad_lse=grad_stats,
            )
            axes = [i for i, size in enumerate(shards.sinks.shape) if size == 1]
            slopes = jnp.sum(slopes, axis=axes, keepdims=True)
            found["sinks"] = slopes.astype(shards.sinks.dtype)
        return found


def _from_base(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return sinks with their base subtracted, and the base: see `Shards`."""
    base = base_of(sinks)
    return sinks - base, base
