# SPDX-License-Identifier: Apache-2.0
"""The base class of products of operands that are rounded to f8 or blocks.

The derivative is written by hand. Forward, copies of inputs and weights are multiplied;
backward, copies of these and of the cotangent. Forward mode and higher orders
differentiate the reference: the product of the rounded operands, where rounding and
saturation count as the identity.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.lowering import product_result, with_derivative_of
from jax_cudnn.ops.common.arguments import as_operand, check_dtype
from jax_cudnn.ops.products.dot_general import dot_general

# The axes of two operands that are summed over together.
Sums = tuple[tuple[int, ...], tuple[int, ...]]
Given = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class ProductWithGradient(abc.ABC):
    """A product of copies, and its gradients; all operands are given by name."""

    op: str
    sums: Sums
    call: Options
    w_sharding: Any

    differentiable = ("x", "w", "bias")

    def forward(self, given: Given) -> tuple[jax.Array]:
        """Return the product; its derivative is the reference's."""
        return (with_derivative_of(self.reference, self.by_copies, dict(given)),)

    def again(self, given: Given) -> tuple[jax.Array]:
        """Return the product inside a derivative, kept as a matmul by remat policies.

        Its own derivative is the reference's, as in `forward`: cotangents of higher
        orders have other sizes than those that a state knows.
        """
        return (product_result(*self.forward(given)),)

    def gradients(
        self,
        given: Given,
        results: Sequence[jax.Array],
        cotangents: Sequence[jax.Array | None],
        wanted: tuple[str, ...],
    ) -> dict[str, jax.Array]:
        """Return the gradients, those by the states being the next states."""
        del results, wanted
        (grad,) = cotangents
        assert grad is not None
        return with_derivative_of(
            self.reference_gradients, self.gradients_by_copies, dict(given), grad
        )

    @abc.abstractmethod
    def by_copies(self, given: Given) -> jax.Array:
        """Return the product by the copies."""

    @abc.abstractmethod
    def reference(self, given: Given) -> jax.Array:
        """Return the product of the rounded operands, differentiable by x and w."""

    @abc.abstractmethod
    def gradients_by_copies(self, given: Given, grad: jax.Array) -> dict[str, Any]:
        """Return the gradients by the copies."""

    @abc.abstractmethod
    def reference_gradients(self, given: Given, grad: jax.Array) -> dict[str, Any]:
        """Return the gradients by the rounded operands, to be differentiated again."""

    def kept(self, x: jax.Array, w: jax.Array) -> tuple[tuple[int, ...], ...]:
        """Return the axes of x and those of w that are not summed over."""
        rows, columns = (
            tuple(axis for axis in range(each.ndim) if axis not in over)
            for each, over in zip((x, w), self.sums, strict=True)
        )
        return rows, columns

    def as_operands(
        self, given: Given, x_grad: jax.Array, w_grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return gradients by x and w with the axes of x and w.

        As products have them, their axes are those of the cotangent, and those that are
        summed over, in the order of the other operand.
        """
        rows, columns = self.kept(given["x"], given["w"])
        by_x, by_w = map(_inverse, self.sums)
        of_x = (*rows, *(self.sums[0][i] for i in by_w))
        of_w = (*(self.sums[1][i] for i in by_x), *columns)
        return {
            "x": jnp.transpose(x_grad, _inverse(of_x)),
            "w": jnp.transpose(w_grad, _inverse(of_w)),
        }

    def contracted(self, given: Given, x: jax.Array, w: jax.Array) -> jax.Array:
        """Return the product of two rounded operands, in f32."""
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


def bias_operand(op: str, bias: ArrayLike | None) -> dict[str, jax.Array]:
    """Return the bias by its name, checked, or nothing if there is none."""
    if bias is None:
        return {}
    array = as_operand(op, "bias", bias)
    check_dtype(op, "bias", array)
    return {"bias": array}


def with_bias(product: jax.Array, given: Given) -> jax.Array:
    """Return a product in f32 with the bias, if there is one, rounded to x's dtype."""
    if (bias := given.get("bias")) is not None:
        product = product + jnp.broadcast_to(bias, product.shape).astype(jnp.float32)
    return product.astype(given["x"].dtype)


def gradient_of_bias(given: Given, grad: jax.Array) -> dict[str, jax.Array]:
    """Return the cotangent, added up in f32 over what the bias is broadcast along."""
    if (bias := given.get("bias")) is None:
        return {}
    padded = (1,) * (grad.ndim - bias.ndim) + bias.shape
    over = [i for i, size in enumerate(padded) if size != grad.shape[i]]
    total = grad.astype(jnp.float32).sum(over, keepdims=True)
    return {"bias": total.reshape(bias.shape).astype(bias.dtype)}


def _inverse(axes: Sequence[int]) -> list[int]:
    """Return the places of axes in their order."""
    return sorted(range(len(axes)), key=axes.__getitem__)
