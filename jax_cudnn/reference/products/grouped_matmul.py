# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul and its gradient in jax.numpy.

Roles and axis letters are those of graph/products/grouped_matmul.py. Every group's
matrix meets every row, and each row keeps the product with its own. So nothing of
another group reaches a row, NaN and infinities included, and all of JAX's
transformations apply.

Programs for a GPU are not written like this. Large ones loop over tiles of rows
(grouped_tiles.py). ``jax.lax.ragged_dot`` is what XLA may have a kernel for, so the
others use it. It has no vmap over some of its operands and no second gradient, and
where XLA has no kernel for it, a NaN in the matrix of one group reaches all rows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph.rules import EIGHT_BIT, accumulator
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.reference.dtypes import dtype_name, jax_dtype, kept_rounding
from jax_cudnn.reference.products import grouped_tiles

Operands = Mapping[str, jax.Array]

_ROWS_ARE_SUMMED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


class Groups(NamedTuple):
    """The first row of each group, and the row after its last one."""

    starts: jax.Array
    ends: jax.Array

    @classmethod
    def of_sizes(cls, sizes: jax.Array) -> "Groups":
        """Return groups that follow each other."""
        ends = jnp.cumsum(sizes, dtype=sizes.dtype)
        return cls(ends - sizes, ends)

    def of_rows(self, rows: int) -> jax.Array:
        """Return the number of each row's group; that of groups for a row in none."""
        row = jnp.arange(rows, dtype=self.ends.dtype)
        # So many groups end at or before it.
        return jnp.sum(self.ends[None] <= row[:, None], axis=1, dtype=row.dtype)

    def have(self, rows: int) -> jax.Array:
        """Return whether each group has each row, as (g, m, 1)."""
        row = jnp.arange(rows, dtype=self.ends.dtype)[None]
        own = (self.starts[:, None] <= row) & (row < self.ends[:, None])
        return own[:, :, None]


def forward(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    precision: Any = None,
    *,
    by_lax: bool = False,
) -> dict[str, jax.Array]:
    """Return the product of each row with the matrix of its group."""
    del attributes
    a, b = _exact(inputs["a"]), _exact(inputs["b"])
    sizes = inputs.get("group_sizes")
    dtype = jax_dtype(outputs["output"].dtype)
    if by_lax and sizes is not None:
        sums = _sums(a.dtype, dtype)
        narrow = dtype if dtype == a.dtype else sums
        if grouped_tiles.pays(a, b, len(b)):
            found = grouped_tiles.product(a[0], b, sizes[0], narrow, precision)
            return {"output": found[None]}
        if _has_lax(a, b, precision):
            return {"output": _ragged_dot(a, b, sizes, narrow, precision)}
        if _has_size_1(a, b):
            return {"output": _row_by_row(a[0], b, sizes[0], sums)[None]}
    rows = a.shape[1]
    if sizes is None:
        starts = inputs["starts"][0]
        groups = Groups(starts, jnp.append(starts[1:], jnp.asarray(rows, "int32")))
    else:
        groups = Groups.of_sizes(sizes[0])
    sums = _sums(a.dtype, dtype)
    return {"output": grouped_product(a[0], b, groups, sums, precision)[None]}


def backward(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    precision: Any = None,
    *,
    by_lax: bool = False,
) -> dict[str, jax.Array]:
    """Return the gradients that are asked for.

    The cotangent is rounded to the dtype of the operands first.
    """
    a, b, sizes = inputs["a"], inputs["b"], inputs["group_sizes"]
    grad = inputs["grad_output"].astype(a.dtype)
    results = {}
    if "grad_a" in outputs:
        given = {"a": grad, "b": jnp.swapaxes(b, 1, 2), "group_sizes": sizes}
        product = forward(
            attributes,
            given,
            {"output": outputs["grad_a"]},
            precision,
            by_lax=by_lax,
        )
        results["grad_a"] = product["output"]
    if "grad_b" in outputs:
        results["grad_b"] = gradient_of_b(a, grad, sizes, precision, by_lax=by_lax)
    return results


