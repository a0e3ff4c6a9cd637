# SPDX-License-Identifier: Apache-2.0
"""The node of attention over f8 operands, `sdpa_f8`, which has no gradient.

Its tensors are described in node_kinds.json; letters, lengths, ``stats`` and attributes
are those of `sdpa`. What stands for a number x in f8 is x times a scale, or x is the
stored number times a "descale". With R the rounding to the operands' dtype, which
saturates,

    S = scale descale_query descale_key Q K^T,  E = exp(S - rowmax(S)),
    O = R(scale_probabilities E) V descale_probabilities descale_value / rowsum(E)

``output`` is scale_output O in its dtype, and ``amax_output`` is max|O|, before it is
scaled and saturates; NaN is left out of it.
"""

from collections.abc import Mapping
from dataclasses import replace

from jax_cudnn.graph.attention.sdpa import SdpaAttributes
from jax_cudnn.graph.description import describe
from jax_cudnn.graph.kinds import NodeKind, register_kind
from jax_cudnn.graph.shapes import result_dims, result_like
from jax_cudnn.graph.spec import DTypeName, Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import single_node_graph


def sdpa_f8_graph(
    inputs: Mapping[str, Tensor],
    *,
    attributes: SdpaAttributes,
    output: Tensor,
    with_stats: bool = False,
    with_amax: bool = False,
) -> Graph:
    """Build the one-node graph; tensors are named by their roles.

    ``inputs`` maps roles to tensors of the same name, in operand order.
    """
    outputs = {"output": output}
    for role, is_asked in (("stats", with_stats), ("amax_output", with_amax)):
        if is_asked:
            outputs[role] = result_like(SDPA_F8.row, role, inputs, attributes)
    return single_node_graph("sdpa_f8", inputs, outputs, attributes)


def sdpa_f8_output(
    inputs: Mapping[str, Tensor],
    *,
    attributes: SdpaAttributes,
    dtype: DTypeName,
    order: tuple[int, ...],
) -> Tensor:
    """Return the tensor of the output in a dtype, given the operands."""
    dims = result_dims(SDPA_F8.row, "output", inputs, attributes)
    return replace(inputs["query"], name="output", dtype=dtype, dims=dims, order=order)


SDPA_F8 = register_kind(NodeKind(row=describe("sdpa_f8"), attributes=SdpaAttributes))
