# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.f8.ragged_dot`: products of groups of rows in f8, with their gradients.

The product and the gradient of the rows are in f8. That of the matrices adds up over
rows, along which no operand is stored, and cuBLASLt has no such kernel of f8: the f8
copy of the rows is multiplied in 16 bits with the cotangent as it came. With a scale
for each block, blocks along the rows would reach over the ends of groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.lowering import in_row_order
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import (
    as_operand,
    check_dtype,
    check_flag,
    check_integers,
    clipped,
    options,
)
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.f8_recipes import (
    BACKWARD,
    BlockRecipe,
    Current,
    DenseState,
    Recipe,
    check_state,
    scale_and_next,
)
from jax_cudnn.ops.common.f8_scaling import dequantize
from jax_cudnn.ops.products.block_products import BlockProduct, block_products, laid_out
from jax_cudnn.ops.products.f8_blocks import Blocks, in_blocks
from jax_cudnn.ops.products.f8_gradients import Given, ProductWithGradient
from jax_cudnn.ops.products.f8_products import Product, cotangent, operand, products
from jax_cudnn.ops.products.ragged_dot import (
    bias_of_rows,
    check_shapes,
    gradient_of_matrices,
    product_of_groups,
)

_BF16 = np.dtype(jnp.bfloat16)
_F32 = np.dtype(np.float32)
# The axes of x and w that are summed over.
_SUMS = ((1,), (1,))


def ragged_dot(
    x: ArrayLike,
    w: ArrayLike,
    group_sizes: ArrayLike,
    *,
    recipe: Recipe = Current(),  # noqa: B008 (immutable)
    state: DenseState | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    return_state: bool = False,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> Any:
    r"""Return a product for each group of rows in f8: :func:`dense` with many matrices.

    With j(m) the group of row m,

    .. math::

        \mathrm{output}_{mn} = \mathrm{activation}\Big(s_x s_w \sum_k
            Q(x / s_x)_{mk} \, Q(w / s_w)_{j(m)kn} + \mathrm{bias}_{j(m)n}\Big)

    Q rounds to f8_e4m3fn and saturates. x and w have one scale each. The gradient of x
    multiplies the copy of w with the cotangent in f8_e5m2. The gradient of w multiplies
    the copy of x by the cotangent before it is quantized, in 16 bits: bf16, or f16
    where both x and w are f16. The derivative treats rounding and saturation as the
    identity.

    With `f8.MXFP8` and `f8.NVFP4`, blocks lie along k, and for the gradient of x along
    n. No kernel multiplies them: what they stand for is multiplied in bf16, in which it
    is exact. The gradient of w is as above, in bf16.

    Rows beyond the last group have neither sum nor bias. They reach no scale, and NaN
    in them reaches nothing. All of JAX's transformations apply. States are those of
    :func:`dense`, and the gradient by `state` is the state of the next step.

    Axis letters: m rows, k contraction, n columns, g groups.

    Args:
      x: (m, k); bf16, f16 or f32. The rows of a group are adjacent.
      w: (g, k, n), of one of these dtypes, which may be another one than x's.
      group_sizes: (g,) integers, as for :func:`jax_cudnn.ragged_dot`.
      recipe: `f8.Current()` (default), `f8.Delayed()`, `f8.MXFP8()` or `f8.NVFP4()`.
      state: for `f8.Delayed`, of :func:`dense_state`. Default None.
      bias: (g, n), or what broadcasts to it. Differentiable. Default None: none.
      activation: as for :func:`jax_cudnn.matmul`. Default None: none.
      return_state: as for :func:`dense`. Default False.
      implementation: "auto" (default), "cudnn" or "xla", as for
        :func:`jax_cudnn.ragged_dot`, for each of the three products.
      plan: which execution plans may run the products.

    Returns:
      (m, n), of x's dtype; with `return_state` a pair with the next state.

    Raises:
      TypeError: other dtypes, no recipe, a state where there is none or none where
        there must be, group sizes that are no integers.
      ValueError: shapes that do not fit.
      UnsupportedError, LibraryError: as :func:`jax_cudnn.ragged_dot`.

    Notes:
      On a Hopper GPU, cuBLAS 13.5 and newer have the products in f8. Elsewhere XLA
      multiplies the f8 copies in bf16, with the same meaning. A NaN or an infinity in
      a row that is in a group makes the scale 1, as for :func:`dense`: then numbers
      below 2^-10 are 0, and those above 448 saturate, in all groups. A sum of bf16
      operands is rounded to bf16 before it is scaled, and once more after it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_cudnn import f8
      >>> x, w = jnp.ones((6, 16), jnp.bfloat16), jnp.ones((3, 16, 32))
      >>> f8.ragged_dot(x, w, jnp.array([2, 0, 4])).shape
      (6, 32)
    """
    op = "f8.ragged_dot"
    call = options(op, implementation, plan)
    x, w = operand(op, "x", x), operand(op, "w", w)
    sizes = check_integers(op, "group_sizes", group_sizes)
    with on_behalf_of(op, "ragged_dot", lhs="x", rhs="w"):
        check_shapes(x, w, sizes)
    known = check_state(op, recipe, state)
    (y,), (following,) = grouped_layers(
        op, x, {"w": w}, {"w": bias}, sizes, [known], recipe, call
    )
    y = y if activation is None else on_array(op, activation, y)
    return (y, following) if check_flag(op, "return_state", return_state) else y


def grouped_layers(
    op: str,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    biases: Mapping[str, ArrayLike | None],
    sizes: jax.Array,
    states: Sequence[DenseState | None],
    recipe: Recipe,
    call: Options,
) -> tuple[list[jax.Array], list[DenseState | None]]:
    """Return products of x in groups with some weights, by one copy of x, and states.

    The states are the next ones, but for the cotangents'. Shapes were checked.
    """
    sizes = clipped(sizes, x.shape[0])
    is_read = jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes)
    kept = jnp.where(is_read, x, jnp.zeros((), x.dtype))
    more = {"sizes": sizes}
    following: list[DenseState | None] = [None] * len(weights)
    if isinstance(recipe, BlockRecipe):
        found = block_products(
            op, kept, weights, {}, recipe, _SUMS, call, kind=_InBlocks, more=more
        )
    else:
        found, following = products(
            *(op, kept, weights, {}, states, recipe, _SUMS, call),
            kind=_Scaled,
            more=more,
        )
    # Cotangents of rows in no group end here.
    results = [jnp.where(is_read, y, jnp.zeros((), y.dtype)) for y in found]
    for i, (name, w) in enumerate(weights.items()):
        if (bias := biases.get(name)) is not None:
            term = as_operand(op, "bias", bias)
            check_dtype(op, "bias", term)
            wide = bias_of_rows(op, term.astype(jnp.float32), w, sizes, x.shape[0])
            results[i] = (results[i].astype(jnp.float32) + wide).astype(x.dtype)
    return results, following


