# SPDX-License-Identifier: Apache-2.0
"""Which kernels share a graph, so that their gradients share kernels?

The gradient of a product is a product, and what follows it is the gradient of the
activation that came before. So it can be in that kernel, and spares memory. The
gradient of one graph is one graph, so two products with an activation between them are
made one graph. Forward, it has the same kernels as two graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, is_anchor, joined
from jax_cudnn.lowering import equation_function, graph_of, run_graph


def run_chained(
    function: Callable[..., Sequence[jax.Array]], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return what a function of arrays returns, with products chained in one graph."""
    closed = jax.make_jaxpr(function)(*operands)
    jaxpr = closed.jaxpr
    chains = _Chains(jaxpr)
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(jaxpr.invars, operands, strict=True))
    for step in chains.steps:
        results = step.run([chains.read(x, known) for x in step.operands])
        known.update(zip(step.results, results, strict=True))
    return [chains.read(x, known) for x in jaxpr.outvars]


@dataclass(frozen=True, kw_only=True)
class _Step:
    """An equation of JAX's."""

    jaxpr: Any
    equation: Any
    operands: tuple[Any, ...]
    results: tuple[Any, ...]

    def run(self, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Return the results."""
        function = equation_function(self.jaxpr, self.equation)
        once: dict[Any, jax.Array] = {}
        for x, operand in zip(self.operands, operands, strict=True):
            if not _is_literal(x):
                once.setdefault(x, operand)
        return function(*once.values())


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a graph, as an equation of JAX's, or of several that were joined."""

    graph: Graph
    options: Options
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    alone: _Step | None = None

    def run(self, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Return the results."""
        if self.alone is not None:  # JAX knows where it was called.
            return self.alone.run(operands)
        return run_graph(self.graph, operands, self.options)


class _Chains:
    """The equations of a function, with calls joined where their gradients gain.

    Reshapes are no steps: they are made where something reads them.
    """

    def __init__(self, jaxpr: Any) -> None:
        """Join calls, from the first one on."""
        self._sources: dict[Any, Any] = {}
        found: list[_Step | _Call] = []
        for equation in jaxpr.eqns:
            if _is_reshape(equation):
                self._sources[equation.outvars[0]] = equation.invars[0]
            else:
                found.append(_step_of(jaxpr, equation))
        self._wanted = {self._root(x) for x in jaxpr.outvars}
        self.steps: list[_Step | _Call] = []
        for i, step in enumerate(found):
            if isinstance(step, _Call):
                step = self._chained(step, found[i + 1 :])
            self.steps.append(step)

    def read(self, atom: Any, known: dict[Any, Any]) -> Any:
        """Return the array of a variable or literal."""
        if _is_literal(atom):
            return atom.val
        if atom not in known:
            source = self.read(self._sources[atom], known)
            known[atom] = jnp.reshape(source, atom.aval.shape)
        return known[atom]

    def _root(self, atom: Any) -> Any:
        """Return what a variable is a reshape of."""
        while not _is_literal(atom) and atom in self._sources:
            atom = self._sources[atom]
        return None if _is_literal(atom) else atom

    def _chained(self, call: _Call, later: list[_Step | _Call]) -> _Call:
        """Return a call joined with earlier ones, which are no steps any more."""
        roots = dict.fromkeys(map(self._root, call.operands))
        for first in [each for each in self.steps if isinstance(each, _Call)]:
            if not roots.keys() & set(first.results):
                continue
            after = self.steps[self.steps.index(first) + 1 :]
            if any(self._reads(step, first) for step in after):
                continue  # It would run too late for them.
            if (one := self._joined(first, call, later)) is not None:
                self.steps.remove(first)
                call = one
        return call

    def _reads(self, step: _Step | _Call, first: _Call) -> bool:
        return not {*map(self._root, step.operands)}.isdisjoint(first.results)

    def _joined(
        self, first: _Call, second: _Call, later: list[_Step | _Call]
    ) -> _Call | None:
        """Return one call for both; None where they stay two."""
        if first.options != second.options or not _gains(first.graph, second.graph):
            return None
        made = dict(zip(first.results, first.graph.outputs, strict=True))
        links: dict[str, str] = {}
        for name, x in zip(second.graph.inputs, second.operands, strict=True):
            if (root := self._root(x)) not in made:
                continue
            result = first.graph.tensor(made[root])
            is_same = replace(result, name=name) == second.graph.tensor(name)
            if not is_same or root.aval.shape != x.aval.shape:
                return None
            links[name] = result.name
        read = {self._root(x) for step in later for x in step.operands}
        kept = [x for x in first.results if x in read | self._wanted]
        given = zip(second.graph.inputs, second.operands, strict=True)
        others = [x for name, x in given if name not in links]
        return _Call(
            graph=joined(first.graph, second.graph, links, [made[x] for x in kept]),
            options=first.options,
            operands=(*first.operands, *others),
            results=(*kept, *second.results),
        )


def _step_of(jaxpr: Any, equation: Any) -> _Step | _Call:
    operands, results = tuple(equation.invars), tuple(equation.outvars)
    step = _Step(jaxpr=jaxpr, equation=equation, operands=operands, results=results)
    found = graph_of(equation)
    if found is None:
        return step
    return _Call(
        graph=found.graph,
        options=found.options,
        operands=operands,
        results=results,
        alone=step,
    )


def _gains(first: Graph, second: Graph) -> bool:
    """Whether the second's gradient has work for its kernels in the first's."""
    kinds = {node.kind for node in (*first.nodes, *second.nodes) if is_anchor(node)}
    modes = {getattr(node.attributes, "mode", "") for node in first.nodes}
    return kinds == {"matmul"} and bool(modes - {"", "identity", "add"})


def _is_reshape(equation: Any) -> bool:
    params = equation.params
    is_plain = not params.get("dimensions") and params.get("sharding") is None
    return equation.primitive.name == "reshape" and is_plain


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")
