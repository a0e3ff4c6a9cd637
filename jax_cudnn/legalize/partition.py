# SPDX-License-Identifier: Apache-2.0
"""Splits a graph into parts, each for one kernel: contractions and what surrounds them.

A contraction takes along what follows from it, and from none that is later, and is no
larger than its result (its epilogue), and a matmul the conversion of an 8-bit operand
(its prologue). What is
left, elementwise work and sums over the operands, is for XLA, which fuses it with what
the program does around the call. So the gradient of a fused convolution is: the
cotangent through the activation and the sums for the bias in XLA, then dgrad and
wgrad, one cuDNN kernel each.
"""

from jax_cudnn.graph import Graph, Node, is_anchor
from jax_cudnn.graph.rules import EIGHT_BIT, broadcasts_to
from jax_cudnn.graph.walks import (
    following,
    graph_of,
    leading_to,
    made_by,
    origins,
    read_by,
    readers,
)


def partition(graph: Graph) -> tuple[Graph, ...]:
    """Return the parts in the order in which they run.

    Tensors keep their names: an operand of a part is one of the graph's or a result
    of an earlier part. A part without a contraction is for XLA.
    """
    nodes = graph.nodes
    contractions = [node for node in nodes if is_anchor(node)]
    follows = origins(nodes, contractions)
    converted = _conversions(graph)
    # A node belongs to the last contraction that it follows from. So what a part reads
    # is there before it.
    place = {contraction: i for i, contraction in enumerate(contractions)}
    last = {n: max(map(place.__getitem__, x), default=-1) for n, x in follows.items()}
    _give_to_epilogues(graph, contractions, last)
    parts = [[node for node in nodes if last[node] < 0]]
    for i, contraction in enumerate(contractions):
        own = [node for node in nodes if last[node] == i]
        larger = _larger(graph, contraction, own)
        own = [node for node in own if node not in larger]
        taken = converted
        if contraction.kind != "matmul":
            taken = [node for node in converted if not node.inputs]
        parts.append([*own, *leading_to(taken, read_by(own))])
        parts.append([*larger, *leading_to(converted, read_by(larger))])
    chosen = [frozenset(part) for part in parts if part]
    graphs = [
        subgraph(graph, part, [other for other in chosen if other is not part])
        for part in chosen
    ]
    return tuple(part for part in graphs if part is not None)


def _give_to_epilogues(
    graph: Graph, contractions: list[Node], last: dict[Node, int]
) -> None:
    """Let an epilogue compute what only it reads, from operands of the result's size.

    The activation of a saved value in a gradient, for one: its memory is spared.
    """
    # The gradient of a gated MLP has (g @ w2^T) * silu(z), where z was saved. silu(z)
    # depends on no contraction, and only the epilogue of this matmul reads it. So it
    # moves into that epilogue.
    for node in reversed(graph.nodes):
        (name, *others) = made_by([node])
        if last[node] >= 0 or node.kind != "pointwise" or others:
            continue
        reading = readers(graph.nodes, name)
        owners = {last[each] for each in reading}
        if name in graph.outputs or len(owners) != 1 or any(map(is_anchor, reading)):
            continue
        (owner,) = owners
        if owner >= 0:
            _, result = contractions[owner].outputs[0]
            if graph.tensor(name).dims == graph.tensor(result).dims:
                last[node] = owner


def _larger(graph: Graph, contraction: Node, nodes: list[Node]) -> list[Node]:
    """Return those of the nodes that make more of the contraction's result.

    It broadcasts there, and is computed once: an epilogue is no larger than its kernel.
    """
    _, result = contraction.outputs[0]
    full = graph.tensor(result).dims
    broadcasting = [
        node
        for node in nodes
        if node != contraction
        and not all(broadcasts_to(graph.tensor(n).dims, full) for n in made_by([node]))
    ]
    larger = following(nodes, made_by(broadcasting))
    return [node for node in nodes if not larger.isdisjoint(made_by([node]))]


def _conversions(graph: Graph) -> list[Node]:
    """Return the nodes that only convert 8-bit operands, and constants."""
    found: list[Node] = []
    known = set(graph.inputs)
    narrow = {t.name for t in graph.input_tensors if t.dtype in EIGHT_BIT}
    for node in graph.nodes:
        if is_anchor(node) or node.kind == "reduction":
            continue
        inputs, outputs = read_by([node]), made_by([node])
        is_conversion = not narrow.isdisjoint(inputs) and known.issuperset(inputs)
        if is_conversion:
            narrow |= outputs
        if is_conversion or node.kind == "constant":
            known |= outputs
            found.append(node)
    return found


def subgraph(
    graph: Graph, part: frozenset[Node], others: list[frozenset[Node]]
) -> Graph | None:
    """Return the graph of some nodes; None where nobody needs what they make."""
    nodes = [node for node in graph.nodes if node in part]
    wanted = set(graph.outputs)
    for other in others:
        wanted |= read_by(other) - made_by(other)
    outputs = [name for node in nodes for _, name in node.outputs if name in wanted]
    outputs.sort(key=lambda name: (name not in graph.outputs, name))
    kept = leading_to(nodes, outputs)
    if not kept:
        return None
    return graph_of(graph.tensors, kept, outputs, graph.inputs)
