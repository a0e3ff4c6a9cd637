# SPDX-License-Identifier: Apache-2.0
"""The MLPs of experts over rows that lie expert by expert, and those that all share."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_cudnn.config import Implementation, PlanOptions
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import Precision, options
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.f8_recipes import DenseState, Recipe
from jax_cudnn.ops.products.f8_groups import grouped_layers
from jax_cudnn.ops.products.f8_products import operand, products
from jax_cudnn.ops.products.gated import gated_matmul
from jax_cudnn.ops.products.matmul import matmul
from jax_cudnn.ops.products.moe.states import States
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
class ExpertOptions:
    """How the experts compute; the arguments of the products that are no arrays."""

    activation: Activation | None
    precision: Precision
    implementation: Implementation | None
    plan: PlanOptions | None
    recipe: Recipe | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of a product."""
        return {
            "precision": self.precision,
            "implementation": self.implementation,
            "plan": self.plan,
        }


def run_experts(
    op: str,
    rows: jax.Array,
    sizes: jax.Array,
    weights: Weights,
    how: ExpertOptions,
    states: States,
) -> tuple[jax.Array, States]:
    """Return each row's MLP by the expert of its group, and the products' next states.

    ``states`` are those of f8.
    """
    if how.recipe is not None:
        recipe, call = how.recipe, options(op, how.implementation, how.plan)
        names = ("gate", "up", "down")
        biases = {f"{name}_w": getattr(weights, f"{name}_bias") for name in names}

        def multiply(x: jax.Array, given: Given, known: Known) -> Products:
            return grouped_layers(op, x, given, biases, sizes, known, recipe, call)

        return _in_f8(op, rows, weights, how, states, "", multiply)

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
    return product(hidden, "down", None), {}


def run_shared(
    op: str, x: jax.Array, weights: Weights, how: ExpertOptions, states: States
) -> tuple[jax.Array | None, States]:
    """Return the MLP that all tokens share, None if there is none, and states."""
    gate, up, down = weights.shared_gate_w, weights.shared_up_w, weights.shared_down_w
    if up is None or down is None:
        return None, {}
    if how.recipe is not None:
        recipe, call = how.recipe, options(op, how.implementation, how.plan)

        def in_f8(x: jax.Array, given: Given, known: Known) -> Products:
            return products(op, x, given, {}, known, recipe, ((1,), (0,)), call)

        return _in_f8(op, x, weights, how, states, "shared_", in_f8)
    multiply = functools.partial(matmul, **how.options)
    names = {"a": "x", "b": "shared_up_w", "gate": "shared_gate_w", "up": "shared_up_w"}
    if gate is None:
        with on_behalf_of(op, "matmul", **names):
            hidden = multiply(x, up, activation=how.activation)
    else:
        with on_behalf_of(op, "gated_matmul", **names):
            hidden = gated_matmul(x, gate, up, activation=how.activation, **how.options)
    with on_behalf_of(op, "matmul", a="x", b="shared_down_w"):
        return multiply(hidden, down), {}


# What multiplies an operand in f8 by some weights, by one copy of it.
Given = Mapping[str, jax.Array]
Known = Sequence[DenseState | None]
Products = tuple[list[jax.Array], list[DenseState | None]]


def _in_f8(
    op: str,
    x: jax.Array,
    weights: Weights,
    how: ExpertOptions,
    states: States,
    prefix: str,
    multiply: Callable[[jax.Array, Given, Known], Products],
) -> tuple[jax.Array, States]:
    """Return an MLP of the weights whose names have a prefix, and the next states."""
    following: dict[str, DenseState | None] = {}

    def run(x: jax.Array, *names: str) -> list[jax.Array]:
        names = tuple(f"{prefix}{name}_w" for name in names)
        given = {name: operand(op, name, getattr(weights, name)) for name in names}
        known = [states.get(name) for name in names]
        found, after = multiply(operand(op, "x", x), given, known)
        following.update(zip(names, after, strict=True))
        return found

    # Those that are not alone share their copy of x.
    has_gate = getattr(weights, f"{prefix}gate_w") is not None
    first, *others = run(x, "gate", "up") if has_gate else run(x, "up")
    hidden = first if how.activation is None else on_array(op, how.activation, first)
    for value in others:
        hidden = hidden * value
    (y,) = run(hidden, "down")
    return y, following