class _Grouped(ProductWithGradient):
    """A product in groups; ``sizes`` are those of the groups."""

    def contracted(self, given: Given, x: jax.Array, w: jax.Array) -> jax.Array:
        """Return the product of operands in 16 or 32 bits, in f32."""
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.promote_types(x.dtype, w.dtype)
        how = "xla" if self.call.implementation == "xla" else "auto"
        return product_of_groups(
            self.op,
            x.astype(dtype),
            w.astype(dtype),
            given["sizes"],
            _F32,
            options(self.op, how, None),
        )

    def sums_times(
        self,
        given: Given,
        x: jax.Array,
        w: jax.Array,
        scale: jax.Array | None,
        dtype: np.dtype,
    ) -> jax.Array:
        """Return the product of stored numbers, times a scale if there is one."""
        # The sums of stored numbers are beyond what f16 holds.
        wide = dtype if dtype == _BF16 else _F32
        sums = product_of_groups(self.op, x, w, given["sizes"], wide, self.call)
        if scale is not None:
            sums = sums.astype(jnp.float32) * scale
        return sums.astype(dtype)

    def by_matrices(
        self, given: Given, rows: jax.Array, grad: jax.Array, narrow: np.dtype
    ) -> jax.Array:
        """Return the gradient of the matrices, by the cotangent as it came."""
        matrices, grad = given["w"].astype(narrow), grad.astype(narrow)
        sizes = given["sizes"]
        return gradient_of_matrices(self.op, rows, matrices, sizes, grad, self.call)

    def reference_by_matrices(
        self, given: Given, x: jax.Array, w: jax.Array, grad: jax.Array
    ) -> jax.Array:
        """Return the same by the rounded rows, to be differentiated again."""

        def product(w: jax.Array) -> jax.Array:
            return self.contracted(given, x, w).astype(grad.dtype)

        return jax.vjp(product, w)[1](grad)[0]


