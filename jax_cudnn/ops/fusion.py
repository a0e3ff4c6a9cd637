# SPDX-License-Identifier: Apache-2.0
"""A contraction's graph while it is written: operands, and what follows the sums."""

from collections.abc import Sequence

import jax

from jax_cudnn.config import Options
from jax_cudnn.graph import DTypeName, GraphWriter, Tensor
from jax_cudnn.lowering import run_graph
from jax_cudnn.ops.activations import Activation, apply
from jax_cudnn.ops.arguments import tensor


class Fusion:
    """Writes one graph, and keeps the arrays of its operands by name."""

    def __init__(self, op: str, accumulator: DTypeName) -> None:
        """Start the graph of an operation whose sums are kept in that dtype."""
        self._op = op
        self.writer = GraphWriter("f64" if accumulator == "f64" else "f32")
        self._arrays: dict[str, jax.Array] = {}

    def operand(self, name: str, array: jax.Array, order: tuple[int, ...]) -> str:
        """Add an operand, its axes stored in `order`."""
        self._arrays[name] = array
        return self.writer.input(tensor(name, array, order))

    def scaled(self, value: str, factors: Sequence[str | float]) -> str:
        """Multiply a tensor by tensors and numbers."""
        for factor in factors:
            if not isinstance(factor, str):
                factor = self.writer.constant(factor, len(self.writer[value].dims))
            value = self.writer.pointwise("mul", value, factor)
        return value

    def activated(
        self, value: str, terms: Sequence[str], activation: Activation | None
    ) -> str:
        """Add tensors, then apply the activation."""
        for term in terms:
            value = self.writer.pointwise("add", value, term)
        if activation is None:
            return value
        return apply(self.writer, self._op, activation, value)

    def run(
        self,
        value: str,
        dtype: DTypeName,
        order: tuple[int, ...],
        options: Options,
    ) -> jax.Array:
        """Return the tensor, rounded to a dtype and stored in `order`."""
        if self.writer[value].dtype == "i32" and dtype != "i32":
            value = self.writer.cast(value, "f32")
        final = Tensor(
            name="output", dtype=dtype, dims=self.writer[value].dims, order=order
        )
        graph = self.writer.finish([self.writer.result(value, final)])
        arrays = [self._arrays[name] for name in graph.inputs]
        return run_graph(graph, arrays, options)[0]
