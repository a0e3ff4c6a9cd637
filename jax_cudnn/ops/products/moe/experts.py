# SPDX-License-Identifier: Apache-2.0
"""The MLPs of experts over rows that lie expert by expert, and those that all share."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import Precision, options
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.f8_recipes import Current
from jax_cudnn.ops.products.f8_dense import dense
from jax_cudnn.ops.products.f8_groups import grouped_layers
from jax_cudnn.ops.products.f8_products import operand
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
    recipe: Current | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of a product."""
        return {
            "precision": self.precision,
            "implementation": self.implementation,
            "plan": self.plan,
        }


def check_recipe(op: str, recipe: object) -> Current | None:
    """Return a recipe without a state, or raise TypeError."""
    if recipe is None or isinstance(recipe, Current):
        return recipe
    raise TypeError(
        f"{op}: recipe={recipe!r} is not f8.Current() or None. Delayed scaling needs a "
        "state, which a mixture of experts does not take: pass f8.Current(), or build "
        "the layer from moe.permute, f8.ragged_dot and moe.unpermute."
    )


def run_experts(
    op: str, rows: jax.Array, sizes: jax.Array, weights: Weights, how: Computing
) -> jax.Array:
    """Return each row's MLP by the expert of its group."""
    if how.recipe is not None:
        return _run_experts_in_f8(op, rows, sizes, weights, how)

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


def _run_experts_in_f8(
    op: str, rows: jax.Array, sizes: jax.Array, weights: Weights, how: Computing
) -> jax.Array:
    assert how.recipe is not None
    recipe, call = how.recipe, options(op, how.implementation, how.plan)

    def products(x: jax.Array, *names: str) -> list[jax.Array]:
        given = {n: operand(op, f"{n}_w", getattr(weights, f"{n}_w")) for n in names}
        biases = {name: getattr(weights, f"{name}_bias") for name in names}
        x, states = operand(op, "x", x), [None] * len(names)
        return grouped_layers(op, x, given, biases, sizes, states, recipe, call)[0]

    # Those that are not alone share their copy of the rows.
    names = ("up",) if weights.gate_w is None else ("gate", "up")
    first, *others = products(rows, *names)
    hidden = first if how.activation is None else on_array(op, how.activation, first)
    for value in others:
        hidden = hidden * value
    (y,) = products(hidden, "down")
    return y


def run_shared(
    op: str, x: jax.Array, weights: Weights, how: Computing
) -> jax.Array | None:
    """Return the MLP that all tokens share; None if there is none."""
    gate, up, down = weights.shared_gate_w, weights.shared_up_w, weights.shared_down_w
    if up is None or down is None:
        return None
    if how.recipe is not None:
        return _run_shared_in_f8(op, x, weights, how)
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


def _run_shared_in_f8(
    op: str, x: jax.Array, weights: Weights, how: Computing
) -> jax.Array:
    recipe, implementation, plan = how.recipe, how.implementation, how.plan
    assert recipe is not None

    def product(x: jax.Array, name: str, activation: Activation | None) -> jax.Array:
        w = getattr(weights, name)
        with on_behalf_of(op, "f8.dense", w=name):
            return dense(
                x,
                w,
                recipe=recipe,
                activation=activation,
                implementation=implementation,
                plan=plan,
            )

    if weights.shared_gate_w is None:
        hidden = product(x, "shared_up_w", how.activation)
    else:
        hidden = product(x, "shared_gate_w", how.activation)
        hidden = hidden * product(x, "shared_up_w", None)
    return product(hidden, "shared_down_w", None)
