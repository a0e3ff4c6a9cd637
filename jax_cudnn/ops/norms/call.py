# SPDX-License-Identifier: Apache-2.0
"""Checks arguments and runs the graph for all norms.

What is applied after the norm is XLA's: cuDNN's kernels with an activation take no
scale that is wider than x (9.19 and 9.27), and XLA fuses it with what is around the
call. A residual is the kernel's in the norms of rows, and XLA's in the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_cudnn.config import Options
from jax_cudnn.graph import NormAttributes, norm_graph
from jax_cudnn.lowering import run_graph, sharded_where_free
from jax_cudnn.ops.common.activations import Activation, on_array
from jax_cudnn.ops.common.arguments import (
    FLOATS,
    as_operand,
    check_dtype,
    check_epsilon,
    check_flag,
    describe,
    options,
    strongly_typed,
    tensor,
    why_symbolic,
)
from jax_cudnn.ops.common.fusion import Operand
from jax_cudnn.ops.common.plain import check_implementation
from jax_cudnn.ops.norms.options import NormCall, NormOptions
from jax_cudnn.reference import norms as reference
from jax_cudnn.reference.dtypes import dtype_name, saturated

# Activations that are computed in bf16 for bf16 arrays.
_IN_BF16 = ("silu", "swish")


class Norm(NamedTuple):
    """A call of a norm, its arguments checked.

    ``x`` and ``residual`` are in their common dtype, and ``dtype`` is that of the
    output.
    """

    op: str
    x: jax.Array
    residual: jax.Array | None
    activation: Activation | None
    attributes: NormAttributes
    dtype: np.dtype
    with_statistics: bool
    call: Options

    @classmethod
    def of(
        cls,
        op: str,
        x: ArrayLike,
        **asked: Unpack[NormOptions],
    ) -> "Norm":
        """Return the call of a norm, or raise what is wrong with it."""
        given = NormCall(**asked)
        call = options(op, given.implementation, given.plan)
        array = _as_floats(op, "x", x)
        both = _in_common(op, array, given.residual)
        return cls(
            op=op,
            x=both[0],
            residual=both[1],
            activation=given.activation,
            attributes=NormAttributes(epsilon=check_epsilon(op, given.epsilon)),
            dtype=_output_dtype(op, given.preferred_element_type, array.dtype),
            with_statistics=check_flag(
                op, "return_statistics", given.return_statistics
            ),
            call=call,
        )

    @property
    def total(self) -> jax.Array:
        """X with the residual added, for kernels that do not add it."""
        return self.x if self.residual is None else self.x + self.residual

    def run(self, kind: str, operands: Mapping[str, Operand]) -> dict[str, jax.Array]:
        """Return what a graph of one norm gives, in the shapes of its tensors' arrays.

        The output is stored as x is.
        """
        arrays = {role: operand.array for role, operand in operands.items()}
        if reason := why_symbolic(**arrays):
            check_implementation(self.op, reason, self.call)
            return self._plain(kind, operands)
        tensors = {role: tensor(role, *operand) for role, operand in operands.items()}
        name: Any = dtype_name(self.dtype)
        x = tensors["x"]
        graph = norm_graph(
            kind,
            tensors,
            attributes=self.attributes,
            output=type(x)(name="output", dtype=name, dims=x.dims, order=x.order),
            with_statistics=self.with_statistics,
        )
        results = run_graph(graph, list(arrays.values()), self.call)
        return dict(zip(graph.outputs, results, strict=True))

    def _plain(
        self, kind: str, operands: Mapping[str, Operand]
    ) -> dict[str, jax.Array]:
        """Return the results by the reference, for shapes that graphs lack."""
        inputs: dict[str, jax.Array] = {}
        for role, (array, order, sizes) in operands.items():
            stored = array if sizes is None else jnp.reshape(array, sizes)
            inputs[role] = jnp.transpose(
                stored, [order.index(i) for i in range(len(order))]
            )
        factor = inputs.pop("scale_output", None)
        results = reference.forward(kind)(self.attributes, inputs, {})
        output = results["output"] if factor is None else results["output"] * factor
        output = jnp.transpose(output, operands["x"].order)
        return {**results, "output": saturated(output, self.dtype)}

    def statistics(
        self, results: Mapping[str, jax.Array], shape: Sequence[int]
    ) -> list[jax.Array]:
        """Return those of mean and rstd that the call returns, in their shape."""
        return [
            jnp.reshape(results[role], shape)
            for role in ("mean", "rstd")
            if self.with_statistics and role in results
        ]

    def finish(
        self, output: jax.Array, total: jax.Array, statistics: Sequence[jax.Array]
    ) -> jax.Array | tuple[jax.Array, ...]:
        """Return what the call returns, given all of it in its shapes."""
        output = sharded_where_free(output, total)
        if self.activation is not None:
            wide = output
            # silu is as exact in bf16 as its operand, and XLA then keeps no array in
            # f32 for its gradient. gelu cancels, and f16 overflows within it.
            if self.activation not in _IN_BF16 or self.dtype != jnp.bfloat16:
                wide = output.astype(accumulator(self.dtype))
            output = on_array(self.op, self.activation, wide)
            output = output.astype(self.dtype)
        more = [] if self.residual is None else [total]
        everything = (output, *more, *statistics)
        return everything if len(everything) > 1 else output


def accumulator(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a norm of elements of a dtype is computed."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_axes(
    op: str, name: str, axes: int | Sequence[int], rank: int
) -> tuple[int, ...]:
    """Return axes as numbers from 0, in order, or raise what is wrong with them."""
    given = tuple(axes) if isinstance(axes, Sequence) else (axes,)
    if not given or not all(map(_is_int, given)):
        raise TypeError(
            f"{op}: {name}={axes!r}. It must be an int or a sequence of ints, one or "
            "more, which name axes of x. Pass for example 0, or (-2, -1)."
        )
    if not all(-rank <= axis < rank for axis in given):
        advice = f"Pass numbers from {-rank} to {rank - 1}."
        raise ValueError(
            f"{op}: {name}={axes!r}, but x has {rank} axes. "
            f"{advice if rank else 'Pass an array that has some.'}"
        )
    found = sorted({int(axis) % rank for axis in given})
    if len(found) != len(given):
        raise ValueError(f"{op}: {name}={axes!r} names an axis twice. Name it once.")
    return tuple(found)


def check_axis(op: str, name: str, axis: int, rank: int) -> int:
    """Return one axis as a number from 0, or raise what is wrong with it."""
    if not _is_int(axis):
        raise TypeError(
            f"{op}: {name}={axis!r}. It must be an int, which names an axis of x. Pass "
            "-1 for the last one."
        )
    return check_axes(op, name, axis, rank)[0]


def _is_int(axis: object) -> bool:
    return isinstance(axis, int | np.integer) and not isinstance(axis, bool)


def check_factor(
    op: str, name: str, value: ArrayLike | None, shape: tuple[int, ...], what: str
) -> jax.Array | None:
    """Return scale or bias as an array, or raise unless it has the shape it must have.

    ``what`` says of which axes the shape is.
    """
    if value is None:
        return None
    array = _as_floats(op, name, value)
    if array.shape != shape:
        raise ValueError(
            f"{op}: {name} is {describe(array)}. Its shape must be {list(shape)}, "
            f"{what}. Reshape or broadcast it."
        )
    return array


def given(**operands: Operand | None) -> dict[str, Operand]:
    """Return the operands that are there, by role."""
    return {role: each for role, each in operands.items() if each is not None}


def _as_floats(op: str, name: str, value: ArrayLike) -> jax.Array:
    array = as_operand(op, name, value)
    check_dtype(op, name, array)
    return strongly_typed(array)


def _in_common(
    op: str, x: jax.Array, residual: ArrayLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return x and the residual, if any, in the dtype to which both promote."""
    if residual is None:
        return x, None
    other = _as_floats(op, "residual", residual)
    if other.shape != x.shape:
        raise ValueError(
            f"{op}: residual is {describe(other)} and x {describe(x)}. They must have "
            "one shape. Broadcast the residual."
        )
    # Under strict promotion, too: the two are of floats, and the sum is a new result.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype, other.dtype)
    return x.astype(dtype), other.astype(dtype)


def _output_dtype(op: str, preferred: DTypeLike | None, default: np.dtype) -> np.dtype:
    if preferred is None:
        return default
    try:
        dtype = jax.dtypes.canonicalize_dtype(np.dtype(preferred))
    except TypeError:
        dtype = None
    if dtype is None or dtype_name(dtype) not in FLOATS:
        raise TypeError(
            f"{op}: preferred_element_type={preferred!r} is not one of "
            f"{', '.join(FLOATS)}. Convert the result instead."
        )
    return dtype
