# SPDX-License-Identifier: Apache-2.0
"""The `grouped_matmul` node, a matrix for each group of rows, and its gradient.

Their tensors are described in node_kinds.json. The rows of a lie group by group, and
those of group g are multiplied by b[g]. Group g has ``group_sizes[g]`` rows and begins
where the one before it ends. Rows beyond the last group give 0, and are in no gradient
but their own, which is 0.

In place of sizes, cuDNN gets ``starts``: a group reaches to the start of the next one,
and the last to the end of a. cuBLASLt gets both, and then the starts are those that
follow from the sizes, and rows in no group are set to 0. Sums are kept in f32 (f64 for
f64).

Operands have one dtype, or both are of f8. A product of f8 has no gradient kernel:
cotangents would need scales. See ops/products/f8_groups.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.kinds import Roles
from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.graph.shapes import result_dims
from jax_cudnn.graph.spec import Attributes, DTypeName, Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import (
    register_with_gradient,
    single_node_graph,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedMatmulAttributes(Attributes):
    """No options: a transposed operand has its dims in another order."""


def grouped_matmul_graph(inputs: Mapping[str, Tensor], dtype: DTypeName) -> Graph:
    """Build the one-node graph with a result of that dtype.

    ``inputs`` maps roles to tensors of the same name, in operand order.
    """
    attributes = GroupedMatmulAttributes()
    dims = result_dims(GROUPED_MATMUL.row, "output", inputs, attributes)
    output = Tensor(name="output", dtype=dtype, dims=dims, order=(0, 1, 2))
    return single_node_graph("grouped_matmul", inputs, {"output": output}, attributes)


def matrices_gradient_graph(inputs: Mapping[str, Tensor]) -> Graph:
    """Build the graph of the gradient of b alone, given the gradient's operands."""
    output = replace(inputs["b"], name="grad_b")
    return single_node_graph(
        "grouped_matmul_backward",
        inputs,
        {"grad_b": output},
        GroupedMatmulAttributes(),
    )


def _check(roles: Roles, attributes: Attributes) -> None:
    del attributes
    if "group_sizes" not in roles and "starts" not in roles:
        raise GraphError("grouped_matmul: neither group_sizes nor starts given")
    a, b = roles["a"].dtype, roles["b"].dtype
    if a != b and not {a, b} <= {*EIGHT_BIT}:
        raise GraphError(f"grouped_matmul: a is {a} and b {b}, not of one dtype")


GROUPED_MATMUL = register_with_gradient(
    "grouped_matmul", GroupedMatmulAttributes, check=_check
)
