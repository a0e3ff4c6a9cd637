# SPDX-License-Identifier: Apache-2.0
"""Evaluates a graph with one jax.numpy rule per node kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph, Node, Tensor, kind_named
from jax_cudnn.graph.spec import Attributes
from jax_cudnn.reference import contraction, pointwise, sdpa

# A rule takes the attributes, the input arrays by role in logical axis order, and
# the output tensors that are asked for; it returns those, in any dtype that holds
# the result, and the interpreter rounds once.
Rule = Callable[
    [Attributes, Mapping[str, jax.Array], Mapping[str, Tensor]], Mapping[str, Any]
]

_RULES: dict[str, Rule] = {
    "constant": pointwise.constant,
    "conv_dgrad": contraction.conv_dgrad,
    "conv_fprop": contraction.conv_fprop,
    "conv_wgrad": contraction.conv_wgrad,
    "matmul": contraction.matmul,
    "pointwise": pointwise.pointwise,
    "reduction": pointwise.reduction,
    "sdpa": sdpa.forward,
    "sdpa_backward": sdpa.backward,
}

# Where our dtype names differ from NumPy's.
_JAX_DTYPES = {
    "bool": jnp.bool_,
    "u8": jnp.uint8,
    "i8": jnp.int8,
    "i32": jnp.int32,
    "i64": jnp.int64,
    "f8_e4m3fn": jnp.float8_e4m3fn,
    "f8_e5m2": jnp.float8_e5m2,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "f64": jnp.float64,
}


def jax_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype that a graph's dtype name stands for."""
    return np.dtype(_JAX_DTYPES[name])


_NAMES = {jax_dtype(name): name for name in _JAX_DTYPES}


def dtype_name(dtype: object) -> str | None:
    """Return the graph's name of a dtype, or None where graphs have none for it."""
    return _NAMES.get(np.dtype(dtype))  # type: ignore[call-overload]


def evaluate(graph: Graph, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return the graph's results, given its operands as stored arrays."""
    values = {
        tensor.name: to_logical(tensor, operand)
        for tensor, operand in zip(graph.input_tensors, operands, strict=True)
    }
    for node in graph.nodes:
        values |= _evaluate_node(graph, node, values)
    return tuple(to_stored(t, values[t.name]) for t in graph.output_tensors)


def _evaluate_node(
    graph: Graph, node: Node, values: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    rule = _RULES[kind_named(node.kind).name]
    inputs = {role: values[name] for role, name in node.inputs}
    outputs = {role: graph.tensor(name) for role, name in node.outputs}
    results = rule(node.attributes, inputs, outputs)
    return {
        tensor.name: results[role].astype(jax_dtype(tensor.dtype))
        for role, tensor in outputs.items()
    }


def to_logical(tensor: Tensor, stored: jax.Array) -> jax.Array:
    """Reorder a tensor's stored array to its logical axes."""
    inverse = tuple(tensor.order.index(axis) for axis in range(len(tensor.order)))
    return jnp.transpose(stored, inverse)


def to_stored(tensor: Tensor, logical: jax.Array) -> jax.Array:
    """Reorder an array that broadcasts to logical axes so it broadcasts to storage."""
    return jnp.transpose(logical, tensor.order)
