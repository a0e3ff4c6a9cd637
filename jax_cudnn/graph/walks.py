# SPDX-License-Identifier: Apache-2.0
"""Walks over nodes: what leads to a tensor, what follows from it, and who reads it.

The nodes are a graph's, or some of them, in the order in which they run.
"""

from collections.abc import Collection, Iterable, Sequence

from jax_cudnn.graph.spec import Graph, Node, Tensor


def made_by(nodes: Iterable[Node]) -> set[str]:
    """Return the tensors that the nodes make."""
    return {name for node in nodes for _, name in node.outputs}


def read_by(nodes: Iterable[Node]) -> set[str]:
    """Return the tensors that the nodes read."""
    return {name for node in nodes for _, name in node.inputs}


def readers(nodes: Iterable[Node], name: str) -> list[Node]:
    """Return the nodes that read a tensor."""
    return [node for node in nodes if any(name == each for _, each in node.inputs)]


def leading_to(nodes: Sequence[Node], names: Iterable[str]) -> list[Node]:
    """Return the nodes that tensors follow from, in their order."""
    needed = set(names)
    found: list[Node] = []
    for node in reversed(nodes):
        if needed.intersection(name for _, name in node.outputs):
            found.append(node)
            needed.update(name for _, name in node.inputs)
    return found[::-1]


def sources(nodes: Sequence[Node], names: Iterable[str]) -> set[str]:
    """Return the tensors that lead to some, those included."""
    names = set(names)
    return names | read_by(leading_to(nodes, names))


def following(nodes: Iterable[Node], names: Iterable[str]) -> set[str]:
    """Return the tensors that follow from some, those included."""
    found = set(names)
    for node in nodes:
        if found.intersection(name for _, name in node.inputs):
            found.update(name for _, name in node.outputs)
    return found


def origins(
    nodes: Iterable[Node], among: Collection[Node]
) -> dict[Node, frozenset[Node]]:
    """Return for each node which of some it follows from, itself included."""
    of_tensor: dict[str, frozenset[Node]] = {}
    found: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        own = frozenset({node} if node in among else ())
        above = (of_tensor.get(name, frozenset()) for _, name in node.inputs)
        found[node] = own.union(*above)
        of_tensor |= dict.fromkeys((name for _, name in node.outputs), found[node])
    return found


def graph_of(
    tensors: Iterable[Tensor],
    nodes: Sequence[Node],
    outputs: Iterable[str],
    order: Iterable[str] = (),
) -> Graph:
    """Return the graph of some nodes; its operands are what they read and do not make.

    They are in the given order, and those that it lacks are sorted by name.
    """
    made, read = made_by(nodes), read_by(nodes)
    operands = read - made
    first = [name for name in order if name in operands]
    return Graph(
        tensors=tuple(tensor for tensor in tensors if tensor.name in made | read),
        nodes=tuple(nodes),
        inputs=(*first, *sorted(operands.difference(first))),
        outputs=tuple(outputs),
    )
