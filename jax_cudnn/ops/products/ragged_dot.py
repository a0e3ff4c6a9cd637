# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.ragged_dot`: a matrix product for each group of rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.graph import (
    DTypeName,
    Tensor,
    grouped_matmul_graph,
    matrices_gradient_graph,
)
from jax_cudnn.graph.rules import F8
from jax_cudnn.lowering import is_explicitly_sharded, run_graph, with_derivative_of
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import (
    FLOATS,
    Precision,
    as_array,
    as_operand,
    check_dtype,
    check_integers,
    clipped,
    describe,
    options,
    result_dtype,
    strongly_typed,
    sums_dtype,
    tensor,
)
from jax_cudnn.ops.common.callers import on_behalf_of
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.plain import (
    Contraction,
    Epilogue,
    check_implementation,
    run_plain,
)
from jax_cudnn.ops.products.operands import Dtypes, common_dtypes, padded_shape
from jax_cudnn.reference.dtypes import dtype_name, jax_dtype
from jax_cudnn.reference.products.grouped_matmul import Groups, grouped_product


def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    precision: Precision = None,
    preferred_element_type: object = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a matmul for each group of rows, as in a mixture of experts.

    Takes the operands of :func:`jax.lax.ragged_dot` with the same meaning, and a bias
    and an activation. The rows of `lhs` are stored group by group. With j(m) the group
    of row m,

    .. math::

        \mathrm{output}_{mn} = \mathrm{activation}\Big(
            \sum_k \mathrm{lhs}_{mk} \, \mathrm{rhs}_{j(m)kn}
            + \mathrm{bias}_{j(m)n}\Big)

    Rows beyond the last group have neither sum nor bias: they are activation(0). Sums,
    and the values computed from them, are kept in f32 (f64 for f64) and rounded once,
    to the result's dtype. A row depends on its own group only: NaN and infinities in
    other rows, or in rows of no group, reach neither its result nor its gradients.

    All of JAX's transformations apply. In first-order reverse mode, the gradient of
    `lhs` is one more grouped matmul, which cuDNN runs where it runs the call. The
    gradient of `rhs` has no plan in cuDNN: it is one launch of cuBLASLt, a matmul for
    each group, or XLA's code (docs/ragged_dot.md). Forward mode and higher orders run
    XLA's code.

    Axis letters: m rows, k contraction, n columns, g groups.

    Args:
      lhs: (m, k); bf16, f16, f32 or f64, or f8_e4m3fn or f8_e5m2 where
        `preferred_element_type` is bf16, f16 or f32. XLA runs everything
        else: integers, complex numbers, symbolic dimensions, results of 8 bits.
      rhs: (g, k, n). If the dtypes of lhs and rhs differ, they are promoted as by
        :func:`jax.numpy.matmul`; 8-bit operands with wider floats are widened.
      group_sizes: (g,) integers: how many rows each group has. They may be 0 and need
        not add up to m. Negative ones count as 0, and rows beyond m are ignored.
      bias: (g, n), or an array that broadcasts to it. Differentiable. Default None:
        none.
      activation: as for :func:`jax_cudnn.conv`. It follows the kernel, in XLA's code.
        Default None: none.
      precision: as for :func:`jax_cudnn.matmul`. Default None:
        `jax.default_matmul_precision`.
      preferred_element_type: dtype of the result. Default None: the promoted dtype.
      implementation: "auto" runs cuDNN for large 16-bit matmuls on a Hopper GPU,
        where it was measured to be faster, and otherwise XLA's code until
        :func:`jax_cudnn.plans.autotune` has measured one of cuDNN's plans. "cudnn" runs
        cuDNN, or raises. "xla" runs XLA's code. Default "auto". None is "auto".
      plan: as for :func:`jax_cudnn.conv`. Default None.

    Returns:
      (m, n).

    Raises:
      ValueError: shapes that do not fit, an unknown activation or `implementation`.
      TypeError: dtypes that JAX does not promote, group sizes that are not integers.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised when
        the function is compiled for a GPU), or no graph has such operands (raised at
        once).
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      docs/ragged_dot.md lists the supported configurations (from 9.15 and sm_80 on).
      Products of f8 are those of the stored numbers; :func:`jax_cudnn.f8.ragged_dot`
      has scales and gradients for them.
      With cuBLAS 13.4 or newer, large 16-bit matmuls are one launch of cuBLASLt,
      and so are their gradients. With an older version and 256 rows a group or more,
      they are a matmul for each group: the host waits for `group_sizes`, and launches
      one after the other.
      XLA's code for a GPU is :func:`jax.lax.ragged_dot`. Where XLA has no kernel for
      that, it multiplies each row with the matrices of all groups, those of other
      groups times 0. So there, a NaN or an infinity in any matrix of `rhs` makes all
      rows NaN. In the gradient, the cotangent is rounded to the dtype of 16-bit
      operands before it is multiplied by them.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((6, 8)), jnp.ones((3, 8, 16))
      >>> sizes = jnp.array([2, 0, 4])
      >>> jax_cudnn.ragged_dot(x, w, sizes, activation="gelu").shape
      (6, 16)
    """
    call = options("ragged_dot", implementation, plan, precision)
    a, b = as_operand("ragged_dot", "lhs", lhs), as_operand("ragged_dot", "rhs", rhs)
    sizes = check_integers("ragged_dot", "group_sizes", group_sizes)
    check_shapes(a, b, sizes)
    epilogue = Epilogue.of(
        "ragged_dot", bias=bias, residual=None, activation=activation
    )
    a, b = strongly_typed(a), strongly_typed(b)
    with on_behalf_of("ragged_dot", "ragged_dot", a="lhs", b="rhs"):
        dtypes = common_dtypes("ragged_dot", a, b)
    dtype = result_dtype("ragged_dot", preferred_element_type, dtypes.result)
    product = _Product(a, b, clipped(sizes, a.shape[0]), call)
    if reason := _why_plain(dtypes, dtype, product):
        check_implementation("ragged_dot", reason, call)
        preferred = dtypes.result if preferred_element_type is None else dtype
        output = _plain(product, preferred, epilogue)
    else:
        output = _grouped(product, dtypes, dtype, epilogue)
    return output


def product_of_groups(
    op: str,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    dtype: np.dtype,
    call: Options,
) -> jax.Array:
    """Return the product alone, of operands and sizes that a caller has checked."""
    product = _Product(lhs, rhs, clipped(sizes, lhs.shape[0]), call)
    dtypes = common_dtypes(op, lhs, rhs)
    if reason := _why_plain(dtypes, dtype, product):
        check_implementation(op, reason, call)
        return _plain(product, dtype, Epilogue())
    return _grouped(product, dtypes, dtype, Epilogue())


def gradient_of_matrices(
    op: str,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    grad: jax.Array,
    call: Options,
) -> jax.Array:
    """Return the gradient of rhs alone; all arrays but the sizes have one dtype."""
    product = _Product(lhs, rhs, clipped(sizes, lhs.shape[0]), call)
    if reason := _why_plain(common_dtypes(op, lhs, rhs), grad.dtype, product):
        check_implementation(op, reason, call)

        def plain(rhs: jax.Array) -> jax.Array:
            return _plain(product._replace(rhs=rhs), grad.dtype, Epilogue())

        return jax.vjp(plain, rhs)[1](grad)[0]
    tensors = _tensors(a=lhs, b=rhs, group_sizes=product.sizes, grad_output=grad)
    operands = [lhs, rhs, product.sizes, grad]
    return run_graph(matrices_gradient_graph(tensors), operands, call)[0]


class _Product(NamedTuple):
    """The operands of a grouped product, with the options of the call."""

    lhs: jax.Array
    rhs: jax.Array
    sizes: jax.Array
    call: Options

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the result."""
        return self.lhs.shape[0], self.rhs.shape[2]


