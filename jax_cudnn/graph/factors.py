# SPDX-License-Identifier: Apache-2.0
"""Factorises the axes of a kernel's arrays into sizes that devices can divide.

A factor is a size that can be divided among devices by itself, as the letters of an
einsum can: the batch, key heads, rows, ... An axis that multiplies letters consists of
several factors, the slowest first, and so does an axis with subaxes
(lowering/sharding/subaxes.py). What the table says of the letters holds for their
factors.

For example, an array (2, 7, 24) times a matrix (24, 5), as a graph:

>>> from jax_cudnn.graph import MatmulAttributes, Tensor
>>> tensors = tuple(
...     Tensor(name=name, dtype="f32", dims=dims, order=(0, 1, 2))
...     for name, dims in zip("abc", [(1, 14, 24), (1, 24, 5), (1, 14, 5)])
... )
>>> roles = {"a": "a", "b": "b"}, {"output": "c"}
>>> matmul = Node.make("matmul", *roles, MatmulAttributes())
>>> graph = Graph(
...     tensors=tensors, nodes=(matmul,), inputs=("a", "b"), outputs=("c",)
... )
>>> split = ("a", ((1,), (2, 7), (24,))), ("c", ((1,), (2, 7), (5,)))
>>> factors = factors_of(graph, (*split, ("b", ((1,), (24,), (5,)))))

There are four factors. The rows of the array are two of them, and no axis of size 1 has
a factor. The result is a sum over factor 2, the contraction: if that one is divided,
each device has a partial sum.

>>> factors.sizes
(7, 2, 24, 5)
>>> factors.axes["a"], factors.axes["b"], factors.axes["c"]
(((), (1,), (0,), (2,)), ((), (2,), (3,)), ((), (1,), (0,), (3,)))
>>> factors.partial["c"]
frozenset({2})
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_cudnn.graph.axes import axis_classes
from jax_cudnn.graph.kinds import is_anchor, roles_in, row_of
from jax_cudnn.graph.pointwise import is_max_or_min
from jax_cudnn.graph.shapes import check_tensors, letters_of
from jax_cudnn.graph.spec import Graph, Node
from jax_cudnn.graph.walks import readers

# The factors of one axis, the slowest first.
Product = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Factors:
    """The factors of a graph of one kernel, by number.

    ``sizes``: of each factor. ``axes``: for each tensor, for each axis of its array,
    the factors whose sizes it multiplies. ``whole``: those that are not to be divided.
    ``partial``: for each tensor, the factors over which it is a sum; where they are
    divided, each device has a partial sum. Likewise for the tensors in
    ``maxima``, which are maxima instead.
    """

    sizes: tuple[int, ...]
    axes: Mapping[str, tuple[Product, ...]]
    whole: frozenset[int]
    partial: Mapping[str, frozenset[int]]
    maxima: frozenset[str] = frozenset()

    def of(self, *tensors: str) -> frozenset[int]:
        """Return all factors of some tensors."""
        return frozenset(f for name in tensors for p in self.axes[name] for f in p)

    def with_whole(self, more: Iterable[int]) -> "Factors":
        """Return them with more factors that are not to be divided."""
        return replace(self, whole=self.whole.union(more))


@functools.lru_cache(maxsize=4096)
def factors_of(
    graph: Graph, subaxes: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
) -> Factors:
    """Return the factors of a graph with one kernel, given its tensors' subaxes."""
    return _Reader(graph, dict(subaxes)).read()


