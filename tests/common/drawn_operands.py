# SPDX-License-Identifier: Apache-2.0
"""Random operands of any graph: the table of node kinds says what each may hold."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph, Node, Tensor
from jax_cudnn.graph.kinds import roles_in, row_of
from jax_cudnn.graph.shapes import check_tensors
from jax_cudnn.reference.dtypes import jax_dtype


def draw_operands(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    """Return operands as stored, floats in f64.

    Counts go from 0 to two beyond their axis. Where a row has several, each has an
    equal share of the axis, and may leave a part of it. Indices go one beyond theirs on
    both sides. A mask hides all from the last row of its first matrix.
    """
    rng = np.random.default_rng(seed)
    uses = {name: (n, role) for n in graph.nodes for role, name in n.inputs}
    return [_draw(rng, graph, x, *uses[x.name]) for x in graph.input_tensors]


def draw_arrays(graph: Graph, seed: int = 0) -> list[jax.Array]:
    """Return operands as stored, in their dtypes."""
    pairs = zip(graph.input_tensors, draw_operands(graph, seed), strict=True)
    return [jnp.asarray(x.astype(jax_dtype(tensor.dtype))) for tensor, x in pairs]


def _draw(
    rng: np.random.Generator, graph: Graph, tensor: Tensor, node: Node, name: str
) -> np.ndarray:
    row, shape = row_of(node), tensor.stored_shape
    role = row.roles[name]
    if letters := role.counts or role.starts_along or role.indexes:
        sizes = check_tensors(row, roles_in(graph, node), node.attributes)
        along = math.prod(sizes[letter] for letter in letters)
        parts = max(math.prod(shape[1:]), 1)
        if role.indexes:
            return rng.integers(-1, along + 1, shape, np.int32)
        if role.starts_along:
            starts = np.arange(parts, dtype=np.int32) * (along // parts)
            return np.broadcast_to(starts.reshape(1, *shape[1:]), shape)
        most = along // parts if parts > 1 else along + 2
        return rng.integers(0, most + 1, shape, np.int32)
    if role.is_positive:
        return rng.uniform(0.5, 2, shape)
    if tensor.dtype == "bool":
        mask = rng.random(tensor.dims) < 0.6
        mask[(*[slice(1)] * (mask.ndim - 2), slice(-1, None))] = False
        return np.transpose(mask, tensor.order)
    if tensor.dtype in ("u8", "i8", "i32", "i64"):
        return rng.integers(0, 5, shape)
    return rng.standard_normal(shape)
