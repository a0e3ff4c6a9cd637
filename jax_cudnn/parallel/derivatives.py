# SPDX-License-Identifier: Apache-2.0
"""Both modes of differentiation for attention whose gradient is written by hand.

Reverse mode runs the hand-written gradient, which keeps nothing but a device's own
operands and results. Forward mode differentiates the forward pass. Second order
differentiates either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.lowering import run_by_hand
from jax_cudnn.ops.attend import of_rows
from jax_cudnn.parallel.blocks import Cotangents, Partial
from jax_cudnn.parallel.problem import Problem, Shares

# Return output, in query's dtype, and log-sum-exp (b, s, h).
Forward = Callable[[Problem, Shares], Partial]


class OperandGradients(NamedTuple):
    """Gradients of a device's share of the operands, in their dtypes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


Backward = Callable[[Problem, Shares, Cotangents, bool], OperandGradients]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to attention over several devices: forward, and its gradient.

    The gradient takes whether that of the bias is wanted as well.
    """

    forward: Forward
    backward: Backward


def attention(method: Method, problem: Problem, shares: Shares) -> Partial:
    """Return output and log-sum-exp of this device's queries over all keys."""
    given = {role: x for role, x in shares._asdict().items() if x is not None}
    return Partial(*run_by_hand(_Attention(method=method, problem=problem), given))


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Attention as a function of the operands that are there."""

    method: Method
    problem: Problem

    # Those of sdpa, so that the same remat policies keep them.
    names = ("cudnn_sdpa_output", "cudnn_sdpa_stats")
    differentiable = ("query", "key", "value", "bias")

    def forward(self, given: Mapping[str, jax.Array]) -> Partial:
        return self.method.forward(self.problem, Shares(**given))

    def gradients(
        self,
        given: Mapping[str, jax.Array],
        results: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | None],
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        """Return the gradients of query, key and value, and of the bias if wanted."""
        shares, (output, stats) = Shares(**given), results
        grad_output, grad_stats = cotangents
        if grad_output is None:
            grad_output = jnp.zeros_like(output)
        # Or else the compiler might see that both passes send the same keys, send them
        # once, and hold them from one to the other.
        (key, value), grad_output = jax.lax.optimization_barrier(
            ((shares.key, shares.value), grad_output)
        )
        shares = shares._replace(key=key, value=value)
        cotangent = Cotangents(
            output=output,
            stats=of_rows(stats),
            grad_output=grad_output,
            grad_stats=None if grad_stats is None else of_rows(grad_stats),
        )
        found = self.method.backward(self.problem, shares, cotangent, "bias" in wanted)
        return {role: x for role, x in found._asdict().items() if x is not None}
