# SPDX-License-Identifier: Apache-2.0
"""`to_f8` has the dense layers of an nnx model compute in f8, and says which ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_cudnn.config import Implementation
from jax_cudnn.flax.nnx_f8 import (
    F8DotGeneral,
    F8Einsum,
    F8State,
    contraction,
    why_no_product,
)
from jax_cudnn.flax.products import DotGeneral
from jax_cudnn.ops.common.f8_recipes import Delayed, Recipe, check_recipe

Path = tuple[Any, ...]
_Dense = nnx.Linear | nnx.LinearGeneral | nnx.Einsum

# f8 kernels read 16 bytes at a time.
_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class F8Layer:
    """What became of a layer.

    Attributes:
      path: where it is in the model, as in `nnx.iter_modules`.
      is_f8: whether it computes in f8.
      reason: why it does not, or "".
    """

    path: tuple[Any, ...]
    is_f8: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class F8Report:
    """What became of a model's dense layers; as text, a line for each.

    Attributes:
      layers: an `F8Layer` each, in the order in which the model defines them.
    """

    layers: tuple[F8Layer, ...]

    def __str__(self) -> str:
        if not self.layers:
            return "no nnx.Linear, nnx.LinearGeneral or nnx.Einsum"
        names = [".".join(map(str, each.path)) or "(the model)" for each in self.layers]
        width = max(map(len, names))
        rows = (
            f"{name:{width}}  {'f8' if each.is_f8 else 'unchanged'}"
            f"{': ' if each.reason else ''}{each.reason}"
            for name, each in zip(names, self.layers, strict=True)
        )
        return "\n".join(rows)


def to_f8(
    model: nnx.Module,
    recipe: Recipe = Delayed(),  # noqa: B008 (immutable)
    *,
    keep: Callable[[Path, nnx.Module], bool] | None = None,
    rhs_sharding: Any = None,
) -> F8Report:
    """Have a model's dense layers compute in f8, in place.

    Each `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum` gets an
    :class:`F8DotGeneral` or :class:`F8Einsum` of its own. Parameters stay where they
    are, so that the same checkpoints load before and after. What stays as it is:

    - the first and the last of these layers, as the model's `__init__` orders them. In
      a language model the last is the head. `keep` says otherwise;
    - layers that sum over, or have, a number of features that is no multiple of 16:
      f8 has no fast kernels for them;
    - layers with batch axes, with another `dot_general`, `dot_general_cls` or
      `einsum_op`, or with an equation that is given by the call;
    - all other modules, such as embeddings, norms and convolutions.

    Args:
      model: any module. Layers that `nnx.vmap` has stacked count as one, which is
        neither the first nor the last.
      recipe: `f8.Delayed()` (default), `f8.Current()`, `f8.MXFP8()` or `f8.NVFP4()`.
      keep: a function of a layer's path and the layer, whether it stays as it is. It
        replaces the rule of the first and the last. Default None: that rule.
      rhs_sharding: as for :class:`F8DotGeneral`, of each layer.

    Returns:
      An :class:`F8Report`, to be printed.

    Raises:
      TypeError: no module, no recipe.

    Notes:
      `nnx.merge` forgets the order of `__init__`: then it is that of names. Call
      `to_f8` before, or give `keep`.

    Example:
      >>> from flax import nnx
      >>> from jax_cudnn.flax.nnx import to_f8
      >>> rngs = nnx.Rngs(0)
      >>> sizes = (32, 64, 64, 16)
      >>> model = nnx.Sequential(
      ...     *(nnx.Linear(m, n, rngs=rngs) for m, n in zip(sizes, sizes[1:])))
      >>> print(to_f8(model))
      layers.0  unchanged: the first layer
      layers.1  f8
      layers.2  unchanged: the last layer
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"to_f8: model is {type(model).__name__}, not an nnx.Module. Pass the "
            "model itself. linen's layers take a dot_general_cls."
        )
    check_recipe("to_f8", recipe)
    found = _layers(model)
    report: list[F8Layer] = []
    for place, (path, layer) in enumerate(found):
        if _is_f8(layer):
            report.append(F8Layer(path, True, "it was before"))
            continue
        reason = _why_not(layer)
        if reason is None and keep is not None:
            reason = "kept" if keep(path, layer) else None
        elif reason is None and not _stack(layer):
            ends = {0: "the first layer", len(found) - 1: "the last layer"}
            reason = ends.get(place)
        if reason is None:
            _turn(layer, recipe, rhs_sharding)
        report.append(F8Layer(path, reason is None, reason or ""))
    return F8Report(tuple(report))


