# SPDX-License-Identifier: Apache-2.0
"""Puts the ways of writing a convolution or a grouped product in order."""

from collections.abc import Sequence

from jax_cudnn.graph import Graph
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import Legal
from jax_cudnn.legalize.products import conv_depthwise, conv_groups
from jax_cudnn.legalize.products.fusion import ALONE
from jax_cudnn.policy.products.properties import (
    Convolution,
    Depthwise,
    GroupedProduct,
    contraction_in,
)
from jax_cudnn.policy.tables import Tables

_CONVOLUTIONS = ("conv_dgrad", "conv_fprop", "conv_wgrad")
# How x is written with more channels (conv_channels.py).
_MORE = ("patches", "windows", "rows")


def in_order(part: Graph, ways: Sequence[Legal], tables: Tables) -> list[Legal]:
    """Return the ways to run a part in their order, without those not worth trying.

    Ways of a part that no table puts in order stay as they are.
    """
    if part.nodes and part.nodes[0].kind.startswith("grouped_matmul"):
        names = tables.order("grouped products", GroupedProduct(part))
        return sorted(ways, key=lambda way: names.index(way.names[-1]))
    if any(way.core is None for way in ways):
        return list(ways)
    cores = list(dict.fromkeys(way.core for way in ways))
    places: list[tuple[tuple[int, int, int], Legal]] = []
    for way in ways:
        if (place := _place(way, ways, tables)) is not None:
            places.append(((place[0], cores.index(way.core), place[1]), way))
    found: dict[tuple[Graph | None, Graph], Legal] = {}
    for _, way in sorted(places, key=lambda each: each[0]):
        # Two ways may come to the same.
        found.setdefault((way.core, way.graph), way)
    return list(found.values())


def _place(way: Legal, ways: Sequence[Legal], tables: Tables) -> tuple[int, int] | None:
    """Return a way's place among all and among those of its core, None without one."""
    assert way.problem is not None
    assert way.core is not None
    if contraction_in(way.problem).kind not in _CONVOLUTIONS:
        return 0, 0
    around = tables.order("around convolutions", Convolution(way.problem))
    names = order_of(way.core, [each for each in ways if each.core == way.core], tables)
    name = way.names[0]
    if name not in names:
        return None
    return around.index("alone" if ALONE in way.names else "fused"), names.index(name)


def order_of(core: Graph, ways: Sequence[Legal], tables: Tables) -> tuple[str, ...]:
    """Return the order of the ways to write a convolution, by their names."""
    convolution = Convolution(core)
    if convolution.is_depthwise:
        return tables.order("depthwise", depthwise_of(ways[-1], ways, is_first=False))
    of = "groups" if convolution.groups > 1 else "convolutions"
    return tables.order(of, convolution)


def depthwise_of(way: Legal, ways: Sequence[Legal], *, is_first: bool) -> Depthwise:
    """Return the properties of a way to write a depthwise convolution, one of all."""
    own = [
        each
        for each in ways
        if each.core == way.core and each.names[0] == conv_depthwise.OWN
    ]
    has_own = any(map(conv_depthwise.has_engine, own))
    return Depthwise(way, has_own_engine=has_own, is_first=is_first)


def first_way(core: Graph, tables: Tables) -> str:
    """Return the first way to write a convolution that is not in groups."""
    return tables.order("convolutions", Convolution(core))[0]


def is_first_with_more(core: Graph, tables: Tables) -> bool:
    """Whether x is first written with more channels, for this convolution."""
    return first_way(core, tables) in _MORE


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
