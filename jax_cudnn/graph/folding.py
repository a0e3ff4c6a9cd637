# SPDX-License-Identifier: Apache-2.0
"""Folding examples into the axes of a graph of contractions with nodes around them."""

import math
from collections.abc import Container, Mapping

from jax_cudnn.graph.kinds import FoldRule
from jax_cudnn.graph.rules import AROUND
from jax_cudnn.graph.spec import Graph


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
    together: Container[str] = (),
) -> FoldRule | None:
    """Fold the examples into one axis of each tensor, following the nodes.

    Tensors that meet in a node broadcast against each other along that axis, so those
    with examples have one size there before they fold. What the examples share stays
    as it is where it has 1, and where it meets nothing that has examples.

    Args:
        graph: the graph.
        batched: the inputs that have examples.
        axes: the axis of each tensor that may fold; the others are shared.
        together: kinds of nodes whose tensors do not broadcast along their axes: all
            have the examples, or none.

    Returns:
        The rule, or None where a tensor that is to have examples may not fold, where
        such tensors are to have two sizes, or where a sum would mix examples.
    """
    own = {name: graph.tensor(name).dims[axis] for name, axis in axes.items()}
    folded = _with_examples(graph, batched, own, together)
    if folded is None or folded.isdisjoint(graph.outputs):
        return None
    sizes = _common_sizes(graph, folded, own, together)
    if sizes is None:
        return None
    sums = frozenset(
        result
        for node in graph.nodes
        if node.kind == "reduction"
        for (_, source), (_, result) in zip(node.inputs, node.outputs, strict=True)
        if result in folded and own[source] != own[result]
    )
    if not all(_ends_at(graph, name) for name in sums):
        return None
    return FoldRule(axes={name: axes[name] for name in sizes}, sizes=sizes, sums=sums)


def _with_examples(
    graph: Graph,
    batched: frozenset[str],
    own: Mapping[str, int],
    together: Container[str],
) -> frozenset[str] | None:
    """Return the tensors that are to have examples; None where one may not.

    A node makes examples of examples. What it reads beside them, or makes for them, has
    them as well, unless it broadcasts: that goes back to the inputs, and on from there.
    """
    folded = set(batched)
    grown = True
    while grown:
        count = len(folded)
        for node in graph.nodes:
            inputs, outputs = (
                [n for _, n in pairs] for pairs in (node.inputs, node.outputs)
            )
            if folded.isdisjoint((*inputs, *outputs)):
                continue
            if node.kind in together:
                folded.update(inputs)
            folded.update(outputs)
            folded.update(name for name in inputs if own.get(name, 1) != 1)
            if folded.isdisjoint(inputs):
                # All have 1 there. With the largest, least is computed again.
                candidates = [name for name in inputs if name in own]
                if not candidates:
                    return None
                folded.add(
                    max(candidates, key=lambda n: math.prod(graph.tensor(n).dims))
                )
        grown = len(folded) != count
    return frozenset(folded) if folded <= own.keys() else None


def _common_sizes(
    graph: Graph,
    folded: frozenset[str],
    own: Mapping[str, int],
    together: Container[str],
) -> dict[str, int] | None:
    """Return the size of each tensor's axis before it folds: that of what it meets.

    None where that is not one size.
    """
    groups = {name: {name} for name in folded}
    for node in graph.nodes:
        if node.kind in together:
            continue
        names = [n for _, n in (*node.inputs, *node.outputs) if n in folded]
        joined = set[str]().union(*(groups[name] for name in names))
        groups |= dict.fromkeys(joined, joined)
    sizes: dict[str, int] = {}
    for name, group in groups.items():
        found = {own[each] for each in group} - {1} or {1}
        if len(found) > 1:
            return None
        (sizes[name],) = found
    # A contraction that does not broadcast has no more of anything than it has.
    fixed = {
        name
        for node in graph.nodes
        if node.kind in together
        for _, name in (*node.inputs, *node.outputs)
    }
    if any(sizes[name] != own[name] for name in fixed & folded):
        return None
    return sizes


def _ends_at(graph: Graph, name: str) -> bool:
    readers = [node for node in graph.nodes if name in dict(node.inputs).values()]
    return name in graph.outputs and not readers
