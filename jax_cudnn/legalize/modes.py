# SPDX-License-Identifier: Apache-2.0
"""Pointwise modes that cuDNN plans and does not compute well, written as others.

Both were found on an H200 with cuDNN 9.19 (tests/gpu/test_fusion_numerics.py):

* the slope of a leaky relu comes out wrong by a fifth, as if it were a power of two;
* an elu after an f32 convolution cannot be launched, where its argument is a result.
"""

from jax_cudnn.graph import Graph, GraphWriter
from jax_cudnn.graph.pointwise import PointwiseAttributes


def rewrite_modes(graph: Graph) -> Graph:
    """Return the graph with such nodes written as several; names of results stay."""
    if not any(_is_odd(getattr(node, "attributes", None)) for node in graph.nodes):
        return graph
    is_double = any(tensor.dtype == "f64" for tensor in graph.tensors)
    writer = GraphWriter("f64" if is_double else "f32", prefix="legal_")
    names = {tensor.name: writer.input(tensor) for tensor in graph.input_tensors}
    for node in graph.nodes:
        inputs = {role: names[name] for role, name in node.inputs}
        ((role, made),) = node.outputs
        tensor = graph.tensor(made)
        attributes = node.attributes
        if _is_odd(attributes):
            assert isinstance(attributes, PointwiseAttributes)
            value = _write(writer, attributes, [inputs[r] for r in sorted(inputs)])
        else:
            value = writer.node(
                node.kind,
                inputs,
                attributes,
                output=role,
                dims=tensor.dims,
                order=tensor.order,
                dtype=tensor.dtype,
            )
        names[made] = writer.result(value, tensor)
    return writer.finish(graph.outputs)


def _is_odd(attributes: object) -> bool:
    if not isinstance(attributes, PointwiseAttributes):
        return False
    mode = attributes.mode.removesuffix("_grad")
    return mode == "elu" or (mode == "relu" and attributes.alpha != 0)


def _write(
    writer: GraphWriter, attributes: PointwiseAttributes, names: list[str]
) -> str:
    apply = writer.pointwise
    x = names[-1]
    rank = len(writer[x].dims)
    alpha, zero = writer.constant(attributes.alpha, rank), writer.constant(0.0, rank)
    # At 0 a leaky relu has the upper slope, as in JAX.
    is_leaky = attributes.mode.startswith("relu")
    is_positive = apply("ge" if is_leaky else "gt", x, zero)

    def power() -> str:
        return apply("exp", apply("min", x, zero))

    match attributes.mode:
        case "relu":
            below = apply("mul", x, alpha)
        case "elu":
            below = apply("sub", power(), writer.constant(1.0, rank))
            below = apply("mul", below, alpha)
        case "relu_grad":
            below = apply("mul", names[0], alpha)
        case _:
            below = apply("mul", names[0], apply("mul", power(), alpha))
    return apply("select", names[0], below, is_positive)