class _Reader:
    """Finds the letters of each class of axes, and divides them by the subaxes."""

    def __init__(
        self, graph: Graph, subaxes: Mapping[str, tuple[tuple[int, ...], ...]]
    ) -> None:
        self._graph = graph
        self._subaxes = subaxes
        self._classes = axis_classes(graph)
        (self._kernel,) = (node for node in graph.nodes if is_anchor(node))
        self._row = row_of(self._kernel)
        # The letters of a class of axes, and the size of each letter. What no letter of
        # the kernel names is a letter of its own.
        self._letters: dict[int, tuple[str, ...]] = {}
        self._sizes: dict[str, int] = {}
        self._whole: set[str] = set()
        # Where a letter is divided, counted in units of its fastest part.
        self._bounds: dict[str, set[int]] = {}

    def read(self) -> Factors:
        self._name_letters()
        while self._divide_letters():
            pass
        numbers: dict[tuple[str, int], int] = {}
        for letter, bounds in self._bounds.items():
            for bound in sorted(bounds)[:-1]:
                numbers[letter, bound] = len(numbers)
        axes = {
            tensor.name: tuple(
                product
                for axis, subaxes in zip(
                    tensor.order, self._subaxes[tensor.name], strict=True
                )
                for product in self._products((tensor.name, axis), subaxes, numbers)
            )
            for tensor in self._graph.tensors
        }
        whole = {n for (letter, _), n in numbers.items() if letter in self._whole}
        partial = self._partial(axes, numbers)
        whole |= _read_partial(self._graph, self._kernel, partial)
        # Devices add up partial sums, and combine nothing else.
        for node in filter(is_max_or_min, self._graph.nodes):
            whole |= set().union(*(partial[name] for _, name in node.outputs))
        return Factors(
            sizes=tuple(
                self._step(letter, bound) // bound for letter, bound in numbers
            ),
            axes=axes,
            whole=frozenset(whole),
            partial=partial,
            maxima=self._maxima(partial),
        )

    def _name_letters(self) -> None:
        roles = roles_in(self._graph, self._kernel)
        sizes = check_tensors(self._row, roles, self._kernel.attributes)
        for role, tensor in roles.items():
            for axis, letters in enumerate(letters_of(self._row, role, roles)):
                if tensor.dims[axis] == 1:
                    continue
                own = tuple(letter for letter in letters if sizes[letter] != 1)
                number = self._classes[tensor.name, axis]
                if self._letters.setdefault(number, own) != own:
                    # One axis in two roles: no device could have a part of both.
                    self._whole.update(own, self._letters[number])
                self._sizes |= {letter: sizes[letter] for letter in own}
        self._whole.update(
            letter
            for letter in self._sizes
            if letter.rstrip("0123456789") in self._row.whole
        )
        for tensor in self._graph.tensors:
            for axis, dim in enumerate(tensor.dims):
                number = self._classes[tensor.name, axis]
                if number not in self._letters and dim != 1:
                    self._letters[number] = (f"#{number}",)
                    self._sizes[f"#{number}"] = dim
        self._bounds = {letter: {1, size} for letter, size in self._sizes.items()}

    def _divide_letters(self) -> bool:
        """Divide letters where subaxes of an axis end; whether any was divided."""
        # The rows "m", 14 of them, are an axis with subaxes (2, 7), which end at 7 and
        # 14 elements from the fastest. So the bounds of m, {1, 14}, become {1, 7, 14},
        # and its factors are 7 and 14 / 7 = 2.
        before = {letter: len(bounds) for letter, bounds in self._bounds.items()}
        for tensor in self._graph.tensors:
            for axis, subaxes in zip(
                tensor.order, self._subaxes[tensor.name], strict=True
            ):
                letters = self._letters.get(self._classes[tensor.name, axis], ())
                ends = {math.prod(subaxes[i:]) for i in range(len(subaxes))}
                unit = 1
                for letter in reversed(letters):
                    size = self._sizes[letter]
                    own = {end // unit for end in ends if unit < end < unit * size}
                    exact = {e // unit for e in ends if e % unit == 0}
                    self._bounds[letter] |= own & exact
                    if not own <= exact or not _is_chain(self._bounds[letter]):
                        # Subaxes that the letter does not consist of.
                        self._whole.add(letter)
                        self._bounds[letter] = {1, size}
                    unit *= size
        return before != {letter: len(each) for letter, each in self._bounds.items()}

    def _step(self, letter: str, bound: int) -> int:
        return min(each for each in self._bounds[letter] if each > bound)

    def _products(
        self,
        axis: tuple[str, int],
        subaxes: Sequence[int],
        numbers: Mapping[tuple[str, int], int],
    ) -> list[Product]:
        """Return the factors of each subaxis of an axis."""
        letters = self._letters.get(self._classes[axis], ())
        remaining = [
            (numbers[letter, bound], self._step(letter, bound) // bound)
            for letter in letters
            for bound in sorted(self._bounds[letter])[:-1][::-1]
        ]
        found: list[Product] = []
        for subaxis in subaxes:
            own: list[int] = []
            size = 1
            while size < subaxis and remaining:
                number, factor = remaining.pop(0)
                own.append(number)
                size *= factor
            found.append(tuple(own))
        return found

    def _partial(
        self,
        axes: Mapping[str, tuple[Product, ...]],
        numbers: Mapping[tuple[str, int], int],
    ) -> dict[str, frozenset[int]]:
        """Return over which factors each tensor is a sum or a maximum."""
        contracted = {
            number
            for (letter, _), number in numbers.items()
            if letter in self._row.contracted | self._row.maxima
        }
        has = {name: {f for each in own for f in each} for name, own in axes.items()}
        found: dict[str, frozenset[int]] = {}
        for node in self._graph.nodes:
            read = set[int]().union(*(has[name] for _, name in node.inputs))
            for _, name in node.outputs:
                gone = read - has[name]
                if node == self._kernel:
                    gone &= contracted
                elif not row_of(node).is_sum:
                    gone = set[int]()
                found[name] = frozenset(gone)
        return found

    def _maxima(self, partial: Mapping[str, frozenset[int]]) -> frozenset[str]:
        """Return the results of the kernel that are maxima; a kind has no sums then."""
        if not self._row.maxima:
            return frozenset()
        return frozenset(name for _, name in self._kernel.outputs if partial[name])


def _is_chain(bounds: set[int]) -> bool:
    ordered = sorted(bounds)
    return all(b % a == 0 for a, b in itertools.pairwise(ordered))


def _read_partial(
    graph: Graph, kernel: Node, partial: Mapping[str, frozenset[int]]
) -> set[int]:
    """Return the factors whose partial sums another node reads.

    What follows the kernel can wait until its sums are complete.
    """
    found: set[int] = set()
    for node in graph.nodes:
        if node != kernel:
            for _, name in node.outputs:
                if readers(graph.nodes, name):
                    found |= partial[name]
    return found
