# SPDX-License-Identifier: Apache-2.0
"""Graphs of one convolution, or a gradient of one, for tests."""

from jax_cudnn.graph import ConvAttributes, DTypeName, Graph, Node, Tensor
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.graph.products.conv import TRIPLES


def conv_graph(
    kind: str,
    dtype: DTypeName,
    *,
    axes: int = 3,
    window: int = 3,
    channels: int = 16,
    groups: int = 1,
    size: int = 6,
    batch: int = 2,
    prologue: str = "",
) -> Graph:
    """Return a convolution of padded images, or a gradient, alone or after a mode."""
    images = (batch, channels, *(size,) * axes)
    filters = (channels, channels // groups, *(window,) * axes)
    dims = dict(zip(TRIPLES[kind], (images, filters, images), strict=True))
    order = (0, *range(2, axes + 2), 1)
    tensors = [
        Tensor(name=role, dtype=dtype, dims=each, order=order)
        for role, each in dims.items()
    ]
    results = {"conv_fprop": "output", "conv_dgrad": "grad_x", "conv_wgrad": "grad_w"}
    result = results[kind]
    inputs = {role: role for role in dims if role != result}
    names, nodes = tuple(inputs), []
    if prologue:
        mode = PointwiseAttributes(mode=prologue)
        made = Tensor(name="made", dtype=dtype, dims=dims["x"], order=order)
        tensors.append(made)
        nodes = [Node.make("pointwise", {"a": "x"}, {"output": "made"}, mode)]
        inputs["x"] = "made"
    attributes = ConvAttributes(
        window_strides=(1,) * axes,
        padding_low=(window // 2,) * axes,
        padding_high=(window // 2,) * axes,
        lhs_dilation=(1,) * axes,
        rhs_dilation=(1,) * axes,
    )
    nodes.append(Node.make(kind, inputs, {result: result}, attributes))
    return Graph(
        tensors=tuple(tensors), nodes=tuple(nodes), inputs=names, outputs=(result,)
    )
