# SPDX-License-Identifier: Apache-2.0
"""What does attention become when each head has a sink, a key without a value?

The sink takes its share of the softmax, so the output of the keys is scaled by theirs.
The gradient of the keys is that of a part of all keys (sdpa_parts.py): cuDNN's kernel,
given the output and the log-sum-exp of the keys and the sink. With L this log-sum-exp,
O the output, dL and dO their cotangents, the gradient of a sink is the sum over rows of
exp(sink - L) (dL - rowsum(O dO)).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.graph import SdpaAttributes
from jax_cudnn.lowering import linear_call
from jax_cudnn.ops.arguments import as_operand, check_dtype, describe
from jax_cudnn.ops.attend import Operands, attend
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
    output: jax.Array, lse: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return output (..., s, h, e) and log-sum-exp (..., s, h) with the sinks (h,).

    A sink takes its share of the softmax and adds nothing to the output. So what the
    keys have is scaled by their share, 1 / (1 + exp(sink - lse)).
    """
    sinks = jnp.expand_dims(sinks.astype(lse.dtype), tuple(range(lse.ndim - 1)))
    # A query that sees no key has the sink alone, whatever that is.
    is_dead = lse == -jnp.inf
    finite = jnp.where(is_dead, 0, lse)
    share = jnp.where(is_dead, 0, jax.nn.sigmoid(finite - sinks))
    scaled = output.astype(lse.dtype) * share[..., None]
    both = jnp.where(is_dead, sinks, jnp.logaddexp(finite, sinks))
    return scaled.astype(output.dtype), both


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def attend_with_sinks(
    attributes: SdpaAttributes, call: Options, operands: Operands, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return output (b, s, h, e) and log-sum-exp (b, s, h), sinks included."""
    return _forward(attributes, call, operands, sinks)


def _forward(
    attributes: SdpaAttributes, call: Options, operands: Operands, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    output, stats = attend(operands, attributes, call, with_stats=True)
    return with_sinks(output, jnp.swapaxes(stats[..., 0], 1, 2), sinks)


@functools.partial(attend_with_sinks.defjvp, symbolic_zeros=True)
def _jvp(
    attributes: SdpaAttributes,
    call: Options,
    primals: tuple[Operands, jax.Array],
    tangents: tuple[Operands, Any],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    operands, sinks = primals
    results = attend_with_sinks(attributes, call, operands, sinks)
    # Named as those of sdpa, so that the same remat policies keep them.
    results = tuple(
        checkpoint_name(x, f"cudnn_sdpa_{name}")
        for x, name in zip(results, ("output", "stats"), strict=True)
    )
    moved = {**tangents[0]._asdict(), "sinks": tangents[1]}
    moving = tuple(role for role in _DIFFERENTIABLE if _moves(moved[role]))
    if not moving:
        return results, tuple(map(jnp.zeros_like, results))
    given = {**operands.given, "sinks": sinks}
    derivative = _Derivative(
        attributes=attributes, call=call, roles=tuple(given), moving=moving
    )
    along = [moved[role] for role in moving]
    return results, tuple(linear_call(derivative, [*given.values()], results, along))


_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


def _moves(tangent: Any) -> bool:
    return tangent is not None and not isinstance(tangent, SymbolicZero)


@dataclass(frozen=True, kw_only=True)
class _Derivative:
    """The derivative along the operands that move, and its transpose."""

    attributes: SdpaAttributes
    call: Options
    roles: tuple[str, ...]
    moving: tuple[str, ...]

    def _split(self, given: dict[str, jax.Array]) -> tuple[Operands, jax.Array]:
        roles = {role: given.get(role) for role in Operands._fields}
        return Operands(**roles), given["sinks"]  # type: ignore[arg-type]

    def tangents(
        self, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Return the tangents of the results: the derivative of the forward pass."""
        given = dict(zip(self.roles, primals, strict=True))

        def along(*values: jax.Array) -> tuple[jax.Array, jax.Array]:
            moved = dict(zip(self.moving, values, strict=True))
            return _forward(self.attributes, self.call, *self._split(given | moved))

        values = tuple(given[role] for role in self.moving)
        return jax.jvp(along, values, tuple(tangents))[1]

    def gradients(
        self,
        primals: Sequence[jax.Array],
        results: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | None],
    ) -> list[jax.Array]:
        """Return the gradients of the operands that move."""
        operands, sinks = self._split(dict(zip(self.roles, primals, strict=True)))
        (output, lse), (grad_output, grad_lse) = results, cotangents
        if grad_output is None:
            grad_output = jnp.zeros_like(output)
        found = part_gradients(
            operands,
            self.attributes,
            self.call,
            output=output,
            stats=_of_rows(lse),
            grad_output=grad_output,
            grad_stats=None if grad_lse is None else _of_rows(grad_lse),
            with_bias="bias" in self.moving,
        )
        slope = -jnp.sum(output.astype(lse.dtype) * grad_output.astype(lse.dtype), -1)
        if grad_lse is not None:
            slope = slope + grad_lse
        found["sinks"] = _sink_gradient(sinks, lse, slope)
        return [found[role] for role in self.moving]


def _sink_gradient(sinks: jax.Array, lse: jax.Array, slope: jax.Array) -> jax.Array:
    wide = jnp.expand_dims(sinks.astype(lse.dtype), (0, 1))
    # Both may be infinite, where the sink is all that there is.
    gap = jnp.where(wide == lse, 0, wide - lse)
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(gap))
    return jnp.sum(share * slope, axis=(0, 1)).astype(sinks.dtype)


def _of_rows(x: jax.Array) -> jax.Array:
    """Return numbers of rows, (b, s, h), as graphs have them, (b, h, s, 1)."""
    return jnp.swapaxes(x, 1, 2)[..., None]
