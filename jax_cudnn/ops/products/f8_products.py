# SPDX-License-Identifier: Apache-2.0
"""Contractions in f8 of operands in 16 or 32 bits, with their gradients and states.

An operand has one scale for the whole tensor, and one copy for all products.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.lowering import in_row_order, kept_copy, run_with_gradient, sharded_as
from jax_cudnn.ops.common.arguments import (
    as_operand,
    describe,
)
from jax_cudnn.ops.common.f8_recipes import (
    BACKWARD,
    FORWARD,
    Current,
    Delayed,
    DenseState,
    Recipe,
    scale_and_next,
)
from jax_cudnn.ops.common.f8_scaling import dequantize, over_scale, stands_for
from jax_cudnn.ops.common.plain import Epilogue, check_implementation
from jax_cudnn.ops.products.block_products import block_products
from jax_cudnn.ops.products.dot_general import as_product
from jax_cudnn.ops.products.f8_gradients import (
    Given,
    ProductWithGradient,
    Sums,
    bias_operand,
    gradient_of_bias,
    with_bias,
)
from jax_cudnn.ops.products.operands import common_dtypes, in_three, run_product
from jax_cudnn.reference.dtypes import clipped, dtype_name, kept_rounding

_LARGEST = float(jnp.finfo(BACKWARD).max)


def operand(op: str, name: str, value: ArrayLike) -> jax.Array:
    """Return an operand of 16 or 32 bits, or raise TypeError."""
    array = as_operand(op, name, value)
    if dtype_name(array.dtype) not in ("bf16", "f16", "f32"):
        raise TypeError(
            f"{op}: {name} is {describe(array)}. Supported dtypes are bf16, f16 and "
            "f32, which are rounded to f8 here. For operands in f8 call "
            "jax_cudnn.matmul with scale_a and scale_b."
        )
    return array


def products(
    op: str,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    biases: Mapping[str, ArrayLike | None],
    states: Sequence[DenseState | None],
    recipe: Recipe,
    sums: Sums,
    call: Options,
    w_sharding: object = None,
    *,
    kind: type["Product"] | None = None,
    more: Mapping[str, jax.Array] = MappingProxyType({}),
) -> tuple[list[jax.Array], list[DenseState | None]]:
    """Return the products of x with some weights, by the same copy of x, and states.

    The states are the next ones, but for the cotangents'. ``more`` are operands that a
    ``kind`` of product has besides.
    """
    if not isinstance(recipe, Current | Delayed):
        found = block_products(op, x, weights, biases, recipe, sums, call, w_sharding)
        return found, [None] * len(found)
    own, first = in_row_order(jax.lax.stop_gradient(x)), states[0]
    x_scale, x_next = scale_and_next(recipe, "x", first and first.x, own, FORWARD)
    x_copy = _copy(own, x_scale)
    found = []
    following: list[DenseState | None] = []
    for (name, w), state in zip(weights.items(), states, strict=True):
        own = in_row_order(jax.lax.stop_gradient(w))
        w_scale, w_next = scale_and_next(recipe, "w", state and state.w, own, FORWARD)
        given = {
            "x": x,
            "w": w,
            "x_copy": x_copy,
            "w_copy": _copy(own, w_scale),
            "x_scale": x_scale,
            "w_scale": w_scale,
            **bias_operand(op, biases.get(name)),
            **more,
        }
        if state is not None:
            assert x_next is not None
            assert w_next is not None
            given |= {"x_state": state.x, "w_state": state.w}
            given |= {"x_next": x_next, "w_next": w_next}
            if state.grad is not None:
                given["grad_state"] = state.grad
            state = DenseState(x_next, w_next, state.grad)
        product = (kind or Product)(
            op=op, recipe=recipe, sums=sums, call=call, w_sharding=w_sharding
        )
        found += run_with_gradient(product, given)
        following.append(state)
    return found, following


def last_and_first(op: str, x: jax.Array, name: str, w: jax.Array, axes: int) -> Sums:
    """Return the last axes of x and the first of w, which must be as long."""
    is_int = isinstance(axes, int | np.integer) and not isinstance(axes, bool)
    if not is_int or axes < 1 or axes > min(x.ndim, w.ndim - 1):
        raise ValueError(
            f"{op}: axes={axes!r}, x is {describe(x)} and {name} {describe(w)}. `axes` "
            f"must be an int of 1 or more that x has, and {name} one axis more."
        )
    if x.shape[x.ndim - axes :] != w.shape[:axes]:
        raise ValueError(
            f"{op}: x is {describe(x)} and {name} {describe(w)}. The last axes of x, "
            f"{axes} of them, must be the first of {name}. Transpose or reshape one of "
            "them."
        )
    return tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))


def _copy(x: jax.Array, scale: jax.Array) -> jax.Array:
    return kept_copy(clipped(over_scale(x, scale), FORWARD))


def cotangent(grad: jax.Array, scale: jax.Array) -> jax.Array:
    """Return a cotangent in f8. Its infinities stay so: loss scaling looks for them."""
    scaled = over_scale(grad, scale)
    finite = jnp.clip(scaled, -_LARGEST, _LARGEST)
    return jnp.where(jnp.isinf(grad), scaled, finite).astype(BACKWARD)


def _read(copy: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(copy, FORWARD)


@dataclass(frozen=True, kw_only=True)
class Product(ProductWithGradient):
    """A product in f8, and its gradients.

    ``x_copy`` and ``w_copy`` are the bytes of the operands in f8, ``x_scale`` and
    ``w_scale`` their scales. ``x_state`` and its like are states, ``x_next`` and
    ``w_next`` those of the next step, as far as they are known forward.
    """

    recipe: Delayed | Current

    differentiable = (
        *ProductWithGradient.differentiable,
        "x_state",
        "w_state",
        "grad_state",
    )

    def by_copies(self, given: Given) -> jax.Array:
        """Return the product by the f8 copies."""
        return self._multiply(
            self.stored(given, "x"),
            self.stored(given, "w"),
            self.sums,
            given["x"].dtype,
            given.get("bias"),
        )

    def reference(self, given: Given) -> jax.Array:
        """Return the product of the rounded operands, differentiable by x and w."""
        return with_bias(self.contracted(given, *self._rounded(given)), given)

    def gradients_by_copies(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the f8 copies."""
        grad = in_row_order(grad)
        x, w, state = given["x"], given["w"], given.get("grad_state")
        scale, following = scale_and_next(self.recipe, "grad", state, grad, BACKWARD)
        copy = cotangent(grad, scale), scale
        rows, columns = self.kept(x, w)
        leading = tuple(range(len(rows)))
        trailing = tuple(range(len(rows), grad.ndim))
        x_grad = self._multiply(
            copy, self.stored(given, "w"), (trailing, columns), x.dtype
        )
        w_grad = self._multiply(self.stored(given, "x"), copy, (rows, leading), w.dtype)
        found = self.as_operands(given, x_grad, w_grad)
        return found | self.of_states(given, following) | gradient_of_bias(given, grad)

    def reference_gradients(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the rounded operands, to be differentiated again."""
        x, w = self._rounded(given)
        stopped, state = jax.lax.stop_gradient(grad), given.get("grad_state")
        scale, following = scale_and_next(self.recipe, "grad", state, stopped, BACKWARD)
        copy = cotangent(stopped, scale)
        rounded = stands_for(grad, dequantize(copy, scale, grad.dtype))

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return self.contracted(given, x, w).astype(rounded.dtype)

        grads = jax.vjp(product, x, w)[1](rounded)
        found = dict(zip(("x", "w"), grads, strict=True))
        return found | self.of_states(given, following) | gradient_of_bias(given, grad)

    def _rounded(self, given: Given) -> list[jax.Array]:
        return [
            stands_for(x, dequantize(*self.stored(given, role), x.dtype))
            for role, x in (("x", given["x"]), ("w", given["w"]))
        ]

    def stored(self, given: Given, role: str) -> tuple[jax.Array, jax.Array]:
        """Return an operand in f8, laid out as the products read it, and its scale."""
        copy = given[f"{role}_copy"]
        if role == "w" and self.w_sharding is not None:
            # Not before it is saved: what is saved stays divided.
            copy = sharded_as(copy, self.w_sharding)
        return _read(copy), given[f"{role}_scale"]

    def of_states(
        self, given: Given, following: jax.Array | None
    ) -> dict[str, jax.Array]:
        """Return the gradients by the states, which are the next states."""
        found = {
            f"{role}_state": given[f"{role}_next"]
            for role in ("x", "w")
            if f"{role}_next" in given
        }
        return found if following is None else {**found, "grad_state": following}

    def _multiply(
        self,
        a: tuple[jax.Array, jax.Array],
        b: tuple[jax.Array, jax.Array],
        sums: Sums,
        dtype: np.dtype,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        (x, x_scale), (y, y_scale) = a, b
        dtypes = common_dtypes(self.op, x, y)
        if reason := dtypes.why_plain(np.dtype(dtype), lhs=x, rhs=y):
            check_implementation(self.op, reason, self.call)
            x, y = kept_rounding(x), kept_rounding(y)
            z = jax.lax.dot_general(
                x, y, (sums, ((), ())), preferred_element_type=jnp.float32
            )
            z = z * (x_scale * y_scale)
            if bias is not None:
                z = z + jnp.broadcast_to(bias, z.shape).astype(jnp.float32)
            return z.astype(dtype)
        product = as_product(self.op, x, y, (sums, ((), ())))
        _, rows, columns = product.sizes
        count = math.prod(x.shape[axis] for axis in sums[0])
        scaled = product._replace(
            scale_a=in_three(self.op, "scale_a", x_scale, ((), rows, (count,))),
            scale_b=in_three(self.op, "scale_b", y_scale, ((), (count,), columns)),
        )
        epilogue = Epilogue.of(self.op, bias=bias)
        return run_product(scaled, dtypes, epilogue, np.dtype(dtype), self.call)
