# SPDX-License-Identifier: Apache-2.0
"""Checks and updates the state of `f8.Delayed` for a mixture of experts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax import export

from jax_cudnn.ops.common.f8_recipes import (
    Delayed,
    DenseState,
    Recipe,
    check_recipe,
    check_state,
    dense_state,
)

# By the names of weights.
States = Mapping[str, DenseState | None]


class LayerState(NamedTuple):
    """What `f8.Delayed` knows of each product of :func:`layer`, by its weights.

    Each field is a :class:`jax_cudnn.f8.DenseState`, or None for weights that the layer
    does not have. The gradient by a state is the state of the next step.
    """

    gate_w: DenseState | None
    up_w: DenseState | None
    down_w: DenseState | None
    shared_gate_w: DenseState | None
    shared_up_w: DenseState | None
    shared_down_w: DenseState | None


export.register_namedtuple_serialization(
    LayerState, serialized_name="jax_cudnn.moe.LayerState"
)


def layer_state(recipe: Recipe) -> LayerState | None:
    """Return the state with which a layer begins; None for a recipe without one.

    It has a field for each product that a layer may have. Of weights that a layer does
    not have, the gradient is zeros, which is a state that begins anew.

    Args:
      recipe: `f8.Delayed`, or one without a state.

    Raises:
      TypeError: no recipe.

    Example:
      >>> from jax_cudnn import f8, moe
      >>> moe.layer_state(f8.Delayed(history=4)).up_w.x.shape
      (6,)
      >>> moe.layer_state(f8.Current()) is None
      True
    """
    one = dense_state(check_recipe("moe.layer_state", recipe))
    return None if one is None else LayerState(*[one] * len(LayerState._fields))


def check_layer_state(
    op: str, recipe: Recipe | None, state: object, weights: Collection[str]
) -> States:
    """Return the states of the weights that a layer has, or raise TypeError."""
    if recipe is None and state is not None:
        raise TypeError(
            f"{op}: state is given, and no recipe. Pass recipe=f8.Delayed(), or leave "
            "it out."
        )
    if recipe is None or not isinstance(recipe, Delayed):
        if recipe is not None:
            check_state(op, recipe, state)
        return {}
    first = "moe.layer_state(recipe)"
    if not isinstance(state, Sequence) or len(state) != len(LayerState._fields):
        shown = type(state).__name__
        raise TypeError(
            f"{op}: state is {shown}, and f8.Delayed needs a state of six products. "
            f"Pass {first}, and later its gradient."
        )
    given: dict[str, Any] = dict(zip(LayerState._fields, state, strict=True))
    return {
        name: check_state(op, recipe, value, name=f"state.{name}", first=first)
        for name, value in given.items()
        if name in weights
    }


def following_state(state: LayerState, found: States) -> LayerState:
    """Return a state with those that a call has found in place of its own."""
    return LayerState(*state)._replace(**found)
