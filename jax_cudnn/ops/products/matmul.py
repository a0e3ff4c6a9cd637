# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.matmul`: checks its arguments and sees its operands as two matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.lowering import explicit_part, sharded_as, weakly_typed
from jax_cudnn.ops.common.activations import Activation, is_weak_after
from jax_cudnn.ops.common.arguments import (
    Precision,
    array_of,
    as_factor,
    as_operand,
    check_dtype,
    describe,
    is_weak,
    options,
    result_dtype,
    strongly_typed,
    why_partial,
)
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.plain import (
    Contraction,
    Epilogue,
    check_implementation,
    run_plain,
)
from jax_cudnn.ops.products.operands import (
    Dtypes,
    Product,
    Sizes,
    common_dtypes,
    in_three,
    padded_shape,
    run_product,
    undropped,
)


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    scale_out: ArrayLike | None = None,
    branch_scale: ArrayLike | None = None,
    precision: Precision = None,
    preferred_element_type: object = None,
    out_sharding: object = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    r"""Return a matrix product with its epilogue, through cuDNN on NVIDIA GPUs.

    Shapes and broadcasting are those of :func:`jax.numpy.matmul`:

    .. math::

        \mathrm{output} = \mathrm{scale\_out} \cdot \mathrm{activation}\Big(
            \mathrm{branch\_scale} \cdot \Big(
            \sum_r (\mathrm{scale\_a}\, a)_{mr} (\mathrm{scale\_b}\, b)_{rn}
            + \mathrm{bias}\Big) + \mathrm{residual}\Big)

    The whole formula is one kernel, except for activations that cuDNN does not have.
    Sums, and the values computed from them, are kept in f32 (f64 for f64, i32 sums for
    8-bit integers) and rounded once, to the result's dtype.

    8-bit operands with wider ones (weight-only quantisation) are converted in the
    kernel; they never reach memory in the wider dtype. For i8 and f8 weights, "auto"
    runs XLA's kernels, which also convert them in the kernel, until
    :func:`jax_cudnn.plans.autotune` has measured a plan of cuDNN's to be faster.
    cuDNN's first plan is mostly slower (H200, cuDNN 9.19;
    docs/internals/measured/where_to_fuse.md).

    All of JAX's transformations apply. First-order reverse mode runs cuDNN's kernels,
    for the operands whose gradient is needed. Forward mode and higher orders run the
    jax.numpy reference.

    Axis letters: m rows, n columns, r contraction.

    Args:
      a: (..., m, r) or (r,); bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8 or u8. XLA
        runs everything else that jnp.matmul takes: other dtypes, symbolic dimensions.
      b: (..., r, n) or (r,). If the dtypes of a and b differ, they are promoted as by
        jnp.matmul; f8 with a wider float is promoted to the wider one.
      bias: broadcasts to the result; (n,) is the usual shape. Differentiable.
      residual: broadcasts to the result; added before the activation. Differentiable.
      activation: as for :func:`jax_cudnn.conv`. Default None: none.
      scale_a: dequantises a: a number, or an array that broadcasts to a; () is one
        scale for the tensor, and (m, 1) one per row. A scale that varies along r is
        multiplied in before the matmul, and the scaled operand is rounded to the wider
        operand's dtype (f32 if both have 8 bits). Differentiable. Default None: 1.
      scale_b: likewise for b; (n,) or (1, n) is one scale per column.
      scale_out: multiplies the activation's result, in the kernel or after it: a
        number, or an array that broadcasts to the result. It serves to quantise or to
        gate the result (see :func:`gated_matmul`). Differentiable. Default None: 1.
      branch_scale: multiplies the matmul with its bias, before the residual is added:
        a number, or an array that broadcasts to the result, such as (n,) for layer
        scale, or (..., 1, n) for the gate of an adaptive norm. Differentiable. Default
        None: 1.
      precision: precision of f32 matmuls; every value that jnp.matmul takes. Default
        None: `jax.default_matmul_precision`. cuDNN multiplies f32 in TF32, as XLA does
        on a GPU except for "highest". For "highest", and for algorithms that cuDNN does
        not have, "auto" runs XLA.
      preferred_element_type: dtype of the result. Default None: the dtype that
        jnp.matmul returns, in which sums of integers wrap around; for f8 with a wider
        operand, the wider operand's dtype. Sums for an f64 result are kept in f64.
      out_sharding: a `jax.sharding.NamedSharding`, or a `PartitionSpec` where a mesh is
        set: how the result is to be sharded. Default None: as the operands imply.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      (..., m, n), without m or n for an operand of rank 1. It is weakly typed if all
      operands are, `preferred_element_type` is not given, and the activation leaves it
      so: of the named ones, "gelu" and "gelu_exact" do not.

    Raises:
      ValueError: shapes that do not fit, an unknown activation or `implementation`, an
        activation that returns anything but an array of floats of the same shape.
      TypeError: dtypes that JAX does not promote or take.
      UnsupportedError: `implementation="cudnn"` and cuDNN has no plan here (raised
        when the function is compiled for a GPU), or graphs cannot have such operands
        (raised at once); operands whose types have shardings that
        contradict each other.
      LibraryError: likewise, if cuDNN itself is missing or too old.

    Notes:
      docs/support.md lists the supported configurations by GPU. Where XLA runs
      a call on a GPU, sums over 16-bit operands are rounded to the operands' dtype
      before the epilogue, as in jax.numpy. In the gradient, the cotangent of the
      matmul is rounded to the dtype of 16-bit operands before it is multiplied by
      them. It is never rounded to f8: f8 operands are widened, to bf16 for a bf16
      result and otherwise to f32. For an operand that is stored transposed,
      :func:`jax_cudnn.dot_general` contracts any axes without a copy.

    Example:
      >>> import jax, jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((5, 3, 8)), jnp.ones((8, 16))
      >>> jax_cudnn.matmul(x, w, bias=jnp.zeros(16), activation="gelu").shape
      (5, 3, 16)
    """
    epilogue = Epilogue.of(
        "matmul",
        bias=bias,
        branch_scale=branch_scale,
        residual=residual,
        activation=activation,
        scale_out=scale_out,
    )
    call = options("matmul", implementation, plan, precision)
    scales = {
        name: as_factor("matmul", name, value)
        for name, value in (("scale_a", scale_a), ("scale_b", scale_b))
    }
    output = matmul_with(
        a, b, epilogue, preferred_element_type, call, scales, out_sharding
    )
    return sharded_as(output, out_sharding)


