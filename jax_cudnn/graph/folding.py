# SPDX-License-Identifier: Apache-2.0
"""Folding examples into the axes of a graph of contractions with nodes around them."""

from collections.abc import Mapping

from jax_cudnn.graph.kinds import FoldRule
from jax_cudnn.graph.rules import AROUND
from jax_cudnn.graph.spec import Graph, Node


def families(graph: Graph, roles: Mapping[str, str]) -> dict[str, str]:
    """Say for each tensor which family it belongs to: that of the role it leads to.

    ``roles`` maps the contraction's roles to families; pointwise nodes and reductions
    join what they connect. Constants belong to none.
    """
    groups = {t.name: {t.name} for t in graph.tensors}
    constants = {
        name
        for node in graph.nodes
        if node.kind == "constant"
        for _, name in node.outputs
    }
    for node in graph.nodes:
        if node.kind in AROUND:
            names = [n for _, n in (*node.inputs, *node.outputs) if n not in constants]
            joined = set[str]().union(*(groups[name] for name in names))
            for name in joined:
                groups[name] = joined
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.kind in AROUND:
            continue
        for role, name in (*node.inputs, *node.outputs):
            found |= dict.fromkeys(groups[name], roles[role])
    return found


def propagate(
    graph: Graph,
    batched: frozenset[str],
    axes: Mapping[str, int],
    whole: frozenset[str] = frozenset(),
) -> FoldRule | None:
    """Fold the examples into one axis of each tensor, following the nodes.

    Args:
        graph: the graph.
        batched: the inputs that have examples.
        axes: the axis of each tensor that may fold; the others are shared.
        whole: the contraction's operands that have to have the examples, even if all
            examples share them.

    Returns:
        The rule, or None where an input that has examples may not fold, or a sum would
        mix examples.
    """
    full = _full_sizes(graph, axes)
    sizes: dict[str, int] = {}
    for name in graph.inputs:
        if name not in axes:
            if name in batched:
                return None
            continue
        size = graph.tensor(name).dims[axes[name]]
        if name in batched or name in whole:
            sizes[name] = full[name]
        elif size != 1:
            # Shared, but as long as the axis that folds: each example needs it.
            sizes[name] = size
    sums: set[str] = set()
    for node in graph.nodes:
        if not any(name in sizes for _, name in node.inputs):
            continue
        for _, name in node.outputs:
            if name not in axes:
                return None
            sizes[name] = full[name]
            if _sums_examples(graph, node, axes):
                if not _ends_at(graph, name):
                    return None
                sizes[name] = graph.tensor(dict(node.inputs)["input"]).dims[axes[name]]
                sums.add(name)
    if not any(name in sizes for name in graph.outputs):
        return None
    return FoldRule(
        axes={name: axes[name] for name in sizes}, sizes=sizes, sums=frozenset(sums)
    )


def _full_sizes(graph: Graph, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the size that the folding axis of each tensor has before it folds.

    That of what it meets in pointwise nodes, if its own is 1.
    """
    sizes = {name: graph.tensor(name).dims[axis] for name, axis in axes.items()}
    for _ in graph.nodes:
        for node in graph.nodes:
            if node.kind == "pointwise":
                names = [n for _, n in (*node.inputs, *node.outputs) if n in sizes]
                full = next((sizes[name] for name in names if sizes[name] != 1), 1)
                sizes |= dict.fromkeys(names, full)
    return sizes


def _sums_examples(graph: Graph, node: Node, axes: Mapping[str, int]) -> bool:
    if node.kind != "reduction":
        return False
    source, result = dict(node.inputs)["input"], dict(node.outputs)["output"]
    axis = axes[result]
    return graph.tensor(source).dims[axis] != graph.tensor(result).dims[axis]


def _ends_at(graph: Graph, name: str) -> bool:
    readers = [node for node in graph.nodes if name in dict(node.inputs).values()]
    return name in graph.outputs and not readers
