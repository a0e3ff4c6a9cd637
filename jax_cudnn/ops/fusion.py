# SPDX-License-Identifier: Apache-2.0
"""Writes the graph of a contraction and its epilogue, and runs it."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import DTypeName, GraphWriter, Tensor
from jax_cudnn.lowering import run_graph
from jax_cudnn.ops.activations import Activation, Outside, check_result, write
from jax_cudnn.ops.arguments import tensor
from jax_cudnn.reference.dtypes import jax_dtype


class Fusion:
    """Writes one graph, and keeps the arrays of its operands by name."""

    def __init__(self, op: str, accumulator: DTypeName) -> None:
        """Start the graph of an operation whose sums are kept in that dtype."""
        self._op = op
        self.writer = GraphWriter("f64" if accumulator == "f64" else "f32")
        self._arrays: dict[str, jax.Array] = {}

    def operand(self, name: str, array: jax.Array, order: tuple[int, ...]) -> str:
        """Add an operand whose axes are stored in `order`, and return its name."""
        self._arrays[name] = array
        return self.writer.input(tensor(name, array, order))

    def scaled(self, value: str, factors: Sequence[str | float]) -> str:
        """Multiply a tensor by tensors and numbers."""
        for factor in factors:
            if not isinstance(factor, str):
                factor = self.writer.constant(factor, len(self.writer[value].dims))
            value = self.writer.pointwise("mul", value, factor)
        return value

    def added(self, value: str, terms: Sequence[str]) -> str:
        """Add tensors."""
        for term in terms:
            value = self.writer.pointwise("add", value, term)
        return value

    def run(
        self,
        value: str,
        activation: Activation | None,
        *,
        shape: tuple[int, ...],
        factor: jax.Array | float | None = None,
        dtype: DTypeName,
        order: tuple[int, ...],
        options: Options,
    ) -> jax.Array:
        """Return the activation times a factor, rounded to a dtype, stored in `order`.

        The activation sees an array of `shape`, which holds the same elements. An
        activation that the graph cannot hold is applied to the graph's result, and
        gives the same numbers: it gets the sums before they are rounded, and its result
        is multiplied by the factor and rounded once.
        """
        written = value
        if activation is not None:
            written = write(self.writer, self._op, activation, value, shape)
        if isinstance(written, Outside):
            sums = self._launch(
                value,
                self.writer.accumulator,
                order,
                replace(options, remark=written.remark),
            )
            result = written.function(jnp.reshape(sums, shape))
            check_result(self._op, result, jax.ShapeDtypeStruct(shape, sums.dtype))
            return _rounded(jnp.reshape(result, sums.shape), sums, factor, dtype)
        factors: list[str | float] = []
        if isinstance(factor, jax.Array):
            factors.append(self.operand("scale_out", factor, order))
        elif factor is not None:
            factors.append(factor)
        return self._launch(self.scaled(written, factors), dtype, order, options)

    def _launch(
        self, value: str, dtype: DTypeName, order: tuple[int, ...], options: Options
    ) -> jax.Array:
        if self.writer[value].dtype == "i32" and dtype != "i32":
            value = self.writer.cast(value, "f32")
        final = Tensor(
            name="output", dtype=dtype, dims=self.writer[value].dims, order=order
        )
        graph = self.writer.finish([self.writer.result(value, final)])
        arrays = [self._arrays[name] for name in graph.inputs]
        return run_graph(graph, arrays, options)[0]


def _rounded(
    x: jax.Array, sums: jax.Array, factor: jax.Array | float | None, dtype: DTypeName
) -> jax.Array:
    """Return an array times a factor, both in the dtype of the sums or f64."""
    arrays = [each for each in (x, factor) if isinstance(each, jax.Array)]
    is_double = any(each.dtype == jnp.float64 for each in arrays)
    wide = jnp.dtype(jnp.float64) if is_double else sums.dtype
    x = x.astype(wide)
    if isinstance(factor, jax.Array):
        factor = factor.astype(wide)
    if factor is not None:
        x = x * factor
    return x.astype(jax_dtype(dtype))