def check_shapes(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> None:
    """Raise ValueError for shapes that do not fit."""
    for name, x, rank, axes in (
        ("lhs", lhs, 2, "(m, k)"),
        ("rhs", rhs, 3, "(g, k, n)"),
        ("group_sizes", sizes, 1, "(g,)"),
    ):
        if x.ndim != rank:
            raise ValueError(
                f"ragged_dot: {name} is {describe(x)}. It must have the axes {axes}. "
                "Reshape it; jax.vmap gives all of them a batch."
            )
    if lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"ragged_dot: lhs is {describe(lhs)} and rhs {describe(rhs)}. Axis 1 of "
            "both, (m, k) and (g, k, n), is the contraction and must be equally long. "
            "Transpose one of them."
        )
    if rhs.shape[0] != sizes.shape[0]:
        raise ValueError(
            f"ragged_dot: rhs is {describe(rhs)} and group_sizes {describe(sizes)}. "
            "Both, (g, k, n) and (g,), must have one entry for each group. Give an "
            "empty group the size 0."
        )


def _why_plain(dtypes: Dtypes, dtype: np.dtype, product: _Product) -> str:
    """Return why no graph has the product, in sentences; "" if one has."""
    lhs, rhs, *_ = product
    if reason := dtypes.why_plain(dtype, lhs=lhs, rhs=rhs):
        return reason
    operands = dtypes.operands
    # No np.dtype is looked for in a tuple with None, which NumPy takes for f64.
    is_float = operands is not None and dtype_name(operands) in FLOATS
    if is_float and dtype_name(dtype) in FLOATS:
        return ""
    if _is_f8(lhs) and _is_f8(rhs) and dtype_name(dtype) in _F8_RESULTS:
        return ""
    return (
        f"lhs is {describe(lhs)}, rhs {describe(rhs)} and the result "
        f"{dtype_name(dtype)}. Graphs have grouped matmuls of {', '.join(FLOATS)}, "
        f"and of f8 with results of {', '.join(_F8_RESULTS)}."
    )


