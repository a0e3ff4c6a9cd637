# SPDX-License-Identifier: Apache-2.0
"""Chooses the axes of a graph's tensors into which the examples of a vmap fold.

The letters of its nodes say so: examples enter a letter that all tensors which have
examples share, and that no sum crosses. Of several such letters, that one is taken with
which the least is computed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jax_cudnn.graph.description import Role
from jax_cudnn.graph.kinds import is_anchor, row_of
from jax_cudnn.graph.pointwise import is_max_or_min
from jax_cudnn.graph.spec import Graph, Node
from jax_cudnn.graph.walks import made_by, readers


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldRule:
    """A rule for folding `n` examples into a letter of tensors, by tensor name.

    ``axes``: the logical axis that the examples merge into, as its slower part; a
    tensor that is not named here is shared by all examples and broadcasts as it is.
    ``sizes``: the size to which that axis is first broadcast, for a tensor that has 1
    there; a result that has 1 is that many times the same. ``sums``: results whose
    examples' own share of the axis is summed away after the call instead.
    """

    letter: str
    axes: Mapping[str, int]
    sizes: Mapping[str, int]
    sums: frozenset[str] = frozenset()


def is_apart(graph: Graph) -> bool:
    """Whether examples run one by one in cuDNN, where that is asked for."""
    return any(row_of(node).apart in dict(node.inputs) for node in graph.nodes)


def fold_rule(graph: Graph, batched: frozenset[str]) -> FoldRule | None:
    """Return how examples of the `batched` inputs fold into the graph, if they do.

    Sums that are left for after the call keep what they add until then, so only the
    last letter of a kind may have such.
    """
    rows = [row_of(node) for node in graph.nodes if is_anchor(node)]
    letters: tuple[str, ...] = rows[0].folds if rows else ()
    found: list[FoldRule] = []
    for letter in letters:
        if all(letter in row.folds for row in rows):
            rule = _Fold(graph, letter).rule(batched)
            is_last = letter == rows[0].folds[-1]
            if rule is not None and (is_last or not rule.sums):
                found.append(rule)

    def elements(rule: FoldRule) -> int:
        sizes = (
            math.prod(tensor.dims)
            // max(tensor.dims[rule.axes[tensor.name]], 1)
            * rule.sizes[tensor.name]
            for tensor in graph.tensors
            if tensor.name in rule.axes
        )
        return sum(sizes)

    return min(found, key=elements, default=None)


def families(graph: Graph) -> dict[str, str]:
    """Say for each tensor to which role of a kernel's node it leads, or belongs.

    The nodes around the kernels join what they connect. Constants lead to none.
    """
    found: dict[str, str] = {}
    for group, roles in _groups(graph):
        for role in roles:
            found |= dict.fromkeys(group, role.name)
    return found


def _groups(graph: Graph) -> Iterator[tuple[set[str], list[Role]]]:
    """Yield sets of tensors that nodes around kernels connect, with their roles."""
    groups = {t.name: {t.name} for t in graph.tensors}
    constants = made_by(node for node in graph.nodes if not node.inputs)
    for node in graph.nodes:
        if not is_anchor(node):
            names = [n for n in _names(node) if n not in constants]
            joined = set[str]().union(*(groups[name] for name in names))
            for name in joined:
                groups[name] = joined
    for group in {id(group): group for group in groups.values()}.values():
        roles = [
            row_of(node).roles[role]
            for node in graph.nodes
            if is_anchor(node)
            for role, name in (*node.inputs, *node.outputs)
            if name in group
        ]
        yield group, roles


def _names(node: Node) -> list[str]:
    return [name for _, name in (*node.inputs, *node.outputs)]


class _Fold:
    """The tensors of a graph that may fold into one letter."""

    def __init__(self, graph: Graph, letter: str) -> None:
        self._graph = graph
        self._letter = letter
        self._axes: dict[str, int] = {}
        for group, roles in _groups(graph):
            places = {role.place(letter) for role in roles}
            # What leads to two places, or to one without the letter, stays shared.
            if len(places) == 1 and (place := places.pop()) is not None:
                self._axes |= dict.fromkeys(group, place)
        self._own = {
            name: graph.tensor(name).dims[axis] for name, axis in self._axes.items()
        }

    def rule(self, batched: frozenset[str]) -> FoldRule | None:
        """Return how the examples fold into the letter, if they do."""
        folded = self._with_examples(batched)
        if folded is None or folded.isdisjoint(self._graph.outputs):
            return None
        sizes = self._common_sizes(folded)
        if sizes is None:
            return None
        sums = frozenset(self._sums(folded, sizes))
        if not all(self._ends_at(name) and self._splits(name) for name in sums):
            return None
        maxima = made_by(filter(is_max_or_min, self._graph.nodes))
        if not sums.isdisjoint(maxima):
            return None  # Only partial sums are added up afterwards.
        axes = {name: self._axes[name] for name in sizes}
        return FoldRule(letter=self._letter, axes=axes, sizes=sizes, sums=sums)

    def _roles(self, node: Node) -> Iterator[tuple[Role, str]]:
        row = row_of(node)
        for role, name in (*node.inputs, *node.outputs):
            yield row.roles[role], name

    def _broadcasts(self, role: Role, node: Node) -> bool:
        return not is_anchor(node) or role.broadcasts(self._letter)

    def _with_examples(self, batched: frozenset[str]) -> frozenset[str] | None:
        """Return the tensors that are to have examples; None where one may not.

        A node makes examples of examples. What it reads beside them, or makes for them,
        has them as well, unless it broadcasts: that goes back to the inputs, and on
        from there.
        """
        # If only x of act(x @ w) has examples, x @ w and act(x @ w) get them too. w has
        # no rows, so with the letter "m" it stays shared. If only w has examples, "b"
        # is the letter that fits: x has size 1 there, and broadcasts.
        folded = set(batched)
        grown = True
        while grown:
            count = len(folded)
            for node in self._graph.nodes:
                if folded.isdisjoint(_names(node)):
                    continue
                for role, name in self._roles(node):
                    is_alone = self._own.get(name, 1) == 1
                    is_shared = role.is_input and is_alone
                    if is_anchor(node) and role.place(self._letter) is None:
                        is_shared = role.is_input
                    elif not self._broadcasts(role, node):
                        is_shared = False
                    if not is_shared:
                        folded.add(name)
                        # The gradient of each example's own share needs that share.
                        folded.update(self._primal_of(role, node))
                inputs = [name for _, name in node.inputs]
                if folded.isdisjoint(inputs):
                    # All have 1 there. With the largest, least is computed again.
                    candidates = [name for name in inputs if name in self._own]
                    if not candidates:
                        return None
                    folded.add(max(candidates, key=self._elements))
            grown = len(folded) != count
        return frozenset(folded) if folded <= self._own.keys() else None

    def _primal_of(self, role: Role, node: Node) -> list[str]:
        is_gradient = not role.is_input and role.broadcasts(self._letter)
        names = dict(node.inputs)
        return [names[role.same_as]] if is_gradient and role.same_as in names else []

    def _elements(self, name: str) -> int:
        return math.prod(self._graph.tensor(name).dims)

    def _common_sizes(self, folded: frozenset[str]) -> dict[str, int] | None:
        """Return the size of each tensor's axis before it folds: that of what it meets.

        None where that is not one size.
        """
        # Three examples of (1, 14, 24) @ (1, 24, 5) and of its bias (1, 1, 5) fold into
        # the rows. The bias of each example is broadcast to the 14 rows that it is
        # added to, so that (1, 42, 5) is added to (1, 42, 5).
        groups = {name: {name} for name in folded}
        fixed: set[str] = set()
        for node in self._graph.nodes:
            names = [name for name in _names(node) if name in folded]
            if is_anchor(node):
                # Axes of several letters differ in what stands beside this one.
                alone = {n for role, n in self._roles(node) if self._is_alone(role)}
                fixed.update(name for name in names if name not in alone)
                names = [name for name in names if name in alone]
            joined = set[str]().union(*(groups[name] for name in names))
            groups |= dict.fromkeys(joined, joined)
        sizes: dict[str, int] = {}
        for name, group in groups.items():
            found = {self._own[each] for each in group} - {1} or {1}
            if len(found) > 1:
                return None
            (sizes[name],) = found
        # There, none has more of the letter than it has.
        is_kept = all(sizes[name] == self._own[name] for name in fixed)
        return sizes if is_kept else None

    def _is_alone(self, role: Role) -> bool:
        place = role.place(self._letter)
        return place is not None and role.axes[place].letters == self._letter

    def _sums(self, folded: frozenset[str], sizes: Mapping[str, int]) -> Iterator[str]:
        for node in self._graph.nodes:
            row = row_of(node)
            for role, name in self._roles(node):
                if role.is_input or name not in folded:
                    continue
                is_less = self._own[name] != sizes[name]
                if row.is_sum:
                    is_less = self._own[name] != self._own[node.inputs[0][1]]
                if is_less and (row.is_sum or role.broadcasts(self._letter)):
                    yield name

    def _splits(self, name: str) -> bool:
        """Whether the examples' own share of a sum is all that stands on its axis."""
        source = next(n for n in self._graph.nodes if name in dict(n.outputs).values())
        near = {*_names(source)}
        return all(
            self._is_alone(role)
            for node in self._graph.nodes
            if is_anchor(node)
            for role, each in self._roles(node)
            if each in near and role.place(self._letter) is not None
        )

    def _ends_at(self, name: str) -> bool:
        return name in self._graph.outputs and not readers(self._graph.nodes, name)
