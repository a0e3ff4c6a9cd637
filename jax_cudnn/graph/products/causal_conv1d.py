# SPDX-License-Identifier: Apache-2.0
"""The `causal_conv1d` node, a causal convolution of each channel, and its gradient.

Their tensors are described in node_kinds.json. With K taps, x[t] = 0 for t < 0, and t a
step,

    output[t] = activation(bias + sum over j < K of x[t - j] w[K - 1 - j])

With ``segment_ids``, x[t - j] counts only where its step has the id of step t. Sums are
kept in f32 (f64 for f64). The gradient computes the argument of the activation again,
so nothing is saved for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.kinds import Roles
from jax_cudnn.graph.shapes import result_like
from jax_cudnn.graph.spec import Attributes, Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import (
    register_with_gradient,
    single_node_graph,
)

CAUSAL_ACTIVATIONS = ("identity", "silu")


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalConvAttributes(Attributes):
    """``activation`` is one of `CAUSAL_ACTIVATIONS`."""

    activation: str


def causal_conv1d_graph(
    inputs: Mapping[str, Tensor], *, attributes: CausalConvAttributes
) -> Graph:
    """Build the one-node graph, whose result is stored like x.

    ``inputs`` maps roles to tensors of the same name, in operand order.
    """
    output = result_like(CAUSAL_CONV1D.row, "output", inputs, attributes)
    outputs = {"output": replace(output, order=inputs["x"].order)}
    return single_node_graph("causal_conv1d", inputs, outputs, attributes)


def _check(roles: Roles, attributes: Attributes) -> None:
    del roles
    assert isinstance(attributes, CausalConvAttributes)
    if attributes.activation not in CAUSAL_ACTIVATIONS:
        raise GraphError(
            f"causal_conv1d: activation {attributes.activation!r} is not one of "
            f"{', '.join(CAUSAL_ACTIVATIONS)}"
        )


CAUSAL_CONV1D = register_with_gradient(
    "causal_conv1d", CausalConvAttributes, check=_check, check_gradient=_check
)
