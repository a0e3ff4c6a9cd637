# SPDX-License-Identifier: Apache-2.0
"""Joins two graphs into one, where the second reads what the first computes."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from jax_cudnn.graph.spec import Graph

# Names of the first graph's tensors begin so, or so several times: the second may be
# joined of two already.
_PREFIX = "earlier_"


def joined(
    first: Graph, second: Graph, links: Mapping[str, str], kept: Collection[str]
) -> Graph:
    """Return one graph for both.

    ``links`` says of operands of the second which result of the first each one is:
    tensors of the same dtype, dims and order. Operands are those of the first, then the
    others of the second. Results are the ``kept`` ones of the first, by their names
    there, then those of the second.
    """
    taken = {t.name for t in second.tensors}
    prefix = _PREFIX
    while any(f"{prefix}{t.name}" in taken for t in first.tensors):
        prefix += _PREFIX
    names = {t.name: f"{prefix}{t.name}" for t in first.tensors}
    linked = {operand: names[result] for operand, result in links.items()}
    return Graph(
        tensors=(
            *(replace(t, name=names[t.name]) for t in first.tensors),
            *(t for t in second.tensors if t.name not in links),
        ),
        nodes=(
            *(node.renamed(names) for node in first.nodes),
            *(node.renamed(linked) for node in second.nodes),
        ),
        inputs=(
            *(names[name] for name in first.inputs),
            *(name for name in second.inputs if name not in links),
        ),
        outputs=(
            *(names[name] for name in first.outputs if name in kept),
            *second.outputs,
        ),
    )
