# SPDX-License-Identifier: Apache-2.0
"""Recipes for training in f8: how the scale of a tensor is found, and its state.

A tensor's state is a vector of n + 2 numbers, for a history of n steps:

    [power, amax of the step before, ..., amax n steps before, count]

A layer's gradient by its state is the state of the next step. Where a layer is used
several times in a step, under vmap, over microbatches and devices, JAX adds gradients.
So the state is made to bear sums, means and multiples: old amaxes are divided by
`count`, the number of states that were added, and the newest is kept as the 8th power
of its ratio to the amax that the scale was made for. With 1 and 2 as ratios, the sum is
257, and its 8th root 2.001: about the largest, as it would be if the gradients' maximum
had been taken. A count below 1 is of a state that was multiplied, as by a mean over
microbatches of which some leave the layer out, or by loss scaling.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jax_cudnn.ops.common.arguments import check_flag, describe
from jax_cudnn.ops.common.f8_scaling import (
    amax,
    check_margin,
    scale_from_amax,
    scale_from_history,
)

# e4m3 for what is multiplied forward, e5m2, which reaches further, for gradients.
FORWARD, BACKWARD = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
# Scales of tensors without a history: with them, weights of up to 7 and gradients from
# 5e-10 to 1.75 are held.
_FIRST = {"x": 1.0, "w": 2.0**-6, "grad": 2.0**-15}
_POWER = 8
# Bounds of an amax over the one that the scale was made for. Their powers are within
# f32, also the sum of 2^24 of the largest.
_SMALLEST_RATIO, _LARGEST_RATIO = 2.0**-15, 2.0**13


@dataclass(frozen=True, kw_only=True)
class Current:
    """Scales from the tensors themselves: a tensor is read once more, for its amax.

    Args:
      margin: how many powers of two to leave free above the largest number. Default 0.
      power_of_2: whether to round scales up to powers of two. Default False.

    Example:
      >>> from jax_cudnn import f8
      >>> f8.Current()
      Current(margin=0, power_of_2=False)
    """

    margin: int = 0
    power_of_2: bool = False

    def __post_init__(self) -> None:
        _check_options("f8.Current", self)


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """Scales from the largest number of former steps, so that tensors are read once.

    A tensor that outgrows its history saturates in that step. A call needs a state,
    :func:`dense_state`, whose gradient is the state of the next step.

    Args:
      history: how many steps to look back. Default 16.
      margin: how many powers of two to leave free above the largest number. Default 0.
      power_of_2: whether to round scales up to powers of two. Default False.

    Raises:
      ValueError: a history below 1.

    Example:
      >>> from jax_cudnn import f8
      >>> f8.dense_state(f8.Delayed(history=4)).x.shape
      (6,)
    """

    history: int = 16
    margin: int = 0
    power_of_2: bool = False

    def __post_init__(self) -> None:
        _check_options("f8.Delayed", self)
        if isinstance(self.history, bool) or not isinstance(
            self.history, int | np.integer
        ):
            raise TypeError(
                f"f8.Delayed: history={self.history!r} is not an int. Pass the number "
                "of steps to look back, such as 16."
            )
        if self.history < 1:
            raise ValueError(
                f"f8.Delayed: history={self.history} is below 1. Pass the number of "
                "steps to look back, such as 16, or f8.Current() to look back at none."
            )


@dataclass(frozen=True)
class MXFP8:
    """OCP's MXFP8: f8_e4m3fn, with a scale, a power of two, for each 32 numbers.

    A block is 32 numbers along the contracted axis. The three matmuls of a training
    step contract different axes, so inputs, weights and cotangents are each quantized
    along two axes: six copies. A scale, in f8_e8m0fnu, is the smallest power of two
    with which no number of its block saturates, and at least 2**-126. TransformerEngine
    and `jax.nn` round scales up as well. The specification's own method rounds them
    down, and the largest numbers may saturate. A block that contains NaN or an infinity
    becomes NaN. There is no state.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> x, w = jnp.eye(32) * 5, jnp.full((32, 4), 1.1)
      >>> float(f8.dense(x, w, recipe=f8.MXFP8())[0, 0])
      5.625
    """

    @property
    def block(self) -> int:
        """How many numbers share a scale: 32."""
        return 32


@dataclass(frozen=True)
class NVFP4:
    """NVIDIA's NVFP4: f4_e2m1fn with a scale in f8_e4m3fn for each 16 numbers.

    The tensor has an f32 scale as well: its largest absolute value divided by 448 * 6.
    The scale of a block is its largest absolute value divided by 6 and by the tensor's
    scale. All rounding is to nearest. Blocks are along the contracted axis, as in
    :class:`MXFP8`. The numbers of 4 bits are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their
    negatives. A block that contains NaN or an infinity becomes NaN; other blocks do not
    change. There is no state.

    Notes:
      TransformerEngine also has these, which are not implemented here: stochastic
      rounding of cotangents, random Hadamard transforms, and blocks of 16 x 16 for
      weights.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> x, w = jnp.eye(16) * 6, jnp.full((16, 4), 1.1)
      >>> y = f8.dense(x, w, recipe=f8.NVFP4())
      >>> round(float(y[0, 0]), 3)
      6.6
    """

    @property
    def block(self) -> int:
        """How many numbers share a scale: 16."""
        return 16


# Recipes with a scale for each block, which have no state.
BlockRecipe = MXFP8 | NVFP4
Recipe = Delayed | Current | MXFP8 | NVFP4


def _check_options(op: str, recipe: Delayed | Current) -> None:
    check_margin(op, recipe.margin)
    check_flag(op, "power_of_2", recipe.power_of_2)


class DenseState(NamedTuple):
    """What `Delayed` knows of a layer's tensors: input, weights and cotangent.

    Each field is an f32 vector of history + 2 numbers. The gradient with respect to the
    state is the state of the next step. The state is not a parameter: exclude it from
    optimizers and from gradient clipping. If a step does not use a layer, its next
    state is zeros, and its history starts again. If `grad` is None, each cotangent is
    scaled by its own amax, so the forward pass alone determines the next state.
    """

    x: jax.Array
    w: jax.Array
    grad: jax.Array | None


export.register_namedtuple_serialization(
    DenseState, serialized_name="jax_cudnn.f8.DenseState"
)


def dense_state(recipe: Recipe) -> DenseState | None:
    """Return the state with which a layer begins; None for a recipe without one.

    The first step has no history. Its scales cover inputs up to 448, weights up to 7,
    and gradients from 5e-10 to 1.75. Larger numbers saturate, and smaller gradients
    become 0.

    Args:
      recipe: `f8.Delayed`, or one without a state.

    Example:
      >>> from jax_cudnn import f8
      >>> len(f8.dense_state(f8.Delayed())), f8.dense_state(f8.Current())
      (3, None)
    """
    check_recipe("f8.dense_state", recipe)
    if not isinstance(recipe, Delayed):
        return None
    first = jnp.zeros(recipe.history + 2, jnp.float32)
    return DenseState(first, first, first)


def check_recipe(op: str, recipe: object) -> Recipe:
    """Return a recipe, or raise TypeError for what is none."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{op}: recipe={recipe!r} is no recipe. Pass f8.Delayed(history=16), "
            "f8.Current(), f8.MXFP8() or f8.NVFP4()."
        )
    return recipe


