# SPDX-License-Identifier: Apache-2.0
"""Legalises a window of attention as cuDNN's band, or as part of the mask."""

from dataclasses import replace

import jax.numpy as jnp

from jax_cudnn.graph import Graph, SdpaAttributes, Target, Tensor
from jax_cudnn.graph.kinds import roles_in
from jax_cudnn.legalize.attention.operands import (
    attributes_in,
    by_other_operands,
    operands_in,
)
from jax_cudnn.legalize.common.editor import Env
from jax_cudnn.legalize.common.legalization import Legalization, Rule
from jax_cudnn.reference.interpreter import to_logical


def by_window(graph: Graph, target: Target | None, rule: Rule) -> Legalization:
    """Legalise a graph whose window is cuDNN's band, or else part of its mask."""
    graph = without_idle_window(graph)
    if not attributes_in(graph).window:
        return rule(graph, target)
    by_mask = _as_mask(graph, target, rule)
    if not is_band(graph):
        return by_mask
    rewrites = (*rule(graph, target).candidates, *by_mask.candidates)
    return replace(by_mask, candidates=rewrites)


def _roles(graph: Graph) -> dict[str, Tensor]:
    return roles_in(graph, graph.nodes[0])


def _with(graph: Graph, attributes: SdpaAttributes) -> Graph:
    return replace(graph, nodes=(replace(graph.nodes[0], attributes=attributes),))


def without_idle_window(graph: Graph) -> Graph:
    """Take away a window that hides no key beside what causality hides."""
    attributes, roles = attributes_in(graph), _roles(graph)
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
    left, right = attributes_in(graph).window
    s, t = roles["query"].dims[2], roles["key"].dims[2]
    return left >= 0 and right >= 0 and s - left <= t


def _as_mask(graph: Graph, target: Target | None, rule: Rule) -> Legalization:
    """Legalise a graph as one whose mask holds the window too."""
    attributes, roles = attributes_in(graph), _roles(graph)
    s, t = roles["query"].dims[2], roles["key"].dims[2]
    old = roles.get("mask")
    leading = (1, 1) if old is None else old.dims[:2]
    mask = Tensor(name="mask", dtype="bool", dims=(*leading, s, t), order=(0, 1, 2, 3))
    left, right = (max(-s - t, min(x, s + t)) for x in attributes.window)

    def made(env: Env) -> Env:
        rows = jnp.arange(s, dtype=jnp.int32)[:, None]
        columns = jnp.arange(t, dtype=jnp.int32)[None, :]
        is_seen = (rows <= columns + left) & (rows >= columns - right)
        if old is not None:
            is_seen = is_seen[None, None] & to_logical(old, env["mask"])
        return {**env, "mask": jnp.broadcast_to(is_seen, mask.dims)}

    return by_other_operands(
        graph,
        target,
        rule,
        tensors={**operands_in(graph), "mask": mask},
        attributes=replace(attributes, window=()),
        made=made,
        note=f"the window {list(attributes.window)} is part of the mask: cuDNN has no "
        "band for it",
    )
