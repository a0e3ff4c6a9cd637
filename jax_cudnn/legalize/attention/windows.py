# SPDX-License-Identifier: Apache-2.0
"""Legalises a window of attention as cuDNN's band, or as part of the mask."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Node, SdpaAttributes, Target, Tensor
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.legalize.common.legalization import Legalization, Rule, given_more
from jax_cudnn.reference.interpreter import to_logical


def by_window(graph: Graph, target: Target | None, rule: Rule) -> Legalization:
    """Legalise a graph whose window is cuDNN's band, or else part of its mask."""
    graph = without_idle_window(graph)
    window = _attributes(graph).window
    if not window:
        return rule(graph, target)
    masked, with_mask = _window_as_mask(graph)
    folded = rule(masked, target)
    note = f"the window {list(window)} is part of the mask: cuDNN has no band for it"
    candidates = [
        replace(given_more(rewrite, with_mask), notes=(*rewrite.notes, note))
        for rewrite in folded.candidates
    ]
    if is_band(graph):
        candidates = [*rule(graph, target).candidates, *candidates]
    return replace(folded, candidates=tuple(candidates))


def _attributes(graph: Graph) -> SdpaAttributes:
    attributes = graph.nodes[0].attributes
    assert isinstance(attributes, SdpaAttributes)
    return attributes


def _roles(graph: Graph) -> dict[str, Tensor]:
    return roles_in(graph, graph.nodes[0])


def _with(graph: Graph, attributes: SdpaAttributes) -> Graph:
    return replace(graph, nodes=(replace(graph.nodes[0], attributes=attributes),))


def without_idle_window(graph: Graph) -> Graph:
    """Take away a window that hides no key beside what causality hides."""
    attributes, roles = _attributes(graph), _roles(graph)
    s, t = roles["query"].dims[2], roles["key"].dims[2]
    if not attributes.window:
        return graph
    left, right = attributes.window
    if left >= s - 1 and (right >= t - 1 or (attributes.is_causal and right >= 0)):
        return _with(graph, replace(attributes, window=()))
    return graph


def is_band(graph: Graph) -> bool:
    """Whether cuDNN's band means the same, and every query sees a key in it.

    Beside a mask or lengths, a query may see none.
    """
    roles = _roles(graph)
    if {"mask", "query_lengths", "key_lengths"}.intersection(roles):
        return False
    left, right = _attributes(graph).window
    s, t = roles["query"].dims[2], roles["key"].dims[2]
    return left >= 0 and right >= 0 and s - left <= t


def _window_as_mask(
    graph: Graph,
) -> tuple[Graph, Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Return a graph whose mask holds the window too, and how to make its operands."""
    attributes, roles = _attributes(graph), _roles(graph)
    (node,) = graph.nodes
    s, t = roles["query"].dims[2], roles["key"].dims[2]
    old = roles.get("mask")
    name = "mask" if old is None else old.name
    leading = (1, 1) if old is None else old.dims[:2]
    tensor = Tensor(name=name, dtype="bool", dims=(*leading, s, t), order=(0, 1, 2, 3))
    inputs = graph.inputs if old is not None else (*graph.inputs, name)
    masked = Graph(
        tensors=(*(each for each in graph.tensors if each.name != name), tensor),
        nodes=(
            Node.make(
                node.kind,
                {**dict(node.inputs), "mask": name},
                dict(node.outputs),
                replace(attributes, window=()),
            ),
        ),
        inputs=inputs,
        outputs=graph.outputs,
    )
    left, right = (max(-s - t, min(x, s + t)) for x in attributes.window)

    def with_mask(operands: Sequence[jax.Array]) -> list[jax.Array]:
        given = dict(zip(graph.inputs, operands, strict=True))
        rows = jnp.arange(s, dtype=jnp.int32)[:, None]
        columns = jnp.arange(t, dtype=jnp.int32)[None, :]
        is_seen = (rows <= columns + left) & (rows >= columns - right)
        if old is not None:
            is_seen = is_seen[None, None] & to_logical(old, given[name])
        given[name] = jnp.broadcast_to(is_seen, tensor.dims)
        return [given[each] for each in inputs]

    return masked, with_mask