def check_state(
    op: str,
    recipe: object,
    state: object,
    *,
    name: str = "state",
    first: str = "f8.dense_state(recipe)",
) -> DenseState | None:
    """Return a state that a recipe takes, or raise an error that says what it takes.

    Args:
      op: the function that the user called.
      recipe: what the user gave as such.
      state: likewise.
      name: of the argument, or of a part of it.
      first: the call that returns the argument with which to begin.
    """
    recipe = check_recipe(op, recipe)
    if not isinstance(recipe, Delayed):
        if state is not None:
            raise TypeError(
                f"{op}: state is given, and f8.{type(recipe).__name__}() has none. "
                "Leave it out."
            )
        return None
    try:
        given: Any = DenseState(*state)  # type: ignore[misc]
        found = jax.tree.map(jnp.asarray, given)
        assert isinstance(found, DenseState)
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: {name} is {type(state).__name__}, and f8.Delayed needs three "
            f"arrays. Pass {first}, and later its gradient."
        ) from None
    wanted = (recipe.history + 2,)
    for field, each in found._asdict().items():
        if each is None and field == "grad":
            continue
        if each is None or each.shape != wanted or each.dtype != jnp.float32:
            known = "None" if each is None else describe(each)
            raise ValueError(
                f"{op}: {name}.{field} is {known}, and a history of "
                f"{recipe.history} has f32 {[*wanted]}. Pass {first}, and later its "
                "gradient."
            )
    return found


def scale_and_next(
    recipe: Delayed | Current,
    role: str,
    state: jax.Array | None,
    x: jax.Array,
    dtype: np.dtype,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale of a tensor in f8, and the next state of what it is."""
    largest = amax(x)
    options = {"margin": recipe.margin, "power_of_2": recipe.power_of_2}
    if state is None:
        return scale_from_amax(largest, dtype, **options), None
    state = jax.lax.stop_gradient(state)
    first = jnp.float32(_FIRST[role])
    count = jnp.where(state[-1] > 0, state[-1], 1)
    history = _sound(state[1:-1] / count)
    power = _sound(state[0] / jnp.minimum(count, 1))
    newest = _sound(_root(power) * _reference(history, first, dtype))
    history = jnp.concatenate([newest[None], history[:-1]])
    scale = scale_from_history(history, dtype, previous=first, **options)
    ratio = largest / _reference(history, first, dtype)
    # NaN and inf say nothing of the numbers that are to be held, and 0 neither.
    is_telling = jnp.isfinite(ratio) & (ratio > 0)
    ratio = jnp.clip(ratio, _SMALLEST_RATIO, _LARGEST_RATIO)
    ratio = jnp.where(is_telling, ratio, 0)
    following = jnp.concatenate(
        [(ratio**_POWER)[None], history, jnp.ones(1, jnp.float32)]
    )
    return scale, following


def _reference(history: jax.Array, first: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the amax that a history's scale is made for, without a margin."""
    largest = jnp.max(history)
    return jnp.where(largest > 0, largest, first * float(jnp.finfo(dtype).max))


def _sound(x: jax.Array) -> jax.Array:
    """Return amaxes with 0 in place of what no amax is: NaN, inf, negative numbers."""
    return jnp.where(jnp.isfinite(x) & (x > 0), x, 0)


def _root(power: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sqrt(jnp.sqrt(power)))
