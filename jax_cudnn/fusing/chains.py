# SPDX-License-Identifier: Apache-2.0
"""Joins matmuls into one graph where their gradients then share kernels.

The gradient of a product is a product, and what follows it is the gradient of the
activation that came before. So it can be in that kernel, and spares memory. The
gradient of one graph is one graph, so two products with an activation between them are
made one graph. Forward, it has the same kernels as two graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.fusing.program import (
    Arrays,
    Atom,
    Operation,
    Program,
    Value,
    as_array,
    program_of,
)
from jax_cudnn.graph import Graph, is_anchor, joined
from jax_cudnn.lowering import graph_of, run_graph, typed_like


def run_chained(
    function: Callable[..., Sequence[jax.Array]], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return what a function of arrays returns, with products chained in one graph."""
    program = program_of(jax.make_jaxpr(function)(*operands))
    chains = _Chains(program)
    arrays: Arrays = dict(zip(program.inputs, operands, strict=True))
    arrays |= program.constants
    for step in chains.steps:
        chains.reshape(step.reads, arrays)
        step.run(arrays)
    chains.reshape(program.results, arrays)
    return [as_array(x, arrays) for x in program.results]


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """One call of a graph in place of several."""

    graph: Graph
    options: Options
    reads: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def run(self, arrays: Arrays) -> None:
        """Add the results to the arrays."""
        operands = [arrays[x] for x in self.reads]
        results = run_graph(self.graph, operands, self.options)
        for output, x in zip(self.outputs, results, strict=True):
            arrays[output] = typed_like(x, output.aval)


class _Chains:
    """The operations of a program, with calls joined where their gradients gain.

    Reshapes are no steps: they are made where something reads them.
    """

    def __init__(self, program: Program) -> None:
        """Join calls, from the first one on."""
        self._sources: dict[Value, Value] = {}
        found: list[Operation] = []
        for each in program.operations:
            if _is_reshape(each):
                self._sources[each.outputs[0]] = each.reads[0]
            else:
                found.append(each)
        self._wanted = set(self._roots(program.results))
        self.steps: list[Operation | _Joined] = []
        for i, step in enumerate(found):
            self.steps.append(self._chained(step, found[i + 1 :]))

    def reshape(self, atoms: Sequence[Atom], arrays: Arrays) -> None:
        """Add those of the atoms to the arrays that are reshapes of what is there."""
        for x in atoms:
            if isinstance(x, Value) and x not in arrays:
                arrays[x] = jnp.reshape(arrays[self._root(x)], x.shape)

    def _root(self, value: Value) -> Value:
        """Return what a value is a reshape of."""
        while value in self._sources:
            value = self._sources[value]
        return value

    def _roots(self, atoms: Sequence[Atom]) -> list[Value]:
        return [self._root(x) for x in atoms if isinstance(x, Value)]

    def _chained(
        self, step: Operation, later: Sequence[Operation]
    ) -> Operation | _Joined:
        """Return a step joined with earlier calls, which are no steps any more."""
        # z = gelu(x @ w1) is one call, and z @ w2 is another one, which reads z. They
        # become one call in the place of the second, unless a step between them reads z
        # as well.
        chained: Operation | _Joined = step
        calls = [x for x in self.steps if _call_of(x)] if _call_of(step) else []
        for first in calls:
            if not self._reads(step, first):
                continue
            after = self.steps[self.steps.index(first) + 1 :]
            if any(self._reads(each, first) for each in after):
                continue  # It would run too late for them.
            if (one := self._joined(first, chained, later)) is not None:
                self.steps.remove(first)
                chained = one
        return chained

    def _reads(self, step: Operation | _Joined, first: Operation | _Joined) -> bool:
        return not {*self._roots(step.reads)}.isdisjoint(first.outputs)

    def _joined(
        self,
        first: Operation | _Joined,
        second: Operation | _Joined,
        later: Sequence[Operation],
    ) -> _Joined | None:
        """Return one call for both; None where they stay two."""
        one, two = _call_of(first), _call_of(second)
        if one is None or two is None or one.options != two.options:
            return None
        if not _gains(one.graph, two.graph):
            return None
        # `links` says that operand "a" of the second graph is result "output" of the
        # first. What is read after both, or saved for a gradient, stays a result.
        made = dict(zip(one.outputs, one.graph.outputs, strict=True))
        links: dict[str, str] = {}
        others: list[Value] = []
        for name, x in zip(two.graph.inputs, two.reads, strict=True):
            if (root := self._root(x)) not in made:
                others.append(x)
                continue
            result = one.graph.tensor(made[root])
            is_same = replace(result, name=name) == two.graph.tensor(name)
            if not is_same or root.shape != x.shape:
                return None
            links[name] = result.name
        read = {x for each in later for x in self._roots(each.reads)} | self._wanted
        kept = [x for x in one.outputs if x in read]
        return _Joined(
            graph=joined(one.graph, two.graph, links, [made[x] for x in kept]),
            options=one.options,
            reads=(*one.reads, *others),
            outputs=(*kept, *two.outputs),
        )


def _call_of(step: Operation | _Joined) -> _Joined | None:
    """Return a call of a graph as what it may be joined to."""
    if isinstance(step, _Joined):
        return step
    if (found := graph_of(step.equation)) is None:
        return None
    return _Joined(
        graph=found.graph,
        options=found.options,
        reads=step.reads,
        outputs=step.outputs,
    )


def _gains(first: Graph, second: Graph) -> bool:
    """Whether the second's gradient has work for its kernels in the first's."""
    kinds = {node.kind for node in (*first.nodes, *second.nodes) if is_anchor(node)}
    modes = {getattr(node.attributes, "mode", "") for node in first.nodes}
    return kinds == {"matmul"} and bool(modes - {"", "identity", "add"})


def _is_reshape(work: Operation) -> bool:
    is_plain = not work.params.get("dimensions") and not work.params.get("sharding")
    return work.name == "reshape" and is_plain and bool(work.reads)
