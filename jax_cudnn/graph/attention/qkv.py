# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of attention in one array: the operand ``qkv``.

A projection makes all three at once. The array ``qkv`` has p parts, the first g of them
queries, then as many keys as values. Its gradient is one array as well. All else is
that of attention over the parts, whose node is meant: `with_parts` returns it.

Either there are three parts of k heads each, as in (b, s, 3, h, d), or parts of one
head each, as in (b, s, h + 2k, d) for h query and k key heads. Only then do the heads
of queries, keys and values each have one stride.
"""

from dataclasses import replace
from typing import NamedTuple

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.attention.score_mod import OPERANDS
from jax_cudnn.graph.kinds import Roles, roles_in
from jax_cudnn.graph.spec import Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import single_node_graph

# The axes of qkv.
PARTS, HEADS = 1, 2


class Part(NamedTuple):
    """The parts of qkv that a role has, and the axis of qkv that it lacks."""

    first: int
    size: int
    dropped: int


def parts_of(dims: tuple[int, ...], query_heads: int) -> dict[str, Part]:
    """Return the parts that are query, key and value of a qkv with these dims."""
    parts, heads = dims[PARTS], dims[HEADS]
    queries = query_heads // max(heads, 1)
    keys = (parts - queries) // 2
    dropped = PARTS if parts == 3 else HEADS
    return {
        "query": Part(0, queries, dropped),
        "key": Part(queries, keys, dropped),
        "value": Part(queries + keys, keys, dropped),
    }


def part_tensor(qkv: Tensor, role: str, part: Part) -> Tensor:
    """Return the tensor of a part as an array of its own, its axes stored alike."""
    dims = list(qkv.dims)
    dims[PARTS] = part.size
    del dims[part.dropped]
    order = tuple(
        axis - (axis > part.dropped) for axis in qkv.order if axis != part.dropped
    )
    return Tensor(name=role, dtype=qkv.dtype, dims=tuple(dims), order=order)


def with_parts(graph: Graph) -> Graph:
    """Return the graph with query, key and value as operands of their own.

    They take the place of qkv, and their gradients that of its gradient. Tensors are
    named by their roles.
    """
    (node,) = graph.nodes
    roles = roles_in(graph, node)
    role_of = {name: role for role, name in (*node.inputs, *node.outputs)}

    def divided(names: tuple[str, ...]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for role in map(role_of.__getitem__, names):
            if role.removeprefix("grad_") != "qkv":
                found[role] = replace(roles[role], name=role)
                continue
            prefix = role.removesuffix("qkv")
            parts = parts_of(roles[role].dims, roles["output"].dims[1])
            for name, part in parts.items():
                own = prefix + name
                found[own] = part_tensor(roles[role], own, part)
        return found

    return single_node_graph(
        node.kind, divided(graph.inputs), divided(graph.outputs), node.attributes
    )


def check_parts(roles: Roles) -> None:
    """Raise GraphError unless qkv has parts that are queries, keys and values."""
    _, parts, heads, length, _ = roles["qkv"].dims
    queries = roles["output"].dims[1] // max(heads, 1)
    keys = (parts - queries) // 2
    if keys < 1 or queries < 1 or queries + 2 * keys != parts or queries % keys:
        raise GraphError(
            f"sdpa: {parts} parts are not {queries} for queries and as many for "
            "keys as for values"
        )
    if heads != 1 and parts != 3:
        raise GraphError(
            f"sdpa: {parts} parts of {heads} heads; there are 3 parts, or parts of "
            "one head"
        )
    # A letter of their own, as no tensor is divided twice by one.
    for role in ("bias", "mask", *OPERANDS):
        if role in roles and roles[role].dims[3] not in (1, length):
            raise GraphError(
                f"sdpa: {role} is for {roles[role].dims[3]} keys, but there are "
                f"{length}"
            )
