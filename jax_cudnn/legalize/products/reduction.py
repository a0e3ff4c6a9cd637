# SPDX-License-Identifier: Apache-2.0
"""Rewrites graphs of pointwise nodes and sums without a contraction for cuDNN.

The gradient through an activation and a bias is such a part: one pass over memory in
cuDNN, two in XLA. cuDNN wants tensors of rank 4 or 5, channels last, and f32 sums.
"""

import math
from dataclasses import replace

import jax.numpy as jnp

from jax_cudnn.graph import Graph, Tensor
from jax_cudnn.graph.pointwise import is_max_or_min
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.layout import channels_last
from jax_cudnn.legalize.common.legalization import Legalization, Rewrite

_SLOWER = "XLA fuses elementwise work with what is around it"

_MAX_AND_MIN = "cuDNN has max and min at the end of a matmul only"

# MAX_OPGRAPH_OPS of cudnn-frontend 1.32, which raises on more. (A graph with a
# contraction has fewer: an activation is at most so long.)
_MOST_OPERATIONS = 250


def legalize(graph: Graph) -> Legalization:
    """Return how cuDNN can run a graph of pointwise nodes and sums."""
    if not any(node.kind == "reduction" for node in graph.nodes):
        return Legalization(reasons=(_SLOWER,))
    if any(map(is_max_or_min, graph.nodes)):
        return Legalization(reasons=(_MAX_AND_MIN,))
    if reasons := _refusals(graph):
        return Legalization(reasons=reasons)
    rewrite = _candidate(graph)
    if rewrite is None:
        return Legalization(reasons=("cuDNN sums over all axes but the channels",))
    # Only a measurement says otherwise: see choices.py.
    return Legalization(candidates=(rewrite,))


def _refusals(graph: Graph) -> tuple[str, ...]:
    reasons: list[str] = []
    if any(t.dtype == "f64" for t in graph.tensors):
        reasons.append("f64: cuDNN's fusions take bf16, f16 and f32")
    count = sum(node.kind != "constant" for node in graph.nodes)
    if count > _MOST_OPERATIONS:
        reasons.append(
            f"{count} operations: cuDNN takes {_MOST_OPERATIONS} in one graph"
        )
    return tuple(reasons)


def _candidate(graph: Graph) -> Rewrite | None:
    editor = GraphEditor.of(graph)
    rank = len(graph.tensors[0].dims)
    full = max((t.dims for t in graph.tensors), key=math.prod)
    channel = 1 if rank > 3 else rank - 1
    for name, tensor in list(editor.tensors.items()):
        if tensor.dims not in (full, _vector(full, channel), (1,) * rank):
            return None
        if rank > 3 and tensor.dims == full and tensor.order != channels_last(rank):
            return None
        if rank == 3:
            if tensor.dims == full and tensor.order != (0, 1, 2):
                return None
            _as_image(editor, name, tensor)
    for node in editor.nodes:
        if node.kind == "reduction":
            _sum_in_f32(editor, dict(node.outputs)["output"])
    return editor.finish()


def _vector(full: tuple[int, ...], channel: int) -> tuple[int, ...]:
    return tuple(size if axis == channel else 1 for axis, size in enumerate(full))


def _as_image(editor: GraphEditor, name: str, tensor: Tensor) -> None:
    """See a batch of matrices (b, m, n) as an image (b m, n, 1, 1), channels last."""
    b, m, n = tensor.dims
    image = replace(tensor, dims=(b * m, n, 1, 1), order=(0, 2, 3, 1))
    shape = tensor.stored_shape
    editor.rearrange(
        name,
        image,
        lambda x: jnp.reshape(x, image.stored_shape),
        lambda x: jnp.reshape(x, shape),
    )


def _sum_in_f32(editor: GraphEditor, name: str) -> None:
    if editor.tensors[name].dtype != "f32":
        editor.convert(name, "f32")