def _layers(model: nnx.Module) -> list[tuple[Path, _Dense]]:
    """Return dense layers in the order in which they are defined."""
    found = [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, _Dense)
    ]
    return sorted(found, key=lambda each: _places(model, each[0]))


def _places(node: Any, path: Path) -> tuple[int, ...]:
    """Return the place of each step of a path among its siblings."""
    places: list[int] = []
    for step in path:
        if isinstance(step, int):
            places.append(step)
            node = node[step]
            continue
        children = node if isinstance(node, dict) else vars(node)
        places.append(list(children).index(step))
        node = children[step]
    return tuple(places)


def _is_f8(layer: _Dense) -> bool:
    if isinstance(layer, nnx.Einsum):
        return isinstance(layer.einsum_op, F8Einsum)
    return isinstance(layer.dot_general, F8DotGeneral)


def _why_not(layer: _Dense) -> str | None:
    """Return why a layer cannot be in f8, or None."""
    if isinstance(layer, nnx.Einsum):
        if layer.einsum_op is not jnp.einsum:
            return "it has another einsum_op"
        if layer.einsum_str is None:
            return "its equation is given by the call"
        if reason := why_no_product(layer.einsum_str):
            return f"its equation {reason}"
    else:
        if getattr(layer, "dot_general_cls", None) is not None:
            return "it has a dot_general_cls"
        own = layer.dot_general
        if own not in (None, jax.lax.dot_general) and not isinstance(own, DotGeneral):
            return "it has another dot_general"
        if getattr(layer, "batch_axis", None):
            return "it has batch axes"
    wanted, shape = _shape(layer), layer.kernel.shape
    if shape[len(shape) - len(wanted) :] != wanted:
        return f"its kernel is {[*shape]}, and {[*wanted]} was expected"
    for size, role in zip(_sizes(layer), ("sums over", "has"), strict=True):
        if size % _MULTIPLE:
            return f"it {role} {size} features, no multiple of {_MULTIPLE}"
    return None


def _shape(layer: _Dense) -> tuple[int, ...]:
    """Return the shape that a layer's kernel has, if it is not stacked."""
    if isinstance(layer, nnx.Einsum):
        return tuple(layer.kernel_shape)
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    return (*layer.in_features, *layer.out_features)


def _sizes(layer: _Dense) -> tuple[int, int]:
    """Return the numbers of features that a layer sums over, and of its result."""
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nnx.LinearGeneral):
        return math.prod(layer.in_features), math.prod(layer.out_features)
    assert layer.einsum_str is not None
    first = layer.einsum_str.partition(",")[0]
    (_, over), _ = contraction(layer.einsum_str, len(first.replace("...", "")))
    summed = math.prod(layer.kernel_shape[axis] for axis in over)
    return summed, math.prod(layer.kernel_shape) // max(summed, 1)


def _stack(layer: _Dense) -> tuple[int, ...]:
    """Return the axes that `nnx.vmap` has put before a kernel's own."""
    shape = layer.kernel.shape
    return shape[: len(shape) - len(_shape(layer))]


def _turn(layer: _Dense, recipe: Recipe, rhs_sharding: Any) -> None:
    implementation: Implementation = getattr(layer, "implementation", "auto")
    product: F8DotGeneral | F8Einsum
    if isinstance(layer, nnx.Einsum):
        product = F8Einsum(recipe, rhs_sharding=rhs_sharding)
        layer.einsum_op = nnx.data(product)
    else:
        if isinstance(layer.dot_general, DotGeneral):
            implementation = layer.dot_general.implementation
        product = F8DotGeneral(recipe, implementation, rhs_sharding)
        layer.dot_general = nnx.data(product)
    stack = _stack(layer)
    for name in ("x", "w"):
        state = getattr(product, name)
        if state is not None and stack:
            value = jnp.broadcast_to(state[...], (*stack, *state.shape))
            setattr(product, name, F8State(value))
