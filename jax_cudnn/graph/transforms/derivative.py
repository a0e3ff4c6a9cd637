# SPDX-License-Identifier: Apache-2.0
"""The gradient of a graph as one more graph, written by the rules of its nodes."""

import functools
from dataclasses import dataclass, replace

from jax_cudnn.graph.kinds import BackwardGraph, Derivative, kind_named
from jax_cudnn.graph.pointwise import copying
from jax_cudnn.graph.rules import accumulator
from jax_cudnn.graph.spec import Graph, Node
from jax_cudnn.graph.walks import following, graph_of
from jax_cudnn.graph.writer import GradientWriter, residual_tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedFirst:
    """A graph that adds two operands first, and the graph of their sum alone.

    ``terms`` are the operands that it adds. The first of them is the sum in ``rest``,
    which lacks the other one, and the result ``total``.
    """

    rest: Graph
    terms: tuple[int, int]
    total: int


@functools.lru_cache(maxsize=4096)
def added_first(graph: Graph) -> AddedFirst | None:
    """Return what a graph adds before all else, or None.

    Its derivative is that of a sum, and that of the rest at the sum.
    """
    node = graph.sole_node()
    adds = () if node is None else kind_named(node.kind).row.adds
    if node is None or not adds or adds[1] not in dict(node.inputs):
        return None
    inputs, outputs = dict(node.inputs), dict(node.outputs)
    first, second, total = inputs[adds[0]], inputs.pop(adds[1]), outputs.pop(adds[2])
    others = Node.make(node.kind, inputs, outputs, node.attributes)
    results = [name for name in graph.outputs if name != total]
    rest = graph_of(graph.tensors, [others], results, graph.inputs)
    return AddedFirst(
        rest=rest,
        terms=(graph.inputs.index(first), graph.inputs.index(second)),
        total=graph.outputs.index(total),
    )


def derivative_of(graph: Graph) -> Derivative | None:
    """Return how the graph is differentiated, or None: by the reference alone.

    That of a graph that adds first is the derivative of what it adds (`added_first`).
    """
    node = graph.sole_node()
    if node is not None and (own := kind_named(node.kind).derivative) is not None:
        return own
    if all(_has_vjp(node) for node in graph.nodes):
        return Derivative(with_residuals=_with_residuals, backward=_backward)
    return None


def _has_vjp(node: Node) -> bool:
    kind = kind_named(node.kind)
    return kind.vjp is not None and kind.has_vjp(node.attributes)


# Tracing asks for the same gradient several times.
@functools.lru_cache(maxsize=4096)
def _with_residuals(graph: Graph, wanted: tuple[bool, ...]) -> Graph:
    """Add a result for each virtual tensor that the gradient will read."""
    _, writer = _write(graph, wanted, (True,) * len(graph.outputs))
    if not writer.residuals:
        return graph
    saved = [residual_tensor(graph, name) for name in writer.residuals]
    copies = {
        name: tensor
        for name, tensor in zip(writer.residuals, saved, strict=True)
        if tensor.name != name
    }
    nodes = (copying(name, tensor.name) for name, tensor in copies.items())
    return Graph(
        tensors=(*graph.tensors, *copies.values()),
        nodes=(*graph.nodes, *nodes),
        inputs=graph.inputs,
        outputs=(*graph.outputs, *(tensor.name for tensor in saved)),
    )


@functools.lru_cache(maxsize=4096)
def _backward(
    graph: Graph, wanted: tuple[bool, ...], nonzero: tuple[bool, ...]
) -> BackwardGraph | None:
    gradients, writer = _write(graph, wanted, nonzero)
    if not gradients:
        return None
    backward = writer.finish(tuple(gradients))
    # Without the operands that nothing reads.
    backward = graph_of(
        backward.tensors, backward.nodes, backward.outputs, backward.inputs
    )
    full = _with_residuals(graph, wanted)

    def source(name: str) -> tuple[str, int]:
        origin = writer.sources[name]
        if name in writer.cotangents:
            return "cotangent", graph.outputs.index(origin)
        if origin in graph.inputs:
            return "input", graph.inputs.index(origin)
        return "output", full.outputs.index(origin)

    return BackwardGraph(
        graph=backward,
        operands=tuple(source(name) for name in backward.inputs),  # type: ignore[misc]
        gradients=tuple(gradients.values()),
    )


def _write(
    graph: Graph, wanted: tuple[bool, ...], nonzero: tuple[bool, ...]
) -> tuple[dict[str, int], GradientWriter]:
    """Write the gradients of the wanted operands, and return whose each name is.

    Those that are zero are left out.
    """
    # For gelu(x @ w) with the cotangent g of the result, nodes are taken from the last
    # one back: the gradient of z = x @ w is gelu_grad(z, g), and with it those of x and
    # w are two matmuls. z is an operand of that graph, since the forward graph saves
    # it.
    dtypes = [accumulator(t.dtype) for t in graph.tensors]
    writer = GradientWriter(graph, "f64" if "f64" in dtypes else "f32")
    cotangents: dict[str, list[str]] = {
        name: [writer.cotangent(name)]
        for name, is_nonzero in zip(graph.outputs, nonzero, strict=True)
        if is_nonzero
    }
    pairs = zip(graph.inputs, wanted, strict=True)
    moving = following(graph.nodes, (name for name, is_wanted in pairs if is_wanted))
    for node in reversed(graph.nodes):
        vjp = kind_named(node.kind).vjp
        assert vjp is not None, "derivative_of has looked"
        (output,) = (name for _, name in node.outputs)
        if output not in cotangents or output not in moving:
            continue
        cotangent = _sum(writer, cotangents.pop(output))
        for role, name in node.inputs:
            if name in moving:
                grad = vjp(writer, node, cotangent, role)
                if grad is not None:
                    cotangents.setdefault(name, []).append(grad)
    grads = {
        i: _sum(writer, cotangents[name])
        for i, name in enumerate(graph.inputs)
        if wanted[i] and name in cotangents
    }
    results: dict[str, int] = {}
    for i, grad in grads.items():
        if list(grads.values()).count(grad) > 1:
            # That of several operands; their dtypes may differ.
            grad = writer.pointwise("identity", grad)
        tensor = graph.input_tensors[i]
        final = replace(tensor, name=writer.gradient_name(tensor.name))
        results[writer.result(grad, final)] = i
    return results, writer


def _sum(writer: GradientWriter, names: list[str]) -> str:
    total = names[0]
    for name in names[1:]:
        total = writer.pointwise("add", total, name)
    return total
