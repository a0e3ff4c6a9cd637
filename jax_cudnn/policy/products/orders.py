# SPDX-License-Identifier: Apache-2.0
"""Puts the rewrites of a convolution or a grouped product in order."""

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


def in_order(part: Graph, rewrites: Sequence[Rewrite], tables: Tables) -> list[Rewrite]:
    """Return the rewrites of a part in order, without those not worth trying.

    Rewrites that no table puts in order stay as they are.
    """
    if part.nodes and part.nodes[0].kind.startswith("grouped_matmul"):
        names = tables.order("grouped products", GroupedProduct(part))
        named = (rewrite for rewrite in rewrites if rewrite.names[-1] in names)
        return sorted(named, key=lambda rewrite: names.index(rewrite.names[-1]))
    if not rewrites or any(rewrite.core is None for rewrite in rewrites):
        return list(rewrites)
    problem = rewrites[0].problem or part
    if any(ALONG_SUM in rewrite.names for rewrite in rewrites):
        copied = next(
            rewrite.core for rewrite in rewrites if ALONG_SUM in rewrite.names
        )
        first, _ = tables.order("f8 products", CopiedForF8(copied or problem))
        is_copied_first = first == ALONG_SUM
        return sorted(rewrites, key=lambda x: (ALONG_SUM in x.names) != is_copied_first)
    if contraction_in(problem).kind not in TRIPLES:
        return list(rewrites)
    cores = dict.fromkeys(
        rewrite.core for rewrite in rewrites if rewrite.core is not None
    )
    found: dict[tuple[Graph | None, Graph], Rewrite] = {}
    for around in tables.order("around convolutions", Convolution(problem)):
        for core in cores:
            alike = [rewrite for rewrite in rewrites if rewrite.core == core]
            for name in order_of(core, alike, tables):
                for rewrite in alike:
                    is_placed_so = (ALONE in rewrite.names) == (around == ALONE)
                    if rewrite.names[0] == name and is_placed_so:
                        # Two rewrites may come to the same.
                        found.setdefault((core, rewrite.graph), rewrite)
    return list(found.values())


def order_of(
    core: Graph, rewrites: Sequence[Rewrite], tables: Tables
) -> tuple[str, ...]:
    """Return the order of the rewrites of a convolution, by their names."""
    convolution = Convolution(core)
    if convolution.is_depthwise:
        return tables.order(
            "depthwise", depthwise_of(rewrites[-1], rewrites, is_first=False)
        )
    of = "groups" if convolution.groups > 1 else "convolutions"
    return tables.order(of, convolution)


def depthwise_of(
    rewrite: Rewrite, rewrites: Sequence[Rewrite], *, is_first: bool
) -> Depthwise:
    """Return the properties of a rewrite of a depthwise convolution, one of all."""
    own = (each for each in rewrites if each.names[0] == conv_depthwise.OWN)
    has_own = any(map(conv_depthwise.has_engine, own))
    return Depthwise(rewrite, has_own_engine=has_own, is_first=is_first)


def first_rewrite(core: Graph, tables: Tables) -> str:
    """Return the first rewrite of a convolution that is not in groups."""
    return tables.order("convolutions", Convolution(core))[0]


def is_first_with_more(core: Graph, tables: Tables) -> bool:
    """Whether x is first written with more channels, for this convolution."""
    return first_rewrite(core, tables) in get_args(conv_channels.ChannelRewrite)


def becomes_of_groups(core: Graph, tables: Tables) -> str:
    """Return what the first rewrite of a convolution makes of its groups.

    A convolution with something around it that no rewrite takes is passed alone.
    """
    names = tables.order("groups", Convolution(core))
    rewrites = {
        rewrite.name: rewrite
        for rewrite in conv_groups.group_rewrites(GraphEditor.of(core))
    }
    for name in names:
        editor = GraphEditor.of(core)
        if name in rewrites and rewrites[name].change(editor):
            groups, _, _ = conv_groups.channels_of(editor)
            return conv_groups.ONE_GROUP if groups == 1 else _BECOMES.get(name, name)
    return conv_groups.AS_IT_IS


_BECOMES = {
    conv_groups.FLIPPED: conv_groups.AS_IT_IS,
    conv_groups.FILLED: conv_groups.MERGED,
}
