# SPDX-License-Identifier: Apache-2.0
"""Writes the graph of a contraction and its epilogue, and runs it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import DTypeName, Graph, GraphWriter, Tensor
from jax_cudnn.lowering import entries_of, is_on_explicit_mesh, run_graph
from jax_cudnn.ops.common.activations import (
    Activation,
    Fused,
    Unfused,
    check_result,
    resolve,
    write,
)
from jax_cudnn.ops.common.arguments import tensor
from jax_cudnn.ops.common.plain import Epilogue
from jax_cudnn.reference.dtypes import jax_dtype


class Operand(NamedTuple):
    """An array, the order in which it stores the axes of its tensor, and their sizes.

    The sizes are the array's own, unless several of its axes stand for one of the
    tensor. They are then merged where the graph is run.
    """

    array: jax.Array
    order: tuple[int, ...]
    sizes: tuple[int, ...] | None = None

    def size(self, axis: int) -> int:
        """Return the size of an axis of the tensor."""
        return (self.sizes or self.array.shape)[self.order.index(axis)]


def in_groups(
    array: jax.Array,
    sizes: Sequence[tuple[int, ...]],
    order: tuple[int, ...],
    keep: tuple[int, ...] = (),
) -> Operand:
    """Return an array as an operand whose axes are groups of the array's.

    ``sizes`` are those of a result that it broadcasts to, group by group, and ``order``
    says which axis of the tensor each group is. An axis of the operand is 1 where the
    array broadcasts along all of its group. The groups in `keep` take the array's own
    sizes, and are broadcast if need be.
    """
    shape: list[int] = []
    merged: list[int] = []
    own_sizes = iter(array.shape)
    for i, group in enumerate(sizes):
        own = tuple(next(own_sizes) for _ in group)
        own = group if i in keep or any(size != 1 for size in own) else own
        shape += own
        merged.append(math.prod(own))
    return Operand(jnp.broadcast_to(array, shape), order, tuple(merged))


class Result(NamedTuple):
    """A tensor that a graph gives its caller, with the dtype and order it has there."""

    value: str
    dtype: DTypeName
    order: tuple[int, ...]


class Fusion:
    """Writes one graph, and keeps the arrays of its operands by name."""

    def __init__(self, op: str, accumulator: DTypeName) -> None:
        """Start the graph of an operation whose sums are kept in that dtype."""
        self._op = op
        self.writer = GraphWriter("f64" if accumulator == "f64" else "f32")
        self._arrays: dict[str, jax.Array] = {}

    def operand(self, name: str, operand: Operand) -> str:
        """Add an operand, and return its name."""
        self._arrays[name] = operand.array
        return self.writer.input(tensor(name, *operand))

    def scaled(self, value: str, factors: Sequence[str | float]) -> str:
        """Multiply a tensor by tensors and numbers."""
        for factor in factors:
            if not isinstance(factor, str):
                factor = self.writer.constant(factor, len(self.writer[value].dims))
            value = self.writer.pointwise("mul", value, factor)
        return value

    def followed(
        self,
        value: str,
        epilogue: Epilogue,
        operand: Callable[[str, jax.Array | float], str],
    ) -> str:
        """Scale the sums and add to them, as an epilogue has it before its activation.

        ``operand`` adds an operand of the epilogue to the graph, and returns its name.
        """
        for step, name, given in epilogue.steps:
            if step == "add":
                value = self.writer.pointwise("add", value, operand(name, given))
            elif isinstance(given, jax.Array):
                value = self.scaled(value, [operand(name, given)])
            else:
                value = self.scaled(value, [float(given)])
        return value

    def run(
        self,
        value: str,
        activation: Activation | None,
        *,
        shape: tuple[int, ...],
        factor: Operand | float | None = None,
        gate: Fused | None = None,
        dtype: DTypeName,
        order: tuple[int, ...],
        options: Options,
        out_sharding: object = None,
    ) -> jax.Array:
        """Return the activation times a factor, rounded to a dtype, stored in `order`.

        The activation sees an array of `shape`, which holds the same elements. An
        activation that the graph cannot hold is applied to the graph's result, and
        gives the same numbers: it gets the sums before they are rounded, and its result
        is multiplied by the factor and rounded once. A factor's array broadcasts to
        `shape`. A ``gate`` is an activation of this array, within the graph. Where the
        operands' shardings contradict each other, ``out_sharding`` decides.
        """
        wanted = _wanted(out_sharding, shape)
        written = value
        if activation is not None:
            wide = jax_dtype(self.writer.accumulator)
            like = jax.ShapeDtypeStruct(shape, wide)
            found = resolve(self._op, activation, like)
            if isinstance(found, Unfused):
                assert gate is None, "it would be outside of its graph"
                remarked = replace(options, remark=found.remark)
                wide_name = self.writer.accumulator
                sums = self._launch(value, wide_name, order, remarked, wanted)
                result = found.function(jnp.reshape(sums, shape))
                check_result(self._op, result, like)
                return _rounded(result, sums, factor, dtype)
            written = write(self.writer, found, value)
        factors: list[str | float] = []
        if isinstance(factor, Operand):
            name = self.operand("scale_out", factor)
            factors.append(name if gate is None else write(self.writer, gate, name))
        elif factor is not None:
            factors.append(factor)
        value = self.scaled(written, factors)
        return self._launch(value, dtype, order, options, wanted)

    def _launch(
        self,
        value: str,
        dtype: DTypeName,
        order: tuple[int, ...],
        options: Options,
        wanted: tuple[Any, ...] | None,
    ) -> jax.Array:
        graph = self.graph(Result(value, dtype, order))
        return self.compute(graph, options, wanted)[0]

    def graph(self, main: Result, others: Sequence[str] = ()) -> Graph:
        """Return the graph of the main result, and of other values as they are."""
        value, dtype, order = main
        if self.writer[value].dtype == "i32" and dtype != "i32":
            value = self.writer.cast(value, "f32")
        final = Tensor(
            name="output", dtype=dtype, dims=self.writer[value].dims, order=order
        )
        return self.writer.finish([self.writer.result(value, final), *others])

    def compute(
        self, graph: Graph, options: Options, wanted: tuple[Any, ...] | None = None
    ) -> list[jax.Array]:
        """Return the results of a graph of the operands."""
        operands = [self._arrays[x] for x in graph.inputs]
        return run_graph(graph, operands, options, wanted=wanted)


def _wanted(out_sharding: Any, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Return how the axes of a result that are not of size 1 are to be sharded."""
    if out_sharding is None or not is_on_explicit_mesh(out_sharding):
        return None
    entries = zip(entries_of(out_sharding, len(shape)), shape, strict=True)
    return tuple(entry for entry, size in entries if size != 1)


class StartedGraph(NamedTuple):
    """A graph with its contraction, whose value is what an epilogue begins with.

    ``dtype`` is that of the graph's result.
    """

    fusion: Fusion
    value: str
    dtype: DTypeName


def _rounded(
    x: jax.Array, sums: jax.Array, given: Operand | float | None, dtype: DTypeName
) -> jax.Array:
    """Return an array times a factor, both in the dtype of the sums or f64."""
    factor = given.array if isinstance(given, Operand) else given
    arrays = [each for each in (x, factor) if isinstance(each, jax.Array)]
    is_double = any(each.dtype == jnp.float64 for each in arrays)
    wide = jnp.dtype(jnp.float64) if is_double else sums.dtype
    x = x.astype(wide)
    if isinstance(factor, jax.Array):
        factor = factor.astype(wide)
    if factor is not None:
        x = x * factor
    return x.astype(jax_dtype(dtype))