_F8_RESULTS = ("bf16", "f16", "f32")


def _is_f8(x: jax.Array) -> bool:
    return dtype_name(x.dtype) in F8


def _grouped(
    product: _Product, dtypes: Dtypes, dtype: np.dtype, epilogue: Epilogue
) -> jax.Array:
    """Return the product by a graph, with what follows it in XLA's operations."""
    if dtypes.operands is None:
        names: list[Any] = [dtype_name(dtype), dtype_name(product.lhs.dtype)]
        sums = sums_dtype(*names)
    else:
        names = [dtype_name(dtype), dtype_name(dtypes.operands)]
        sums = sums_dtype(*names)
        wide = np.dtype(np.float64) if sums == "f64" else dtypes.operands
        product = product._replace(
            lhs=product.lhs.astype(wide), rhs=product.rhs.astype(wide)
        )
    is_alone = epilogue.bias is None and epilogue.activation is None
    run = _run_f8 if dtypes.operands is None else _run
    value = run(names[0] if is_alone else sums, product.call, *product[:3])
    if epilogue.bias is not None:
        bias = as_array(epilogue.bias, sums)
        check_dtype("ragged_dot", "bias", bias)
        value += _bias_of_rows(product, bias.astype(value.dtype))
    if epilogue.activation is not None:
        value = on_array("ragged_dot", epilogue.activation, value)
    return value.astype(dtype)


def _run(
    dtype: DTypeName, call: Options, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array
) -> jax.Array:
    graph = grouped_matmul_graph(_tensors(a=lhs, b=rhs, group_sizes=sizes), dtype)
    (output,) = run_graph(graph, [lhs, rhs, sizes], call)
    return jnp.reshape(output, (lhs.shape[0], rhs.shape[2]))


def _tensors(**arrays: jax.Array) -> dict[str, Tensor]:
    """Return the tensors of a graph by their roles, with a 1 before their axes."""
    operands = {
        role: Operand(x, (0, 1, 2))
        if role == "b"
        else Operand(x, tuple(range(x.ndim + 1)), (1, *x.shape))
        for role, x in arrays.items()
    }
    return {role: tensor(role, *operand) for role, operand in operands.items()}


def _run_f8(
    dtype: DTypeName, call: Options, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Return the same of f8: no graph has the gradients, without a scale of theirs."""

    def plain(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        wide = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        groups, precision = Groups.of_sizes(sizes), call.matmul_precision
        return grouped_product(*wide, groups, jax_dtype(dtype), precision)

    compute = functools.partial(_run, dtype, call)
    return with_derivative_of(plain, compute, lhs, rhs, sizes)


def _bias_of_rows(product: _Product, bias: jax.Array) -> jax.Array:
    lhs, rhs, sizes, _ = product
    return bias_of_rows("ragged_dot", bias, rhs, sizes, lhs.shape[0])


def bias_of_rows(
    op: str, bias: jax.Array, rhs: jax.Array, sizes: jax.Array, rows: int
) -> jax.Array:
    """Return the bias of each row's group, 0 for rows of no group."""
    full = (rhs.shape[0], rhs.shape[2])
    padded = padded_shape(op, "bias", bias, full)
    if rhs.shape[0] == 0:
        return jnp.zeros((rows, full[1]), bias.dtype)
    bias = jnp.broadcast_to(jnp.reshape(bias, padded), full)
    groups = Groups.of_sizes(sizes)
    if is_explicitly_sharded(bias):
        # JAX does not differentiate picking from an array whose type is sharded.
        own = groups.have(rows)
        return jnp.sum(jnp.where(own, bias[:, None], jnp.zeros((), bias.dtype)), axis=0)
    return bias.at[groups.of_rows(rows)].get(
        mode="fill", fill_value=0, indices_are_sorted=True
    )


def _plain(product: _Product, preferred: object, epilogue: Epilogue) -> jax.Array:
    """Return the product and what follows it in JAX's operations alone."""
    lhs, rhs, sizes, call = product

    def run(dtype: Any) -> jax.Array:
        precision: Any = call.matmul_precision
        return grouped_product(lhs, rhs, Groups.of_sizes(sizes), dtype, precision)

    def place(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        del name, shape
        return _bias_of_rows(product, x)

    plain = Contraction("ragged_dot", {"lhs": lhs, "rhs": rhs}, run, place)
    return run_plain(plain, preferred, epilogue)
