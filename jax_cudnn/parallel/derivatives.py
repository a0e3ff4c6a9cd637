# SPDX-License-Identifier: Apache-2.0
"""Both modes of differentiation for attention whose gradient is written by hand.

Reverse mode runs the hand-written gradient, which keeps nothing but a device's own
operands and results. Forward mode differentiates the forward pass. Second order
differentiates either.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jax_cudnn.lowering import linear_call
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def attention(method: Method, problem: Problem, shares: Shares) -> Partial:
    """Return output and log-sum-exp of this device's queries over all keys."""
    return method.forward(problem, shares)


@functools.partial(attention.defjvp, symbolic_zeros=True)
def _attention_jvp(
    method: Method,
    problem: Problem,
    primals: tuple[Shares],
    tangents: tuple[Shares],
) -> tuple[Partial, Partial]:
    (shares,), (moved,) = primals, tangents
    results = attention(method, problem, shares)
    # Named as those of sdpa, so that the same remat policies keep them.
    results = Partial(
        output=checkpoint_name(results.output, "cudnn_sdpa_output"),
        stats=checkpoint_name(results.stats, "cudnn_sdpa_stats"),
    )
    moving = tuple(role for role in _DIFFERENTIABLE if _moves(getattr(moved, role)))
    if not moving:
        return results, Partial(*(jnp.zeros_like(x) for x in results))
    roles = tuple(role for role in Shares._fields if getattr(shares, role) is not None)
    found = linear_call(
        _Derivative(method=method, problem=problem, roles=roles, moving=moving),
        [getattr(shares, role) for role in roles],
        results,
        [getattr(moved, role) for role in moving],
    )
    return results, Partial(*found)


_DIFFERENTIABLE = ("query", "key", "value", "bias")


def _moves(tangent: Any) -> bool:
    return tangent is not None and not isinstance(tangent, SymbolicZero)


@dataclass(frozen=True, kw_only=True)
class _Derivative:
    """The derivative of attention along the operands that move, and its transpose."""

    method: Method
    problem: Problem
    roles: tuple[str, ...]
    moving: tuple[str, ...]

    def _shares(self, primals: Sequence[jax.Array]) -> Shares:
        return Shares(**dict(zip(self.roles, primals, strict=True)))

    def tangents(
        self, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> Partial:
        """Return the tangents of the results: the derivative of the forward pass."""
        shares = self._shares(primals)

        def along(*values: jax.Array) -> Partial:
            moved = dict(zip(self.moving, values, strict=True))
            return self.method.forward(self.problem, shares._replace(**moved))

        values = tuple(getattr(shares, role) for role in self.moving)
        return jax.jvp(along, values, tuple(tangents))[1]

    def gradients(
        self,
        primals: Sequence[jax.Array],
        results: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | None],
    ) -> list[jax.Array]:
        """Return the gradients of the operands that move."""
        shares, (output, stats) = self._shares(primals), results
        grad_output, grad_stats = cotangents
        if grad_output is None:
            grad_output = jnp.zeros_like(output)
        # Or else the compiler might see that both passes send the same keys, send them
        # once, and hold them from one to the other.
        (key, value), grad_output = jax.lax.optimization_barrier(
            ((shares.key, shares.value), grad_output)
        )
        shares = shares._replace(key=key, value=value)
        given = Cotangents(
            output=output,
            stats=_with_heads_first(stats),
            grad_output=grad_output,
            grad_stats=None if grad_stats is None else _with_heads_first(grad_stats),
        )
        with_bias = "bias" in self.moving
        found = self.method.backward(self.problem, shares, given, with_bias)
        return [getattr(found, role) for role in self.moving]


def _with_heads_first(x: jax.Array) -> jax.Array:
    """Return numbers of rows, (b, s, h), as graphs have them, (b, h, s, 1)."""
    return jnp.swapaxes(x, 1, 2)[..., None]
