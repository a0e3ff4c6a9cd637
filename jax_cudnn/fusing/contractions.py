# SPDX-License-Identifier: Apache-2.0
"""Finds the contractions of a function around which kernels are made, and their arrays.

An operand that the function transposes is read as it lies there, and one of 8 bits that
it converts is converted in the kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.fusing.broadcasts import Makers
from jax_cudnn.fusing.program import Arrays, Atom, Operation, Value
from jax_cudnn.fusing.views import View
from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.lowering import partial_axes
from jax_cudnn.ops.common.arguments import strongly_typed
from jax_cudnn.ops.common.fusion import StartedGraph
from jax_cudnn.ops.products.conv import begin_conv, why_plain
from jax_cudnn.ops.products.conv_arguments import Layout, Problem
from jax_cudnn.ops.products.dot_general import Numbers, as_product
from jax_cudnn.ops.products.operands import PLAIN, Dtypes, begin_product, common_dtypes
from jax_cudnn.reference.dtypes import dtype_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """A contraction that a graph can have.

    ``reads`` are its two operands; ``is_rounded`` says that sums are rounded before
    what follows, as the function does it.
    """

    operation: Operation
    reads: tuple[Value, Value]
    view: View

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the result."""
        return self.operation.outputs[0].dtype

    def begin(self, arrays: Arrays, *, is_rounded: bool) -> StartedGraph:
        """Begin the graph; sums are rounded to the result's dtype at once, or last."""
        raise NotImplementedError

    def _operands(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        first, second = (strongly_typed(arrays[value]) for value in self.reads)
        return first, second


def contraction_of(operation: Operation, makers: Makers) -> Contraction | str | None:
    """Return a contraction, or why no graph has it; None for another operation."""
    kinds = {"dot_general": _dot, "conv_general_dilated": _conv}
    if (kind := kinds.get(operation.name)) is None:
        return None
    if any(partial_axes(x.aval) for x in operation.reads):
        return "the type of an operand is reduced or unreduced along axes of the mesh"
    return kind(operation, makers)


class _Side(NamedTuple):
    """An operand as it lies in memory, and where each of the function's axes is."""

    value: Value
    axes: tuple[int, ...]

    @property
    def struct(self) -> Any:
        return jax.ShapeDtypeStruct(self.value.shape, self.value.dtype)


def _sides(
    operation: Operation, makers: Makers, *, narrow: bool
) -> tuple[_Side, _Side] | None:
    first, second = operation.inputs
    if not (isinstance(first, Value) and isinstance(second, Value)):
        return None
    sides = tuple(_peeled(x, makers) for x in (first, second))
    if narrow:
        # Conversions of both would leave no dtype to compute in.
        for i, j in ((0, 1), (1, 0)):
            found = _unconverted(sides[i], sides[j].value.dtype, makers)
            if found is not None:
                return (found, sides[1]) if i == 0 else (sides[0], found)
    return sides[0], sides[1]


def _peeled(value: Value, makers: Makers) -> _Side:
    """Return what an operand is a transpose of."""
    # For w.T with w (5, 24), return w and the axes (1, 0): axis 0 of the operand, of
    # size 24, is axis 1 of w.
    axes = tuple(range(len(value.shape)))
    while (maker := makers.get(value)) is not None and maker.name == "transpose":
        (source,) = maker.inputs
        if not isinstance(source, Value):
            break
        permutation = maker.params["permutation"]
        axes, value = tuple(permutation[axis] for axis in axes), source
    return _Side(value, axes)


def _unconverted(side: _Side, dtype: np.dtype, makers: Makers) -> _Side | None:
    """Return the 8-bit array that an operand is converted from to the other's dtype."""
    maker = makers.get(side.value)
    if maker is None or maker.name != "convert_element_type":
        return None
    (source,) = maker.inputs
    is_plain = maker.params.get("sharding") is None and isinstance(source, Value)
    is_wide = side.value.dtype == dtype and dtype_name(dtype) in ("bf16", "f16", "f32")
    if not is_plain or not is_wide or dtype_name(source.dtype) not in EIGHT_BIT:
        return None
    inner = _peeled(source, makers)
    return _Side(inner.value, tuple(inner.axes[axis] for axis in side.axes))


# --- products of matrices -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dot(Contraction):
    numbers: Numbers
    dtypes: Dtypes

    def begin(self, arrays: Arrays, *, is_rounded: bool) -> StartedGraph:
        product = as_product("fuse", *self._operands(arrays), self.numbers)
        return begin_product(product, self.dtypes, self.dtype, is_rounded=is_rounded)


def _dot(operation: Operation, makers: Makers) -> Contraction | str:
    if operation.params.get("out_sharding") is not None:
        return "it says how its result is sharded"
    sides = _sides(operation, makers, narrow=True)
    if sides is None:
        return "one of its operands is a number"
    (x_sums, y_sums), (x_batch, y_batch) = operation.params["dimension_numbers"]
    given = [_Side(x, tuple(range(len(x.shape)))) for x in operation.reads]
    pairs = ((x_sums, x_batch), (y_sums, y_batch))
    # Free axes come in the order in which they are stored.
    if len(given) == 1:
        given *= 2
    left, right = (
        side if _keeps_order(side, (*sums, *batch)) else plain
        for side, plain, (sums, batch) in zip(sides, given, pairs, strict=True)
    )
    numbers: Numbers = (
        (_moved(left, x_sums), _moved(right, y_sums)),
        (_moved(left, x_batch), _moved(right, y_batch)),
    )
    result = operation.outputs[0]
    first, second = left.struct, right.struct
    dtypes = common_dtypes("fuse", first, second, result.dtype)
    if reason := dtypes.why_plain(result.dtype, lhs=first, rhs=second):
        return reason.rstrip(".")
    batch_rank, free_rank = len(x_batch), len(left.axes) - len(x_sums) - len(x_batch)
    shape = result.shape
    groups = (
        shape[:batch_rank],
        shape[batch_rank : batch_rank + free_rank],
        shape[batch_rank + free_rank :],
    )
    return _Dot(
        operation=operation,
        reads=(left.value, right.value),
        view=View(groups, PLAIN),
        numbers=numbers,
        dtypes=dtypes,
    )


def _moved(side: _Side, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side.axes[axis] for axis in axes)


def _keeps_order(side: _Side, taken: tuple[int, ...]) -> bool:
    free = [side.axes[axis] for axis in range(len(side.axes)) if axis not in taken]
    return free == sorted(free)


# --- convolutions ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conv(Contraction):
    layout: Layout
    options: Mapping[str, Any]

    def begin(self, arrays: Arrays, *, is_rounded: bool) -> StartedGraph:
        x, w = self._operands(arrays)
        problem = Problem(x=x, w=w, layout=self.layout, options=self.options)
        begun, _ = begin_conv(problem, self.dtype, is_rounded=is_rounded)
        return begun


_GEOMETRY = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation"),
    *("feature_group_count", "batch_group_count"),
)


def _conv(operation: Operation, makers: Makers) -> Contraction | str:
    if operation.params.get("out_sharding") is not None:
        return "it says how its result is sharded"
    sides = _sides(operation, makers, narrow=False)
    if sides is None:
        return "one of its operands is a number"
    result = operation.outputs[0]
    if reason := why_plain(sides[0].struct, sides[1].struct, result.dtype):
        return reason.rstrip(".")
    specs = operation.params["dimension_numbers"]
    out = tuple(specs.out_spec)
    layout = Layout(
        _moved(sides[0], specs.lhs_spec), _moved(sides[1], specs.rhs_spec), out
    )
    order = tuple(out.index(axis) for axis in range(len(out)))
    return _Conv(
        operation=operation,
        reads=(sides[0].value, sides[1].value),
        view=View(tuple((size,) for size in result.shape), order),
        layout=layout,
        options={name: operation.params[name] for name in _GEOMETRY},
    )


def operand_array(atom: Atom, arrays: Arrays, shape: tuple[int, ...]) -> jax.Array:
    """Return the array of a value in a shape, for a graph."""
    assert isinstance(atom, Value)
    return jnp.reshape(strongly_typed(arrays[atom]), shape)
