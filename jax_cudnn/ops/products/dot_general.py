# SPDX-License-Identifier: Apache-2.0
"""`jax_cudnn.dot_general`: checks its arguments, and runs a product of two matrices."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
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
    as_operand,
    is_weak,
    options,
    refused_by_jax,
    result_dtype,
    strongly_typed,
    struct,
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
    Product,
    Sizes,
    common_dtypes,
    run_product,
    undropped,
)

_Axes = tuple[int, ...]
# ((lhs contracting, rhs contracting), (lhs batch, rhs batch))
Numbers = tuple[tuple[_Axes, _Axes], tuple[_Axes, _Axes]]


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: tuple[
        tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
    ],
    precision: Precision = None,
    preferred_element_type: object = None,
    out_sharding: object = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    activation: Activation | None = None,
    implementation: Implementation | None = "auto",
    plan: PlanOptions | None = None,
) -> jax.Array:
    """Return a contraction of any axes with its epilogue, through cuDNN.

    Takes the arguments of :func:`jax.lax.dot_general`, so that it can replace that
    function, for example in Flax's dense layers. Bias, residual and activation are as
    in :func:`matmul`. The axes of an operand may be in any order. An operand whose
    batch axes are adjacent, and likewise its free axes and its contracted axes, is read
    in its own layout. Any other operand is transposed first.

    Args:
      lhs: bf16, f16, f32, f64, f8_e4m3fn, f8_e5m2, i8 or u8; XLA runs everything else
        that lax takes, as for :func:`matmul`.
      rhs: likewise. If the dtypes of lhs and rhs differ, they are multiplied in the
        dtype that JAX promotes them to.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      precision: as for :func:`matmul`.
      preferred_element_type: dtype of the result. Default None: the dtype that lax
        returns.
      out_sharding: a `jax.sharding.NamedSharding`, or a `PartitionSpec` where a mesh is
        set: how the result is to be sharded. Default None: as the operands imply.
      bias: broadcasts to the result. Differentiable. Default None: none.
      residual: likewise, added before the activation.
      activation: as for :func:`jax_cudnn.conv`. Default None: none.
      implementation: "auto", "cudnn" or "xla", as for :func:`jax_cudnn.conv`.
      plan: as for :func:`jax_cudnn.conv`.

    Returns:
      The batch axes, the free axes of lhs, and the free axes of rhs, in this order. The
      result has a weak type in the cases in which that of :func:`matmul` has one, also
      with `preferred_element_type`.

    Raises:
      ValueError, TypeError, UnsupportedError, LibraryError: as :func:`matmul`.

    Example:
      >>> import jax.numpy as jnp, jax_cudnn
      >>> x, w = jnp.ones((5, 3, 8)), jnp.ones((16, 8))
      >>> jax_cudnn.dot_general(x, w, (((2,), (1,)), ((), ()))).shape
      (5, 3, 16)
    """
    call = options("dot_general", implementation, plan, precision)
    x = as_operand("dot_general", "lhs", lhs)
    y = as_operand("dot_general", "rhs", rhs)
    epilogue = Epilogue.of(
        "dot_general", bias=bias, residual=residual, activation=activation
    )
    if weak := is_weak(x, y, bias, residual):
        x, y = strongly_typed(x), strongly_typed(y)
    numbers = axes_of("dot_general", dimension_numbers)
    # jax.lax checks the axes against each other, in its own words.
    how = f", with dimension_numbers={numbers}"
    with refused_by_jax("dot_general", {"lhs": x, "rhs": y}, how=how):
        result = jax.eval_shape(
            lambda x, y: jax.lax.dot_general(x, y, numbers), struct(x), struct(y)
        )
    dtypes = common_dtypes("dot_general", x, y, result.dtype)
    dtype = result_dtype("dot_general", preferred_element_type, result.dtype)
    reason = why_partial(out_sharding) or dtypes.why_plain(dtype, lhs=x, rhs=y)
    if reason:
        check_implementation("dot_general", reason, call)
        output = _plain_dot_general(
            x, y, numbers, epilogue, preferred_element_type, call, out_sharding
        )
    else:
        product = as_product("dot_general", x, y, numbers)
        output = run_product(product, dtypes, epilogue, dtype, call, out_sharding)
    if weak and is_weak_after(activation, output):
        output = weakly_typed(output)
    return sharded_as(output, out_sharding)


def as_product(op: str, x: jax.Array, y: jax.Array, numbers: Numbers) -> Product:
    """Return a contraction of any axes as a product of two matrices."""
    sums, batch = numbers
    rows = _others(x.ndim, sums[0], batch[0])
    columns = _others(y.ndim, sums[1], batch[1])
    sizes = (
        tuple(x.shape[axis] for axis in batch[0]),
        tuple(x.shape[axis] for axis in rows),
        tuple(y.shape[axis] for axis in columns),
    )
    return Product(
        op=op,
        a=_merge(x, (batch[0], rows, sums[0])),
        b=_merge(y, (batch[1], sums[1], columns)),
        sizes=sizes,
    )


def _plain_dot_general(
    x: jax.Array,
    y: jax.Array,
    numbers: Any,
    epilogue: Epilogue,
    preferred: object,
    call: Options,
    out_sharding: Any,
) -> jax.Array:
    where = explicit_part(out_sharding)

    def contraction(dtype: Any) -> jax.Array:
        precision: Any = call.matmul_precision
        return jax.lax.dot_general(x, y, numbers, precision, dtype, out_sharding=where)

    def place(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return undropped("dot_general", name, x, shape)

    plain = Contraction("dot_general", {"lhs": x, "rhs": y}, contraction, place)
    return run_plain(plain, preferred, epilogue)


def axes_of(op: str, numbers: object) -> Numbers:
    """Return dimension_numbers as ints, or raise TypeError for what is none."""
    try:
        (x_sums, y_sums), (x_batch, y_batch) = (
            tuple(tuple(map(operator.index, axes)) for axes in pair)
            for pair in numbers  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: dimension_numbers={numbers!r} is not ((lhs contracting, rhs "
            "contracting), (lhs batch, rhs batch)), each a sequence of ints. Pass for "
            "example (((1,), (0,)), ((), ())) for the matmul of two matrices."
        ) from None
    return (x_sums, y_sums), (x_batch, y_batch)


def _others(rank: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        axis for axis in range(rank) if not any(axis in each for each in taken)
    )


def _merge(x: jax.Array, groups: Sizes) -> Operand:
    """Return an array as a matrix; groups of axes that lie side by side stay there."""
    # The groups in the order in which they are stored; empty ones first.
    order = sorted(range(3), key=lambda i: min(groups[i], default=-1))
    axes = [axis for i in order for axis in groups[i]]
    if axes != list(range(x.ndim)):
        order = [0, 1, 2]
        x = jnp.transpose(x, [axis for group in groups for axis in group])
        groups = _consecutive(groups)
    sizes = [math.prod(x.shape[axis] for axis in groups[i]) for i in order]
    return Operand(x, tuple(order), tuple(sizes))


def _consecutive(groups: Sizes) -> Sizes:
    starts = np.cumsum([0, *map(len, groups)])
    return tuple(  # type: ignore[return-value]
        tuple(range(start, start + len(group)))
        for start, group in zip(starts, groups, strict=False)
    )
