# SPDX-License-Identifier: Apache-2.0
"""Chooses which results of a graph to save, so that the others follow from these."""

import functools
from collections.abc import Collection, Iterator

from jax_cudnn.graph.kinds import kind_named
from jax_cudnn.graph.pointwise import PointwiseAttributes, copying
from jax_cudnn.graph.spec import Graph, Node, Tensor
from jax_cudnn.graph.walks import graph_of, made_by, read_by


@functools.lru_cache(maxsize=4096)
def saved_results(graph: Graph) -> tuple[tuple[str, ...], Graph | None]:
    """Return results to save, and the graph that makes the others from these.

    Its nodes are elementwise, its operands some of the graph's and saved results. None
    where all are saved. The activation of a matmul follows from the value before it, if
    both are results.
    """
    copies = dict(_copies(graph))
    place = {name: i for i, node in enumerate(graph.nodes) for name in made_by([node])}
    saved: list[str] = []
    nodes = set[Node]()
    for name in sorted(graph.outputs, key=lambda name: place[copies.get(name, name)]):
        known = {*graph.inputs, *saved}
        known |= {
            copies[each]
            for each in saved
            if each in copies and _holds(graph.tensor(each), graph.tensor(name))
        }
        leading = _elementwise(graph, name, known)
        if leading is None:
            saved.append(name)
        else:
            nodes |= leading
    names = tuple(name for name in graph.outputs if name in saved)
    return names, _rest(graph, names, nodes, copies)


def _copies(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield each result that is a tensor in another dtype, with that tensor."""
    for node in graph.nodes:
        attributes = node.attributes
        if (
            isinstance(attributes, PointwiseAttributes)
            and attributes.mode == "identity"
        ):
            ((_, source),), ((_, name),) = node.inputs, node.outputs
            if name in graph.outputs and source not in graph.inputs:
                yield name, source


_WIDE = ("f32", "f64")


def _holds(copy: Tensor, result: Tensor) -> bool:
    """Whether a copy has the digits that a result needs of what was copied."""
    return copy.dtype in (result.dtype, *_WIDE)


def _elementwise(graph: Graph, name: str, known: Collection[str]) -> set[Node] | None:
    """Return the nodes that make a tensor of known ones; None if others are needed."""
    needed = {name}
    found = set[Node]()
    for node in reversed(graph.nodes):
        if needed.isdisjoint(made_by([node])):
            continue
        row = kind_named(node.kind).row
        if not row.is_around or row.is_sum:
            return None
        found.add(node)
        needed |= read_by([node]).difference(known)
    return found


def _rest(
    graph: Graph, saved: tuple[str, ...], nodes: set[Node], copies: dict[str, str]
) -> Graph | None:
    """Return the graph of the results that are not saved."""
    outputs = tuple(name for name in graph.outputs if name not in saved)
    if not outputs:
        return None
    own = [node for node in graph.nodes if node in nodes]
    lacking = read_by(own) - made_by(own)
    # Of several copies of a tensor, the one that holds the most digits.
    wide_last = sorted(saved, key=lambda name: graph.tensor(name).dtype in _WIDE)
    sources = {copies[name]: name for name in wide_last if name in copies}
    restored = [
        copying(name, source) for source, name in sources.items() if source in lacking
    ]
    own = [*restored, *own]
    return graph_of(graph.tensors, own, outputs, (*graph.inputs, *saved))
