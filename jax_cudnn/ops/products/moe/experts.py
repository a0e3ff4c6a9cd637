# SPDX-License-Identifier: Apache-2.0
"""The MLPs of experts over rows that lie expert by expert, and those that all share."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import Precision
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.products.gated import gated_matmul
from jax_cudnn.ops.products.matmul import matmul
from jax_cudnn.ops.products.ragged_dot import ragged_dot


class Weights(NamedTuple):
    """The arrays of the experts, and of an MLP that all tokens share."""

    gate_w: jax.Array | None
    up_w: jax.Array
    down_w: jax.Array
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None
    shared_gate_w: jax.Array | None
    shared_up_w: jax.Array | None
    shared_down_w: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class Computing:
    """How the experts compute; the arguments of the products that are no arrays."""

    activation: Activation | None
    precision: Precision
    implementation: Implementation | None
    plan: PlanOptions | None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of a product."""
        return {
            "precision": self.precision,
            "implementation": self.implementation,
            "plan": self.plan,
        }


def run_experts(
    op: str, rows: jax.Array, sizes: jax.Array, weights: Weights, how: Computing
) -> jax.Array:
    """Return each row's MLP by the expert of its group."""

    def product(x: jax.Array, name: str, activation: Activation | None) -> jax.Array:
        words = {"lhs": "x", "rhs": f"{name}_w", "bias": f"{name}_bias"}
        with on_behalf_of(op, "ragged_dot", **words):
            return ragged_dot(
                x,
                getattr(weights, f"{name}_w"),
                sizes,
                bias=getattr(weights, f"{name}_bias"),
                activation=activation,
                **how.options,
            )

    if weights.gate_w is None:
        hidden = product(rows, "up", how.activation)
    else:
        gates = product(rows, "gate", how.activation)
        hidden = gates * product(rows, "up", None)
    return product(hidden, "down", None)


def run_shared(
    op: str, x: jax.Array, weights: Weights, how: Computing
) -> jax.Array | None:
    """Return the MLP that all tokens share; None if there is none."""
    gate, up, down = weights.shared_gate_w, weights.shared_up_w, weights.shared_down_w
    if up is None or down is None:
        return None
    multiply = functools.partial(matmul, **how.options)
    names = {"a": "x", "b": "shared_up_w", "gate": "shared_gate_w", "up": "shared_up_w"}
    if gate is None:
        with on_behalf_of(op, "matmul", **names):
            hidden = multiply(x, up, activation=how.activation)
    else:
        with on_behalf_of(op, "gated_matmul", **names):
            hidden = gated_matmul(x, gate, up, activation=how.activation, **how.options)
    with on_behalf_of(op, "matmul", a="x", b="shared_down_w"):
        return multiply(hidden, down)