class _Scaled(_Grouped, Product):
    """A product of operands that have one scale each."""

    def by_copies(self, given: Given) -> jax.Array:
        """Return the product by the f8 copies."""
        (x, x_scale), (w, w_scale) = self.stored(given, "x"), self.stored(given, "w")
        return self.sums_times(given, x, w, x_scale * w_scale, given["x"].dtype)

    def gradients_by_copies(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients, that of x by the f8 copies."""
        grad = in_row_order(grad)
        x, w, state = given["x"], given["w"], given.get("grad_state")
        scale, following = scale_and_next(self.recipe, "grad", state, grad, BACKWARD)
        (copy, w_scale), own = self.stored(given, "w"), cotangent(grad, scale)
        turned = jnp.swapaxes(copy, 1, 2)
        x_grad = self.sums_times(given, own, turned, scale * w_scale, x.dtype)
        # Sums over rows may be beyond f16 where weights are of another dtype.
        is_f16 = grad.dtype == w.dtype == np.float16
        narrow = grad.dtype if is_f16 else _BF16
        rows = dequantize(*self.stored(given, "x"), narrow)
        w_grad = self.by_matrices(given, rows, grad, narrow).astype(w.dtype)
        return {"x": x_grad, "w": w_grad} | self.of_states(given, following)

    def reference_gradients(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the rounded operands, to be differentiated again."""
        found = super().reference_gradients(given, grad)
        x, w = self._rounded(given)
        return found | {"w": self.reference_by_matrices(given, x, w, grad)}


class _InBlocks(_Grouped, BlockProduct):
    """A product of operands that have a scale for each block."""

    def uses(self, role: str) -> dict[str, bool]:
        """Return the uses of copies; w's gradient reads the product's copy of x."""
        return {"product": True} if role == "x" else super().uses(role)

    def axes(
        self, role: str, use: str, rank: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the axes of an operand that a copy keeps, and that of its blocks."""
        if use == "gradient":
            return (0, 1), (2,)
        return super().axes(role, use, rank)

    def by_copies(self, given: Given) -> jax.Array:
        """Return the product of what the copies stand for."""
        x, w = (self.copy(given, role, "product") for role in ("x", "w"))
        return self._multiply_groups(given, x, w, given["x"].dtype)

    def gradients_by_copies(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients, that of x by a copy of the cotangent."""
        rows = in_blocks(laid_out(grad, (0,), (1,)), self.recipe)
        matrices = self.copy(given, "w", "gradient")
        x_grad = self._multiply_groups(given, rows, matrices, given["x"].dtype)
        own = self.copy(given, "x", "product")
        found = own.times_scales()[:, : given["x"].shape[1]]
        w_grad = self.by_matrices(given, found, grad, _BF16).astype(jnp.float32)
        if own.scale is not None:
            w_grad = w_grad * own.scale
        return {"x": x_grad, "w": w_grad.astype(given["w"].dtype)}

    def reference_gradients(
        self, given: Given, grad: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the gradients by the rounded operands, to be differentiated again."""
        x, w = (self.rounded(given, role, "product") for role in ("x", "w"))
        matrices = jnp.swapaxes(self.rounded(given, "w", "gradient"), 1, 2)
        rows = self.rounded_cotangent(grad, (0,), (1,))
        w_grad = self.reference_by_matrices(given, x, w, grad)
        return {
            "x": self.contracted(given, rows, matrices).astype(given["x"].dtype),
            "w": w_grad.astype(given["w"].dtype),
        }

    def _multiply_groups(
        self, given: Given, x: Blocks, w: Blocks, dtype: np.dtype
    ) -> jax.Array:
        """Return the product of blocks along the last axes of both."""
        scale = None if x.scale is None or w.scale is None else x.scale * w.scale
        turned = jnp.swapaxes(w.times_scales(), 1, 2)
        return self.sums_times(given, x.times_scales(), turned, scale, dtype)
