# SPDX-License-Identifier: Apache-2.0
"""Writes the rule by which XLA propagates shardings through a kernel's graph."""

from collections.abc import Sequence

from jax_cudnn.graph import Factors, Graph, factors_of
from jax_cudnn.lowering.sharding.subaxes import Shape, all_subaxes


def factors_at(graph: Graph, shapes: tuple[Shape, ...]) -> Factors:
    """Return a kernel's factors, given the shapes of its operands' arrays."""
    subaxes = all_subaxes(graph, shapes)
    return factors_of(graph, tuple(sorted(subaxes.items())))


def sharding_rule(graph: Graph, shapes: tuple[Shape, ...], *, may_sum: bool) -> str:
    """Return the rule by which Shardy propagates shardings through a kernel's graph.

    See https://openxla.org/shardy/sdy_dialect (OpShardingRuleAttr).
    """
    # For (2, 7, 24) @ (24, 5), as arrays (1, 2, 7, 24) and (1, 24, 5), the rule has
    #   ([i, j, k, l], [m, l, n])->([o, j, k, n])
    #   {i=1, j=2, k=7, l=24, m=1, n=5, o=1} reduction={l}
    # Each axis of size 1 has a letter of its own.
    factors = factors_at(graph, shapes)
    names: dict[int, str] = {}
    sizes = list[str]()

    def name_of(factor: int) -> str:
        names[factor] = names.get(factor) or letter_of(len(sizes))
        if len(names) > len(sizes):
            sizes.append(f"{names[factor]}={factors.sizes[factor]}")
        return names[factor]

    def axis(product: tuple[int, ...]) -> str:
        if not product:  # a size of 1, which is no factor
            unused = -1 - len(sizes)
            names[unused] = letter_of(len(sizes))
            sizes.append(f"{names[unused]}=1")
            return names[unused]
        return "".join(name_of(factor) for factor in product)

    def side(tensors: Sequence[str]) -> str:
        arrays = (map(axis, factors.axes[name]) for name in tensors)
        return ", ".join(f"[{', '.join(axes)}]" for axes in arrays)

    mapping = f"({side(graph.inputs)})->({side(graph.outputs)})"
    results = factors.of(*graph.outputs)
    summed = set[int]().union(*factors.partial.values()) - results - factors.whole
    whole = set(factors.whole) | (set() if may_sum else summed)

    def listed(found: set[int]) -> str:
        return ", ".join(name for factor, name in names.items() if factor in found)

    text = f"#sdy.op_sharding_rule<{mapping} {{{', '.join(sizes)}}}"
    if may_sum and (found := listed(summed)):
        text += f" reduction={{{found}}}"
    if found := listed(whole):
        text += f" need_replication={{{found}}}"
    return f"{text}, custom>"


def letter_of(index: int) -> str:
    """Return how Shardy names a factor."""
    letters = "ijklmnopqrstuvwxyz"
    return letters[index] if index < len(letters) else f"z_{index - len(letters) + 1}"
