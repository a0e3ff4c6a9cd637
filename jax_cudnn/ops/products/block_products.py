# SPDX-License-Identifier: Apache-2.0
"""Contractions in MXFP8 and NVFP4 of operands in 16 or 32 bits, with their gradients.

Blocks lie along what a product sums over. So each of the three products of a training
step has copies of its own: inputs and weights are rounded along the axes that are
summed over forward, and along the others for the gradients, as the cotangent is.
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
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_cudnn.config import Options
from jax_cudnn.graph import block_scaled_graph
from jax_cudnn.lowering import (
    axes_in,
    entries_of,
    gathered_along,
    kept_copy,
    run_graph,
    run_with_gradient,
    sharded_as,
)
from jax_cudnn.ops.common.arguments import (
    tensor,
    why_partial,
    why_symbolic,
)
from jax_cudnn.ops.common.f8_recipes import BlockRecipe
from jax_cudnn.ops.common.f8_scaling import stands_for
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.ops.products.f8_blocks import Blocks, in_blocks
from jax_cudnn.ops.products.f8_gradients import (
    Given,
    ProductWithGradient,
    Sums,
    bias_operand,
    gradient_of_bias,
    with_bias,
)
from jax_cudnn.reference.dtypes import dtype_name


def block_products(
    op: str,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    biases: Mapping[str, ArrayLike | None],
    recipe: BlockRecipe,
    sums: Sums,
    call: Options,
    w_sharding: object = None,
    *,
    kind: type["BlockProduct"] | None = None,
    more: Mapping[str, jax.Array] = MappingProxyType({}),
) -> list[jax.Array]:
    """Return the products of x with some weights, by the same copies of x.

    ``more`` are operands that a ``kind`` of product has besides.
    """
    found: list[jax.Array] = []
    product = (kind or BlockProduct)(
        op=op, recipe=recipe, sums=sums, call=call, w_sharding=w_sharding
    )
    of_x = product.copies("x", x)
    for name, w in weights.items():
        given = {"x": x, "w": w, **of_x, **product.copies("w", w), **more}
        given |= bias_operand(op, biases.get(name))
        found += run_with_gradient(product, given)
    return found


@dataclass(frozen=True, kw_only=True)
class BlockProduct(ProductWithGradient):
    """A product in blocks, and its gradients.

    ``x_product_values``, ``x_product_scales`` and ``x_product_scale`` are those of the
    copy of x for the product, as `Blocks` has them, and so on.
    """

    recipe: BlockRecipe

    def uses(self, role: str) -> dict[str, bool]:
        """Return what an operand has copies for, and whether gradients read them."""
        del role
        return {"product": False, "gradient": True}

    def copies(self, role: str, x: jax.Array) -> dict[str, jax.Array]:
        """Return the copies of an operand, by the names of their arrays."""
        found: dict[str, jax.Array] = {}
        for use, is_kept in self.uses(role).items():
            blocks = laid_out(jax.lax.stop_gradient(x), *self.axes(role, use, x.ndim))
            blocks = in_blocks(blocks, self.recipe)
            if is_kept:
                blocks = blocks._replace(
                    values=kept_copy(blocks.values), scales=kept_copy(blocks.scales)
                )
            for name, array in blocks._asdict().items():
                if array is not None:
                    found[f"{role}_{use}_{name}"] = array
        return found

    def by_copies(self, given: Given) -> jax.Array:
        """Return the product by the copies."""
        dtype = given["x"].dtype
        bias = given.get("bias")
        product = self._multiply(
            self.copy(given, "x", "product"),
            self.copy(given, "w", "product"),
            dtype if bias is None else np.dtype(np.float32),
        )
        return with_bias(product, given)

    def reference(self, given: Given) -> jax.Array:
        """Return the product of the rounded operands, differentiable by x and w."""
        x, w = (self.rounded(given, role, "product") for role in ("x", "w"))
        return with_bias(self.contracted(given, x, w), given)

    def gradients_by_copies(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the copies, and two of the cotangent."""
        by_columns, by_rows = self._cotangents(given, grad)
        x_grad = self._multiply(
            in_blocks(laid_out(grad, *by_columns), self.recipe),
            self.copy(given, "w", "gradient"),
            given["x"].dtype,
        )
        w_grad = self._multiply(
            self.copy(given, "x", "gradient"),
            in_blocks(laid_out(grad, *by_rows), self.recipe),
            given["w"].dtype,
        )
        return self.as_operands(given, x_grad, w_grad) | gradient_of_bias(given, grad)

    def reference_gradients(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the rounded operands, to be differentiated again."""
        x, w = (self.rounded(given, role, "gradient") for role in ("x", "w"))
        transposed = jax.vjp(functools.partial(self.contracted, given), x, w)[1]
        x_grad, w_grad = (
            transposed(self.rounded_cotangent(grad, *axes))[i]
            for i, axes in enumerate(self._cotangents(given, grad))
        )
        found = {
            "x": x_grad.astype(given["x"].dtype),
            "w": w_grad.astype(given["w"].dtype),
        }
        return found | gradient_of_bias(given, grad)

    # --- copies -----------------------------------------------------------------------

    def axes(
        self, role: str, use: str, rank: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the axes of an operand that a copy keeps, and those of its blocks."""
        over = self.sums["xw".index(role)]
        kept = tuple(axis for axis in range(rank) if axis not in over)
        return (kept, over) if use == "product" else (tuple(sorted(over)), kept)

    def _cotangents(
        self, given: Given, grad: jax.Array
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Return the same of the cotangent's copies, by its columns and by its rows."""
        rows, _ = self.kept(given["x"], given["w"])
        leading = tuple(range(len(rows)))
        trailing = tuple(range(len(rows), grad.ndim))
        return (leading, trailing), (trailing, leading)

    def copy(self, given: Given, role: str, use: str) -> Blocks:
        """Return a copy, laid out as the products read it."""
        prefix = f"{role}_{use}_"
        values, scales = given[prefix + "values"], given[prefix + "scales"]
        if role == "w" and self.w_sharding is not None:
            # Not before it is saved: what is saved stays divided.
            rank = given["w"].ndim
            kept, over = self.axes(role, use, rank)
            entries = entries_of(self.w_sharding, rank)
            rows = [entries[axis] for axis in kept]
            names = tuple(name for axis in over for name in axes_in(entries[axis]))
            values = sharded_as(values, _like(self.w_sharding, *rows, names or None))
            scales = sharded_as(scales, _like(self.w_sharding, *rows, None))
        return Blocks(values, scales, given.get(prefix + "scale"))

    def rounded(self, given: Given, role: str, use: str) -> jax.Array:
        """Return what a copy stands for, in f32, with the operand's derivative."""
        x = given[role]
        blocks = self.copy(given, role, use)
        return stands_for(x, _as_it_was(blocks, x, *self.axes(role, use, x.ndim)))

    def rounded_cotangent(
        self, grad: jax.Array, kept: tuple[int, ...], over: tuple[int, ...]
    ) -> jax.Array:
        """Return what a copy of the cotangent stands for, with its derivative."""
        stopped = jax.lax.stop_gradient(grad)
        blocks = in_blocks(laid_out(stopped, kept, over), self.recipe)
        return stands_for(grad, _as_it_was(blocks, grad, kept, over))

    # --- products ---------------------------------------------------------------------

    def _multiply(self, a: Blocks, b: Blocks, dtype: np.dtype) -> jax.Array:
        """Return a product over the last axes: the other axes of a, then those of b."""
        sides = {"x": a.values, "w": b.values}
        if reason := why_symbolic(**sides) or why_partial(**sides):
            check_implementation(self.op, reason, self.call)
            sums = ((a.scales.ndim - 1,), (b.scales.ndim - 1,))
            product = jax.lax.dot_general(
                a.dequantized(), b.dequantized(), (sums, ((), ()))
            )
            return product.astype(dtype)
        (x, x_scales), (y, y_scales) = a.read(), b.read()
        scale = None if a.scale is None or b.scale is None else a.scale * b.scale
        operands = {
            "a": _matrix(x, (0, 1, 2)),
            "scale_a": _matrix(x_scales, (0, 1, 2)),
            "b": _matrix(y, (0, 2, 1)),
            "scale_b": _matrix(y_scales, (0, 2, 1)),
        }
        if scale is not None:
            operands["scale_output"] = Operand(scale.reshape(1, 1, 1), (0, 1, 2))
        tensors = {role: tensor(role, *each) for role, each in operands.items()}
        graph = block_scaled_graph(tensors, dtype_name(dtype))  # type: ignore[arg-type]
        arrays = [each.array for each in operands.values()]
        (product,) = run_graph(graph, arrays, self.call)
        return product.reshape(*x.shape[:-1], *y.shape[:-1])


def _matrix(x: jax.Array, order: tuple[int, ...]) -> Operand:
    """Return an array as a matrix of its first axes and its last one."""
    return Operand(x, order, (1, math.prod(x.shape[:-1]), x.shape[-1]))


def laid_out(x: jax.Array, kept: Sequence[int], over: Sequence[int]) -> jax.Array:
    """Return an array with some axes in front, and the others merged into the last."""
    # Blocks need the merged axes on one device, but for the first.
    x = gathered_along(x, over[1:])
    x = jnp.transpose(x, (*kept, *over))
    shape = x.shape[: len(kept)]
    return x.reshape(*shape, math.prod(x.shape[len(kept) :]))


def _as_it_was(
    blocks: Blocks, x: jax.Array, kept: Sequence[int], over: Sequence[int]
) -> jax.Array:
    """Return what blocks of an array stand for, with the axes of the array."""
    shape = [x.shape[axis] for axis in (*kept, *over)]
    wide = blocks.dequantized()
    count = math.prod(shape[len(kept) :])
    wide = jax.lax.slice_in_dim(wide, 0, count, axis=wide.ndim - 1).reshape(shape)
    axes = (*kept, *over)
    return jnp.transpose(wide, [axes.index(axis) for axis in range(x.ndim)])


def _like(sharding: Any, *entries: Any) -> Any:
    """Return a sharding of the same mesh with other entries."""
    spec = PartitionSpec(*entries)
    mesh = getattr(sharding, "mesh", None)
    return spec if mesh is None else NamedSharding(mesh, spec)
