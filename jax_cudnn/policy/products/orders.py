# SPDX-License-Identifier: Apache-2.0
"""Puts the ways of writing a convolution or a grouped product in order."""

from collections.abc import Sequence
from typing import get_args

from jax_cudnn.graph import Graph
from jax_cudnn.graph.products.conv import TRIPLES
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import Rewrite
from jax_cudnn.legalize.products import conv_channels, conv_depthwise, conv_groups
from jax_cudnn.legalize.products.fusion import ALONE
from jax_cudnn.legalize.products.matmul import ALONG_SUM
from jax_cudnn.policy.products.properties import (
    Convolution,
    CopiedForF8,
    Depthwise,
    GroupedProduct,
    contraction_in,
)
from jax_cudnn.policy.tables import Tables


def in_order(part: Graph, ways: Sequence[Rewrite], tables: Tables) -> list[Rewrite]:
    """Return the ways to run a part in their order, without those not worth trying.

    Ways of a part that no table puts in order stay as they are.
    """
    if part.nodes and part.nodes[0].kind.startswith("grouped_matmul"):
        names = tables.order("grouped products", GroupedProduct(part))
        named = (way for way in ways if way.names[-1] in names)
        return sorted(named, key=lambda way: names.index(way.names[-1]))
    if not ways or any(way.core is None for way in ways):
        return list(ways)
    problem = ways[0].problem or part
    if any(ALONG_SUM in way.names for way in ways):
        copied = next(way.core for way in ways if ALONG_SUM in way.names)
        first, _ = tables.order("f8 products", CopiedForF8(copied or problem))
        is_copied_first = first == ALONG_SUM
        return sorted(ways, key=lambda x: (ALONG_SUM in x.names) != is_copied_first)
    if contraction_in(problem).kind not in TRIPLES:
        return list(ways)
    cores = dict.fromkeys(way.core for way in ways if way.core is not None)
    found: dict[tuple[Graph | None, Graph], Rewrite] = {}
    for around in tables.order("around convolutions", Convolution(problem)):
        for core in cores:
            alike = [way for way in ways if way.core == core]
            for name in order_of(core, alike, tables):
                for way in alike:
                    is_placed_so = (ALONE in way.names) == (around == ALONE)
                    if way.names[0] == name and is_placed_so:
                        # Two ways may come to the same.
                        found.setdefault((core, way.graph), way)
    return list(found.values())


def order_of(core: Graph, ways: Sequence[Rewrite], tables: Tables) -> tuple[str, ...]:
    """Return the order of the ways to write a convolution, by their names."""
    convolution = Convolution(core)
    if convolution.is_depthwise:
        return tables.order("depthwise", depthwise_of(ways[-1], ways, is_first=False))
    of = "groups" if convolution.groups > 1 else "convolutions"
    return tables.order(of, convolution)


def depthwise_of(way: Rewrite, ways: Sequence[Rewrite], *, is_first: bool) -> Depthwise:
    """Return the properties of a way to write a depthwise convolution, one of all."""
    own = (each for each in ways if each.names[0] == conv_depthwise.OWN)
    has_own = any(map(conv_depthwise.has_engine, own))
    return Depthwise(way, has_own_engine=has_own, is_first=is_first)


def first_way(core: Graph, tables: Tables) -> str:
    """Return the first way to write a convolution that is not in groups."""
    return tables.order("convolutions", Convolution(core))[0]


def is_first_with_more(core: Graph, tables: Tables) -> bool:
    """Whether x is first written with more channels, for this convolution."""
    return first_way(core, tables) in get_args(conv_channels.ChannelRewrite)


def becomes_of_groups(core: Graph, tables: Tables) -> str:
    """Return what becomes of groups in the first way that there is for a convolution.

    With something around it that no way has, a convolution is passed alone, as it is.
    """
    names = tables.order("groups", Convolution(core))
    ways = {way.name: way for way in conv_groups.ways(GraphEditor.of(core))}
    for name in names:
        editor = GraphEditor.of(core)
        if name in ways and ways[name].change(editor):
            groups, _, _ = conv_groups.channels_of(editor)
            return conv_groups.ONE_GROUP if groups == 1 else _BECOMES.get(name, name)
    return conv_groups.AS_IT_IS


_BECOMES = {
    conv_groups.FLIPPED: conv_groups.AS_IT_IS,
    conv_groups.FILLED: conv_groups.MERGED,
}
