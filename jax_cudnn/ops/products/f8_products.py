# SPDX-License-Identifier: Apache-2.0
"""Contractions in f8 of operands in 16 or 32 bits, with their gradients and states.

The derivative is written by hand. Forward, f8 copies of inputs and weights are
multiplied; backward, these copies and one of the cotangent. Forward mode and higher
orders differentiate the reference: the product of the rounded operands, where rounding
and saturation count as the identity.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.lowering import kept_copy, run_by_hand, sharded_as
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_dtype,
    describe,
)
from jax_cudnn.ops.common.f8_recipes import (
    BACKWARD,
    FORWARD,
    DenseState,
    Recipe,
    scale_and_next,
)
from jax_cudnn.ops.common.f8_scaling import dequantize, quantize
from jax_cudnn.ops.common.plain import Epilogue, check_implementation
from jax_cudnn.ops.products.dot_general import as_product, dot_general
from jax_cudnn.ops.products.operands import common_dtypes, in_three, run_product
from jax_cudnn.reference.dtypes import dtype_name

Arrays = Sequence[jax.Array]
# The axes of two operands that are summed over together.
Sums = tuple[tuple[int, ...], tuple[int, ...]]


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
    own, first = jax.lax.stop_gradient(x), states[0]
    x_scale, x_next = scale_and_next(recipe, "x", first and first.x, own, FORWARD)
    x_copy = _copy(own, x_scale)
    found: list[jax.Array] = []
    following: list[DenseState | None] = []
    for (name, w), state in zip(weights.items(), states, strict=True):
        own = jax.lax.stop_gradient(w)
        w_scale, w_next = scale_and_next(recipe, "w", state and state.w, own, FORWARD)
        given = {
            "x": x,
            "w": w,
            "x_copy": x_copy,
            "w_copy": _copy(own, w_scale),
            "x_scale": x_scale,
            "w_scale": w_scale,
            **more,
        }
        bias = biases.get(name)
        if bias is not None:
            given["bias"] = as_operand(op, "bias", bias)
            check_dtype(op, "bias", given["bias"])
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
        found += run_by_hand(product, given)
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
    return kept_copy(quantize(x, scale, FORWARD))


def cotangent(grad: jax.Array, scale: jax.Array) -> jax.Array:
    """Return a cotangent in f8. Its infinities stay so: loss scaling looks for them."""
    stored = quantize(grad, scale, BACKWARD)
    return jnp.where(jnp.isinf(grad), grad.astype(BACKWARD), stored)


def _read(copy: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(copy, FORWARD)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product in f8, and its gradients; all operands are given by name.

    ``x_copy`` and ``w_copy`` are the bytes of the operands in f8, ``x_scale`` and
    ``w_scale`` their scales. ``x_state`` and its like are states, ``x_next`` and
    ``w_next`` those of the next step, as far as they are known forward.
    """

    op: str
    recipe: Recipe
    sums: Sums
    call: Options
    w_sharding: Any

    differentiable = ("x", "w", "bias", "x_state", "w_state", "grad_state")

    def forward(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array]:
        """Return the product; its derivative is the reference's."""
        return (_product(self, dict(given)),)

    def again(self, given: Mapping[str, jax.Array]) -> tuple[jax.Array]:
        """Return the product inside a derivative, as `forward` does.

        Cotangents of higher orders have other sizes than those that a state knows.
        """
        return self.forward(given)

    def gradients(
        self,
        given: Mapping[str, jax.Array],
        results: Arrays,
        cotangents: Sequence[jax.Array | None],
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        """Return the gradients, those by the states being the next states."""
        del results, wanted
        (grad,) = cotangents
        assert grad is not None
        return _gradients(self, dict(given), grad)

    def by_copies(self, given: Mapping[str, jax.Array]) -> jax.Array:
        """Return the product by the f8 copies."""
        return self._multiply(
            self.stored(given, "x"),
            self.stored(given, "w"),
            self.sums,
            given["x"].dtype,
            given.get("bias"),
        )

    def reference(self, given: Mapping[str, jax.Array]) -> jax.Array:
        """Return the product of the rounded operands, differentiable by x and w."""
        y = self.contracted(given, *self._rounded(given))
        if (bias := given.get("bias")) is not None:
            y = y + jnp.broadcast_to(bias, y.shape).astype(jnp.float32)
        return y.astype(given["x"].dtype)

    def gradients_by_copies(
        self, given: Mapping[str, jax.Array], grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the f8 copies."""
        x, w, state = given["x"], given["w"], given.get("grad_state")
        scale, following = scale_and_next(self.recipe, "grad", state, grad, BACKWARD)
        copy = cotangent(grad, scale), scale
        rows, columns = (
            tuple(axis for axis in range(each.ndim) if axis not in over)
            for each, over in zip((x, w), self.sums, strict=True)
        )
        leading = tuple(range(len(rows)))
        trailing = tuple(range(len(rows), grad.ndim))
        # As a product has them: the axes of grad, and those that are summed over, in
        # the order of the other operand.
        by_x, by_w = map(_inverse, self.sums)
        of_x = (*rows, *(self.sums[0][i] for i in by_w))
        of_w = (*(self.sums[1][i] for i in by_x), *columns)
        x_grad = self._multiply(
            copy, self.stored(given, "w"), (trailing, columns), x.dtype
        )
        w_grad = self._multiply(self.stored(given, "x"), copy, (rows, leading), w.dtype)
        found = {
            "x": jnp.transpose(x_grad, _inverse(of_x)),
            "w": jnp.transpose(w_grad, _inverse(of_w)),
        }
        return found | self.of_states(given, following) | self._of_bias(given, grad)

    def reference_gradients(
        self, given: Mapping[str, jax.Array], grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the rounded operands, to be differentiated again."""
        x, w = self._rounded(given)
        stopped, state = jax.lax.stop_gradient(grad), given.get("grad_state")
        scale, following = scale_and_next(self.recipe, "grad", state, stopped, BACKWARD)
        rounded = _stands_for(grad, cotangent(stopped, scale), scale)

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return self.contracted(given, x, w).astype(rounded.dtype)

        grads = jax.vjp(product, x, w)[1](rounded)
        found = dict(zip(("x", "w"), grads, strict=True))
        return found | self.of_states(given, following) | self._of_bias(given, grad)

    def contracted(
        self, given: Mapping[str, jax.Array], x: jax.Array, w: jax.Array
    ) -> jax.Array:
        """Return the product of operands in 16 or 32 bits, in f32."""
        del given
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(x.dtype, w.dtype)
        return dot_general(
            x.astype(dtype),
            w.astype(dtype),
            (self.sums, ((), ())),
            preferred_element_type=jnp.float32,
            implementation="xla" if self.call.implementation == "xla" else "auto",
        )

    def _rounded(self, given: Mapping[str, jax.Array]) -> list[jax.Array]:
        return [
            _stands_for(given[role], *self.stored(given, role)) for role in ("x", "w")
        ]

    def stored(
        self, given: Mapping[str, jax.Array], role: str
    ) -> tuple[jax.Array, jax.Array]:
        """Return an operand in f8, laid out as the products read it, and its scale."""
        copy = given[f"{role}_copy"]
        if role == "w" and self.w_sharding is not None:
            # Not before it is saved: what is saved stays divided.
            copy = sharded_as(copy, self.w_sharding)
        return _read(copy), given[f"{role}_scale"]

    def of_states(
        self, given: Mapping[str, jax.Array], following: jax.Array | None
    ) -> dict[str, jax.Array]:
        """Return the gradients by the states, which are the next states."""
        found = {
            f"{role}_state": given[f"{role}_next"]
            for role in ("x", "w")
            if f"{role}_next" in given
        }
        return found if following is None else {**found, "grad_state": following}

    def _of_bias(
        self, given: Mapping[str, jax.Array], grad: jax.Array
    ) -> dict[str, jax.Array]:
        if (bias := given.get("bias")) is None:
            return {}
        # Added up in f32, over the axes along which the bias is broadcast.
        padded = (1,) * (grad.ndim - bias.ndim) + bias.shape
        over = [i for i, size in enumerate(padded) if size != grad.shape[i]]
        total = grad.astype(jnp.float32).sum(over, keepdims=True)
        return {"bias": total.reshape(bias.shape).astype(bias.dtype)}

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


def _inverse(axes: Sequence[int]) -> list[int]:
    """Return the places of axes in their order."""
    return sorted(range(len(axes)), key=axes.__getitem__)


@jax.custom_jvp
def _stands_for(x: jax.Array, copy: jax.Array, scale: jax.Array) -> jax.Array:
    """Return what an f8 copy of x stands for, in x's dtype, with x's derivative."""
    return dequantize(copy, scale, x.dtype)


@_stands_for.defjvp
def _stands_for_jvp(primals: Any, tangents: Any) -> Any:
    return _stands_for(*primals), tangents[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(product: Product, given: dict[str, jax.Array]) -> jax.Array:
    return product.by_copies(given)


@_product.defjvp
def _product_jvp(product: Product, primals: Any, tangents: Any) -> Any:
    _, along = jax.jvp(product.reference, primals, tangents)
    return _product(product, *primals), along


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    product: Product, given: dict[str, jax.Array], grad: jax.Array
) -> dict[str, jax.Array]:
    return product.gradients_by_copies(given, grad)


@_gradients.defjvp
def _gradients_jvp(product: Product, primals: Any, tangents: Any) -> Any:
    _, along = jax.jvp(product.reference_gradients, primals, tangents)
    return _gradients(product, *primals), along