def matmul_with(
    a: ArrayLike,
    b: ArrayLike,
    epilogue: Epilogue,
    preferred: object,
    call: Options,
    scales: Mapping[str, jax.Array | float | None] | None = None,
    out_sharding: object = None,
) -> jax.Array:
    """Return a product with any epilogue, and the factors `scale_a` and `scale_b`."""
    scales = scales or {"scale_a": None, "scale_b": None}
    a, b = as_operand("matmul", "a", a), as_operand("matmul", "b", b)
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ValueError(
                f"matmul: {name} is {describe(x)}. It must have one axis or more. "
                f"Multiply by a scalar with `*`, or pass it as scale_{name}."
            )
    terms = (value for _, _, value in epilogue.steps)
    factors = (epilogue.scale_out, *scales.values())
    weak = preferred is None and is_weak(a, b, *terms, *factors)
    if weak:
        a, b = strongly_typed(a), strongly_typed(b)
    dtypes = common_dtypes("matmul", a, b)
    dtype = result_dtype("matmul", preferred, dtypes.result)
    rest = (dtypes, scales, epilogue)
    if reason := why_partial(out_sharding) or dtypes.why_plain(dtype, a=a, b=b):
        check_implementation("matmul", reason, call)
        output = _plain_matmul(a, b, *rest, preferred, call, out_sharding)
    else:
        output = _fused_matmul(a, b, *rest, dtype, call, out_sharding)
    weak = weak and is_weak_after(epilogue.activation, output)
    return weakly_typed(output) if weak else output


