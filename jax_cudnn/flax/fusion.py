# SPDX-License-Identifier: Apache-2.0
"""Runs Flax's own layer code with product, bias, residual and activation in one kernel.

Flax still decides geometry, parameters and dtypes: its `__call__` runs on a stand-in
for the layer, which gives it another product and hides the bias from it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation
from jax_cudnn.ops.common.activations import Activation
from jax_cudnn.ops.common.arguments import as_operand
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.products.causal_conv1d import causal_conv1d

# For each product, a layer's own names of the product's operands.
_ARGUMENTS = {
    "conv": {"lhs": "inputs", "rhs": "kernel"},
    "dot_general": {"lhs": "inputs", "rhs": "kernel"},
    "f8.dot_general": {"lhs": "inputs", "rhs": "kernel"},
}


@dataclass(kw_only=True, slots=True)
class FusedProduct:
    """The product of one call of a layer, with everything that goes into its kernel.

    Stands in for `jax.lax.conv_general_dilated` or `jax.lax.dot_general`. ``bias`` is
    set when the layer promotes its parameters, before it calls the product. ``op`` is
    how the product's errors begin, if not with its name.
    """

    layer: str
    product: Callable[..., jax.Array]
    activation: Activation | None
    residual: ArrayLike | None
    implementation: Implementation
    bias: jax.Array | None = None
    op: str | None = None

    def __call__(
        self,
        *operands: Any,
        preferred_element_type: Any = None,
        out_sharding: object = None,
        **geometry: Any,
    ) -> jax.Array:
        """Return the layer's result."""
        dtype = preferred_element_type
        if dtype is not None and self.bias is not None:
            # The dtype that adding the bias to the product would give.
            dtype = jnp.promote_types(dtype, self.bias.dtype)
        op = self.op or self.product.__name__
        with on_behalf_of(self.layer, op, **_ARGUMENTS[op]):
            return self.product(
                *operands,
                **geometry,
                preferred_element_type=dtype,
                out_sharding=out_sharding,
                bias=self.bias,
                residual=self.residual,
                activation=self.activation,
                implementation=self.implementation,
            )


def causal_convolution(
    layer: Any,
    arrays: tuple[jax.Array, jax.Array, jax.Array | None],
    **given: Any,
) -> Any:
    """Return a `CausalConv1D`'s result for inputs, kernel (K, 1, c) and bias."""
    x, kernel, bias = arrays
    with on_behalf_of("CausalConv1D", "causal_conv1d", x="inputs", w="kernel"):
        return causal_conv1d(
            x,
            kernel[:, 0],
            bias=bias,
            activation=layer.activation,
            implementation=layer.implementation,
            **given,
        )


class _StandIn:
    """Has the attributes of a layer, except for those that are given here."""

    def __init__(self, layer: object, changes: dict[str, Any]) -> None:
        vars(self).update(changes, _layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def call_with(
    flax_class: type,
    layer: object,
    *arguments: Any,
    keywords: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> jax.Array:
    """Run the `__call__` of Flax's class with these attributes of the layer changed.

    ``keywords`` are its arguments by name. This runs the method as Flax wrote it,
    without linen's wrapper, which the layer's own `__call__` has passed through
    already. With a real module instead of the stand-in, intermediates would be recorded
    and interceptors run a second time.
    """
    stand_in = _StandIn(layer, changes)
    return inspect.unwrap(flax_class.__call__)(stand_in, *arguments, **keywords)


def fold_residual(
    layer: str, residual: ArrayLike | None, shape: tuple[int, ...], space: int
) -> jax.Array | None:
    """Merge the residual's batch axes into one, as Flax's Conv does with its inputs.

    The inputs have `shape`, whose last `space` axes are not batch axes.
    """
    if residual is None:
        return None
    x = as_operand(layer, "residual", residual)
    batch = shape[: len(shape) - space]
    padded = (1,) * (len(shape) - x.ndim) + x.shape
    own, rest = padded[: len(batch)], padded[len(batch) :]
    if x.ndim > len(shape) or any(
        size not in (1, full) for size, full in zip(own, batch, strict=True)
    ):
        raise ValueError(
            f"{layer}: residual has shape {list(x.shape)}, whose batch axes do not "
            f"broadcast to those of the inputs, {list(batch)}. Each of them must be 1 "
            "or the full size. Insert or expand axes."
        )
    if any(size != 1 for size in own):
        x = jnp.broadcast_to(jnp.reshape(x, padded), (*batch, *rest))
        own = batch
    return jnp.reshape(x, (math.prod(own), *rest))


def refuse_replacements(layer: str, names: list[str]) -> None:
    """Raise ValueError if a product is passed to a layer that has its own."""
    if names:
        raise ValueError(
            f"{layer}: {', '.join(names)} was passed. This layer runs jax_cudnn's own "
            "product, with bias and activation in its kernel. Leave it out, or pass it "
            "to Flax's layer."
        )
