# SPDX-License-Identifier: Apache-2.0
"""The pooling nodes: a maximum or an average over each window.

Their tensors are described in node_kinds.json. A window has ``window_shape`` elements
along the spatial axes, and there is one every ``window_strides``. Padding holds -inf
for a maximum and 0 for an average; where it is negative, it cuts. A NaN in a window is
its result. An average is divided by the size of the window, or without
``count_include_pad`` by how many elements of x are in it: none gives NaN.
`avg_pool_backward` gives the gradient of x. `max_pool` has no gradient kernel: which of
several equal elements cuDNN's takes is not documented.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax_cudnn.graph.description import describe
from jax_cudnn.graph.kinds import NodeKind, register_kind
from jax_cudnn.graph.shapes import result_like
from jax_cudnn.graph.spec import Attributes, Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import (
    register_with_gradient,
    single_node_graph,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxPoolAttributes(Attributes):
    """The windows of a maximum; one entry per spatial axis."""

    window_shape: tuple[int, ...]
    window_strides: tuple[int, ...]
    padding_low: tuple[int, ...]
    padding_high: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AvgPoolAttributes(Attributes):
    """The windows of an average, and whether padding counts as elements of them."""

    window_shape: tuple[int, ...]
    window_strides: tuple[int, ...]
    padding_low: tuple[int, ...]
    padding_high: tuple[int, ...]
    count_include_pad: bool


PoolAttributes = MaxPoolAttributes | AvgPoolAttributes


def pool_graph(x: Tensor, *, attributes: PoolAttributes) -> Graph:
    """Build the one-node graph of a tensor named "x"; its result is stored like x."""
    kind = AVG_POOL if isinstance(attributes, AvgPoolAttributes) else MAX_POOL
    inputs: Mapping[str, Tensor] = {"x": x}
    output = result_like(kind.row, "output", inputs, attributes)
    outputs = {"output": replace(output, order=x.order)}
    return single_node_graph(kind.name, inputs, outputs, attributes)


AVG_POOL = register_with_gradient("avg_pool", AvgPoolAttributes)
MAX_POOL = register_kind(
    NodeKind(row=describe("max_pool"), attributes=MaxPoolAttributes)
)