def _fused_matmul(
    a: jax.Array,
    b: jax.Array,
    dtypes: Dtypes,
    scales: Mapping[str, jax.Array | float | None],
    epilogue: Epilogue,
    dtype: np.dtype,
    call: Options,
    out_sharding: object,
) -> jax.Array:
    left, right, dropped = _as_matrices(a, b)
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"matmul: a is {describe(a)} and b {describe(b)}. The last axis of a must "
            "be as long as the last but one of b (the only one, of rank 1). Transpose "
            "or reshape one of them."
        )
    try:
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    except ValueError:
        raise ValueError(
            f"matmul: a is {describe(a)} and b {describe(b)}. Their batch axes, all "
            "but the last two, must broadcast. Reshape one of them."
        ) from None
    m, r, n = left.shape[-2], left.shape[-1], right.shape[-1]
    # Without a batch of its own, b serves all rows of a as one matrix.
    is_shared = math.prod(right.shape[:-2]) == 1
    outer, rows = ((), (*batch, m)) if is_shared else (batch, (m,))
    a_sizes = (outer, rows, (r,))
    b_sizes = (right.shape[:-2] if is_shared else batch, (r,), (n,))
    scale_a, scale_b = scales["scale_a"], scales["scale_b"]
    product = Product(
        op="matmul",
        a=in_three("matmul", "a", left, a_sizes, keep=(1, 2)),
        b=in_three("matmul", "b", right, b_sizes, keep=(1, 2)),
        sizes=(outer, rows, (n,)),
        scale_a=_scale("scale_a", scale_a, a_sizes),
        scale_b=_scale("scale_b", scale_b, b_sizes, is_vector=b.ndim == 1),
        dropped=dropped,
    )
    return run_product(product, dtypes, epilogue, dtype, call, out_sharding)


def _as_matrices(
    a: jax.Array, b: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """Return vectors as matrices, and which axes of the result are there for it."""
    dropped = (*((-2,) if a.ndim == 1 else ()), *((-1,) if b.ndim == 1 else ()))
    left = a[None, :] if a.ndim == 1 else a
    return left, b[:, None] if b.ndim == 1 else b, dropped


def _plain_matmul(
    a: jax.Array,
    b: jax.Array,
    dtypes: Dtypes,
    scales: Mapping[str, jax.Array | float | None],
    epilogue: Epilogue,
    preferred: object,
    call: Options,
    out_sharding: object,
) -> jax.Array:
    *matrices, dropped = _as_matrices(a, b)
    rank = max(x.ndim for x in matrices)
    where = explicit_part(out_sharding, dropped, rank)
    factors: list[jax.Array] = []
    for i, axis, (name, value) in zip((0, 1), (-1, -2), scales.items(), strict=True):
        if value is None:
            continue
        x, scale = matrices[i], array_of(value)
        if name == "scale_b" and b.ndim == 1 and scale.ndim:
            scale = scale[..., None]
        scale = jnp.reshape(scale, padded_shape("matmul", name, scale, x.shape))
        if scale.shape[axis] == 1:
            # The same along the sum: multiplied once, after it.
            factors.append(jnp.expand_dims(scale, tuple(range(rank - x.ndim))))
        else:
            wide = dtypes.operands or np.dtype(np.float32)
            matrices[i] = x.astype(wide) * scale.astype(wide)
    if factors:
        epilogue = epilogue._replace(scale=functools.reduce(jnp.multiply, factors))

    def contraction(dtype: Any) -> jax.Array:
        precision: Any = call.matmul_precision
        return jnp.matmul(
            *matrices,
            precision=precision,
            preferred_element_type=dtype,
            out_sharding=where,
        )

    def place(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        gone = () if name == "scale" else dropped
        return undropped("matmul", name, x, shape, gone)

    if preferred is None:
        preferred = dtypes.result
    plain = Contraction("matmul", {"a": a, "b": b}, contraction, place, dropped)
    output = run_plain(plain, preferred, epilogue)
    return jnp.squeeze(output, dropped)


def _scale(
    name: str,
    value: jax.Array | float | None,
    sizes: Sizes,
    *,
    is_vector: bool = False,
) -> Operand | float | None:
    if value is None or isinstance(value, int | float):
        return value if value is None else float(value)
    check_dtype("matmul", name, value)
    if is_vector and value.ndim:
        padded_shape("matmul", name, value, sizes[1])
        value = value[..., None]
    return in_three("matmul", name, value, sizes)