def gradient_of_b(
    a: jax.Array,
    grad: jax.Array,
    sizes: jax.Array,
    precision: Any = None,
    *,
    by_lax: bool,
) -> jax.Array:
    """Return for each group the product of its rows (1, m, k) and (1, m, n)."""
    grad = grad.astype(a.dtype)
    if by_lax and grouped_tiles.pays(a, grad, sizes.shape[1]):
        return grouped_tiles.product_over_rows(
            a[0], grad[0], sizes[0], _sums(a.dtype), precision
        )
    if by_lax and _has_lax(a, grad, precision):
        # XLA multiplies all rows, and by 0 those of other groups and of none. The
        # latter may be padding, with anything in it.
        is_read = jnp.arange(a.shape[1])[:, None] < jnp.sum(sizes)
        return jax.lax.ragged_dot_general(
            jnp.where(is_read, a[0], jnp.zeros((), a.dtype)),
            jnp.where(is_read, grad[0], jnp.zeros((), a.dtype)),
            sizes[0],
            _ROWS_ARE_SUMMED,
            precision=precision,
            preferred_element_type=a.dtype,
        )
    if by_lax and _has_size_1(a, grad):
        sums = _sums(a.dtype)
        products = a[0][:, :, None].astype(sums) * grad[0][:, None, :].astype(sums)
        ids = _groups_of_rows(sizes[0], a.shape[1])
        return jax.ops.segment_sum(products, ids, sizes.shape[1])
    own, sums = Groups.of_sizes(sizes[0]).have(a.shape[1]), _sums(a.dtype)
    # Both: the one may have a NaN in a row of another group where the other has 0.
    ours = jnp.where(own, a, jnp.zeros((), a.dtype))
    theirs = jnp.where(own, grad, jnp.zeros((), a.dtype))
    return jax.lax.platform_dependent(
        ours,
        theirs,
        cpu=lambda x, y: _over_rows(x.astype(sums), y.astype(sums), sums, precision),
        default=lambda x, y: _over_rows(x, y, sums, precision),
    )


def _over_rows(x: jax.Array, y: jax.Array, sums: np.dtype, precision: Any) -> jax.Array:
    """Return (g, k, n) for (g, m, k) and (g, m, n).

    XLA for a CPU has no code for some of these products of bf16 with sums in f32, which
    vmap makes (jaxlib 0.10.2: "Unsupported element type for DotThunk").
    """
    numbers = (([1], [1]), ([0], [0]))
    return jax.lax.dot_general(
        x, y, numbers, precision=precision, preferred_element_type=sums
    )


def grouped_product(
    a: jax.Array, b: jax.Array, groups: Groups, dtype: Any, precision: Any
) -> jax.Array:
    """Return each row (m, k) times the matrix (g, k, n) of its group, or 0 for none."""
    products = jnp.matmul(a[None], b, precision=precision, preferred_element_type=dtype)
    own = groups.have(a.shape[0])
    kept = jnp.where(own, products, jnp.zeros((), products.dtype))
    return jnp.sum(kept, axis=0, dtype=products.dtype)


def _ragged_dot(
    a: jax.Array, b: jax.Array, sizes: jax.Array, dtype: Any, precision: Any
) -> jax.Array:
    product = jax.lax.ragged_dot(
        a[0], b, sizes[0], precision=precision, preferred_element_type=dtype
    )
    return product[None]


def _row_by_row(
    a: jax.Array, b: jax.Array, sizes: jax.Array, sums: np.dtype
) -> jax.Array:
    """Return each row (m, k) times its own copy of its matrix, of which k or n is 1."""
    ids, groups = _groups_of_rows(sizes, a.shape[0]), b.shape[0]
    own = b[jnp.minimum(ids, groups - 1)].astype(sums)
    products = jnp.sum(a[:, :, None].astype(sums) * own, 1)
    return jnp.where(ids[:, None] < groups, products, jnp.zeros((), sums))


def _groups_of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """Return the number of each row's group, that of the groups for rows in none."""
    ends = jnp.cumsum(sizes, dtype=sizes.dtype)
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=sizes.dtype), side="right")


def _sums(*dtypes: np.dtype) -> np.dtype:
    names: list[Any] = [dtype_name(dtype) for dtype in dtypes]
    return jax_dtype(accumulator(*names))


def _exact(x: jax.Array) -> jax.Array:
    """Return an operand of f8 in bf16, which holds all numbers of f8."""
    is_narrow = dtype_name(x.dtype) in EIGHT_BIT
    return kept_rounding(x).astype(jnp.bfloat16) if is_narrow else x


def _has_lax(a: jax.Array, b: jax.Array, precision: Any) -> bool:
    """Whether ragged_dot is to compute this: no algorithm of dot products is asked for.

    And no size is 0 or 1. With 1, XLA's gradient of the matrices was wrong by half of
    its values (JAX 0.11.2 on an H100, docs/known_bugs.md).
    """
    members = jax.lax.DotAlgorithmPreset.__members__
    is_algorithm = isinstance(precision, jax.lax.DotAlgorithm) or precision in (
        *members,
    )
    is_large = a.size > 0 and b.size > 0 and not _has_size_1(a, b)
    return is_large and not is_algorithm


def _has_size_1(a: jax.Array, b: jax.Array) -> bool:
    """Whether rows, contraction or columns are 1, and nothing is empty."""
    sizes = (*a.shape[-2:], b.shape[-1])
    return min(sizes) == 1 and b.shape[0] > 0
