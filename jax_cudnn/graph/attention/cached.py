# SPDX-License-Identifier: Apache-2.0
"""The attention node for serving: keys and values are in a cache, filled to lengths.

Its tensors are described in node_kinds.json. Each sequence has its own part of the
cache. With a ``page_table`` it has pages of i tokens: token j of sequence b is token
``j % i`` of page ``page_table[b, j // i]``.

Sequence b has ``key_lengths[b]`` tokens, the last ``query_lengths[b]`` of which are its
queries: the position of query s is ``key_lengths - query_lengths + s``. What lies past
a length means nothing, and may be NaN. A key length may exceed the cache's room: then
the last tokens are in no cache, and a query that sees one of them gives NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax_cudnn.graph.attention.sdpa import AttentionAttributes, SdpaAttributes
from jax_cudnn.graph.description import describe
from jax_cudnn.graph.kinds import NodeKind, register_kind
from jax_cudnn.graph.shapes import result_like
from jax_cudnn.graph.spec import Graph, Tensor
from jax_cudnn.graph.transforms.gradient_kernel import single_node_graph


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedAttributes(AttentionAttributes):
    """Static configuration of attention over a cache, whose tokens have positions."""

    def without_band(self) -> SdpaAttributes:
        """Return the attributes of attention in which a query sees all keys."""
        without = replace(self, is_causal=False, window=())
        return SdpaAttributes(**without.common())


def sdpa_cached_graph(
    inputs: Mapping[str, Tensor],
    *,
    attributes: CachedAttributes,
    output_order: tuple[int, ...] = (0, 1, 2, 3),
    with_stats: bool = False,
) -> Graph:
    """Build the one-node graph; tensors are named by their roles.

    ``inputs`` maps roles to tensors of the same name, in operand order.
    """
    row = SDPA_CACHED.row
    roles = ("output", "stats") if with_stats else ("output",)
    outputs = {role: result_like(row, role, inputs, attributes) for role in roles}
    outputs["output"] = replace(outputs["output"], order=output_order)
    return single_node_graph(row.name, inputs, outputs, attributes)


def room(roles: Mapping[str, Tensor]) -> int:
    """Return how many tokens of a sequence a cache holds, given a node's tensors."""
    size = roles["key"].dims[2]
    return size * roles["page_table"].dims[2] if "page_table" in roles else size


SDPA_CACHED = register_kind(
    NodeKind(row=describe("sdpa_cached"), attributes=CachedAttributes)
)
