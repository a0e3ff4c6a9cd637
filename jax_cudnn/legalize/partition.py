# SPDX-License-Identifier: Apache-2.0
"""Splits a graph into parts, each for one kernel: contractions and what surrounds them.

A contraction takes along what follows from it alone and is no larger than its result
(its epilogue), and a matmul the conversion of an 8-bit operand (its prologue). What is
left, elementwise work and sums over the operands, is for XLA, which fuses it with what
the program does around the call. So the gradient of a fused convolution is: the
cotangent through the activation and the sums for the bias in XLA, then dgrad and
wgrad, one cuDNN kernel each.
"""

from jax_cudnn.graph import Graph, Node, is_anchor
from jax_cudnn.graph.rules import EIGHT_BIT, broadcasts_to

is_contraction = is_anchor


def partition(graph: Graph) -> tuple[Graph, ...]:
    """Return the parts in the order in which they run.

    Tensors keep their names: an operand of a part is one of the graph's or a result
    of an earlier part. A part without a contraction is for XLA.
    """
    contractions = [i for i, node in enumerate(graph.nodes) if is_contraction(node)]
    makers = {name: i for i, n in enumerate(graph.nodes) for _, name in n.outputs}
    inputs = [
        [makers[name] for _, name in node.inputs if name in makers]
        for node in graph.nodes
    ]
    # The contractions that each node follows from, itself included.
    follows: list[frozenset[int]] = []
    for i in range(len(graph.nodes)):
        above = (follows[j] for j in inputs[i])
        follows.append(frozenset({i} & set(contractions)).union(*above))
    converted = _conversions(graph, inputs)
    parts = [[i for i in range(len(graph.nodes)) if not follows[i]]]
    for contraction in contractions:
        own = [i for i in range(len(graph.nodes)) if follows[i] == {contraction}]
        if follows[contraction] == {contraction}:
            larger = _larger(graph, contraction, own)
            own = [i for i in own if i not in larger]
            taken = converted
            if graph.nodes[contraction].kind != "matmul":
                taken = frozenset(i for i in converted if not graph.nodes[i].inputs)
            parts.append(sorted({*own, *_needed(own, inputs, taken)}))
            parts.append(sorted({*larger, *_needed(larger, inputs, converted)}))
        else:
            # Reads what another contraction made: its own kernel, nothing fused.
            parts.append([contraction])
    rest = [
        i
        for i in range(len(graph.nodes))
        if len(follows[i]) > 1 and i not in contractions
    ]
    parts.append(rest)
    chosen = [frozenset(part) for part in parts if part]
    graphs = [
        _subgraph(graph, part, [other for other in chosen if other is not part])
        for part in chosen
    ]
    return tuple(part for part in graphs if part is not None)


def _larger(graph: Graph, contraction: int, nodes: list[int]) -> list[int]:
    """Return those of the nodes that make more of the contraction's result.

    It broadcasts there, and is computed once: an epilogue is no larger than its kernel.
    """
    _, result = graph.nodes[contraction].outputs[0]
    full = graph.tensor(result).dims
    found: list[int] = []
    made: set[str] = set()
    for i in nodes:
        node = graph.nodes[i]
        outputs = [name for _, name in node.outputs]
        fits = all(broadcasts_to(graph.tensor(name).dims, full) for name in outputs)
        is_after = not made.isdisjoint(name for _, name in node.inputs)
        if i != contraction and (is_after or not fits):
            found.append(i)
            made.update(outputs)
    return found


def _conversions(graph: Graph, inputs: list[list[int]]) -> frozenset[int]:
    """Return the nodes that only convert 8-bit operands, and constants."""
    found: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if is_contraction(node) or node.kind == "reduction":
            continue
        operands = [graph.tensor(n) for _, n in node.inputs if n in graph.inputs]
        is_narrow = any(t.dtype in EIGHT_BIT for t in operands)
        follows_narrow = any(j in found and graph.nodes[j].inputs for j in inputs[i])
        is_constant = node.kind == "constant"
        if is_constant or (
            (is_narrow or follows_narrow) and all(j in found for j in inputs[i])
        ):
            found.add(i)
    return frozenset(found)


def _needed(
    nodes: list[int], inputs: list[list[int]], converted: frozenset[int]
) -> set[int]:
    """Return the conversions that the nodes read, directly or through others."""
    found: set[int] = set()
    queue = list(nodes)
    while queue:
        for j in inputs[queue.pop()]:
            if j in converted and j not in found:
                found.add(j)
                queue.append(j)
    return found


def _subgraph(
    graph: Graph, part: frozenset[int], others: list[frozenset[int]]
) -> Graph | None:
    """Return the graph of some nodes; None where nobody needs what they make."""
    nodes = [graph.nodes[i] for i in sorted(part)]
    made = {name for node in nodes for _, name in node.outputs}
    wanted = set(graph.outputs)
    for other in others:
        inside = {name for i in other for _, name in graph.nodes[i].outputs}
        for i in other:
            wanted.update(n for _, n in graph.nodes[i].inputs if n not in inside)
    outputs = [name for node in nodes for _, name in node.outputs if name in wanted]
    outputs.sort(key=lambda name: (name not in graph.outputs, name))
    kept: list[Node] = []
    needed = set(outputs)
    for node in reversed(nodes):
        if needed.intersection(name for _, name in node.outputs):
            kept.insert(0, node)
            needed.update(name for _, name in node.inputs)
    if not kept:
        return None
    read = {name for node in kept for _, name in node.inputs} - made
    tensors = {t.name: t for t in graph.tensors}
    inputs = [name for name in graph.inputs if name in read]
    inputs += sorted(read.difference(graph.inputs))
    kept_names = {*inputs, *(name for node in kept for _, name in node.outputs)}
    return Graph(
        tensors=tuple(tensors[name] for name in tensors if name in kept_names),
        nodes=tuple(kept),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )
