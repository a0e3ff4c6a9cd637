# SPDX-License-Identifier: Apache-2.0
"""The nodes of norms, and the gradient of each.

Their tensors are described in node_kinds.json. With x an element, E the mean over what
is normalised, and var = E (x - E x)^2,

    mean = E x,  rstd = 1 / sqrt(var + epsilon)
    output = (x - mean) rstd scale + bias

In `rms_norm` the mean is left out: rstd = 1 / sqrt(E x^2 + epsilon). What is normalised
are the features of a row (`layer_norm`, `rms_norm`, `adaptive_layer_norm`), the rows of
a channel (`batch_norm`), or the channels of a group at all positions (`group_norm`).
Without ``scale`` there is none, and likewise ``bias``. In `layer_norm` and `rms_norm` a
``residual`` is added to x before, and x stands for the sum, which is a result, too:
``total``, rounded to its dtype. With ``scale_output`` the output
is multiplied by it, and what its dtype does not hold becomes the largest number that it
does: an output in f8. Such a norm has no gradient.

The gradients read the statistics that the forward kernel saved.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.kinds import Roles, kind_named
from jax_cudnn.graph.shapes import result_like
from jax_cudnn.graph.spec import Attributes, Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import (
    register_with_gradient,
    single_node_graph,
)

# The axes of x that are normalised, by kind.
NORMALISED: Mapping[str, tuple[int, ...]] = {
    "adaptive_layer_norm": (2,),
    "batch_norm": (0,),
    "group_norm": (2, 3),
    "layer_norm": (1,),
    "rms_norm": (1,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NormAttributes(Attributes):
    """``epsilon`` is added to the variance, 0 or more."""

    epsilon: float


def norm_graph(
    kind: str,
    inputs: Mapping[str, Tensor],
    *,
    attributes: NormAttributes,
    output: Tensor,
    with_statistics: bool = False,
) -> Graph:
    """Build the one-node forward graph; tensors are named by their roles.

    ``inputs`` maps roles to tensors of the same name, in operand order. The results are
    the output, the sum with a residual, and the statistics if they are asked for.
    """
    row = kind_named(kind).row
    outputs = {"output": output}
    if "residual" in inputs:
        outputs["total"] = replace(inputs["x"], name="total")
    for role in row.outputs:
        if with_statistics and role.is_sum:
            outputs[role.name] = result_like(row, role.name, inputs, attributes)
    return single_node_graph(kind, inputs, outputs, attributes)


def _cancelled(kind: str) -> Callable[[Roles], frozenset[str]]:
    """Return what says which results of a gradient are sums that cancel.

    Of one element (of two, with a mean) only the sign is left after normalising, so
    that the gradient of x has only what epsilon leaves.
    """

    def cancelled(roles: Roles) -> frozenset[str]:
        count = 1
        for axis in NORMALISED[kind]:
            count *= roles["x"].dims[axis]
        found: set[str] = set()
        if count <= (2 if "mean" in roles else 1):
            found.add("grad_x")
        if count == 1 and "mean" in roles:
            found.add("grad_scale")
        return frozenset(found & roles.keys())

    return cancelled


def _check(roles: Roles, attributes: Attributes) -> None:
    """Raise GraphError unless a residual comes with the sum, and the sum with it."""
    del attributes
    if ("residual" in roles) != ("total" in roles):
        raise GraphError("a norm with a residual gives the total, and no other does")


for _name in NORMALISED:
    register_with_gradient(
        _name, NormAttributes, check=_check, cancelled=_cancelled(_name)
    )
