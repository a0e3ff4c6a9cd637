# SPDX-License-Identifier: Apache-2.0
"""Finds the graphs that a call of a function runs, for all functions of `plans`.

Nothing is run: the function is traced, with its arrays as shapes and all else of its
arguments as it is. A program for several devices is compiled, to see what each runs.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled, Lowered, Traced, Wrapped

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.decision import (
    Decision,
    decide,
    decided_without_cudnn,
    operation,
)
from jax_cudnn.lowering.partitioned import recording
from jax_cudnn.lowering.primitives import graph_p, linear_p

_STAGES = (Traced, Lowered, Compiled)


class TracedGraph(NamedTuple):
    """A graph that a call runs; ``is_linear`` is its derivative in forward mode."""

    graph: Graph
    options: Options
    is_linear: bool

    @property
    def op(self) -> str:
        """The name of what it computes."""
        name = operation(self.graph)
        return f"{name}:derivative" if self.is_linear else name

    @property
    def parts(self) -> tuple[Graph, ...]:
        """Its parts, which may be kernels of cuDNN; none in forward mode."""
        return () if self.is_linear else partition(self.graph)

    def on(self, device: str | None) -> "TracedGraph":
        """Return it for a GPU by its name; None is the one that it is for already."""
        device = device or self.options.device
        return self._replace(options=replace(self.options, device=device))

    def decided_without_cudnn(self) -> Decision | None:
        """Return that XLA runs it as a whole, and why; None if cuDNN may run it."""
        if self.is_linear:
            reason = "forward mode and second order run the reference"
            return Decision(reasons=(reason,))
        return decided_without_cudnn(self.graph, self.options)

    def decide(self) -> Decision:
        """Return who runs it on the GPU it is for, planning it with cuDNN."""
        return self.decided_without_cudnn() or decide(self.graph, self.options)


class TracedProgram(NamedTuple):
    """A traced call with the graphs that it runs.

    If it ``is_divided`` among several devices, the graphs are those of one of them.
    ``arrays`` are what it was called with, one for each operand, as far as known.
    """

    program: Traced
    graphs: list[TracedGraph]
    is_divided: bool
    arrays: tuple[Any, ...] = ()

    def counted(self) -> Iterator[tuple[TracedGraph, int | None]]:
        """Yield the graphs of the undivided program, and how many times each runs.

        That is the lengths of the scans around it; None for a branch or another loop,
        of which it is not known.
        """
        return _counted(self.program.jaxpr, 1)


def traced_graphs(
    function: Callable[..., Any] | Traced | Lowered, *args: Any, **kwargs: Any
) -> list[TracedGraph]:
    """Return the graphs that a call of the function runs; see ``traced_program``."""
    return traced_program(function, *args, **kwargs).graphs


def traced_program(
    function: Callable[..., Any] | Traced | Lowered, *args: Any, **kwargs: Any
) -> TracedProgram:
    """Trace a call of the function.

    Raises:
      TypeError: no function; arguments beside one that is traced already; a program
        that no longer names its graphs.
    """
    program = stage_of(function)
    if isinstance(program, Traced):
        check_bare(program, args, kwargs)
        return _with_graphs(program)
    if program is not None:
        raise TypeError(
            f"{type(program).__name__}: such a program no longer names its graphs. "
            "Pass jitted.trace(...), or the function with its arguments."
        )
    if not callable(function):
        raise TypeError(
            f"{type(function).__name__} is not a function. Pass one, jitted or not, "
            "with its arguments, or jitted.trace(...)."
        )
    bare, args, kwargs = _unbound(function, args, kwargs)
    traced = _with_graphs(_trace(bare, args, kwargs))
    given = (args, kwargs) if isinstance(bare, Wrapped) else (bare, args, kwargs)
    arrays = _for_each(traced.program.jaxpr.in_avals, jax.tree.leaves(given))
    return traced._replace(arrays=arrays)


def _for_each(avals: Sequence[Any], leaves: list[Any]) -> tuple[Any, ...]:
    """Return which argument each operand is, None where that is not clear.

    Those of a jitted function may be numbers, and some of its arguments static.
    """
    for found in (leaves, list(filter(_is_array, leaves))):
        if len(found) == len(avals):
            pairs = zip(found, avals, strict=True)
            return tuple(x if _shape(x) == aval.shape else None for x, aval in pairs)
    return ()


def _shape(leaf: Any) -> tuple[int, ...] | None:
    if isinstance(leaf, int | np.generic):
        return ()
    return tuple(leaf.shape) if _is_array(leaf) else None


def _with_graphs(program: Traced) -> TracedProgram:
    """Find the graphs of a program.

    XLA says how it divides a program only while it compiles it.
    """
    graphs = list(subprograms(program.jaxpr))
    if not graphs or len(jax.devices()) == 1:
        return TracedProgram(program, graphs, is_divided=False)
    with recording() as record, warnings.catch_warnings():
        # Nothing is run here, so nothing is donated.
        warnings.filterwarnings("ignore", message="Some donated buffers")
        lowered = program.lower()
        if not record.is_divided:
            return TracedProgram(program, graphs, is_divided=False)
        lowered.compile()
    divided = [
        TracedGraph(graph, options, is_linear=False) for graph, options in record.graphs
    ]
    graphs = [*divided, *(each for each in graphs if each.is_linear)]
    return TracedProgram(program, graphs, is_divided=True)


def stage_of(program: object) -> Traced | Lowered | Compiled | None:
    """Return what tracing, lowering or compiling a jitted function gave, or None.

    flax's `nnx.jit` gives objects of its own that hold JAX's.
    """
    if isinstance(program, _STAGES):
        return program
    # Attributes of the classes in flax.nnx.transforms.compilation (0.12.8 to 0.12.12),
    # which is not imported here: flax is optional.
    stages = (
        getattr(program, name, None) for name in ("traced", "lowered", "compiled")
    )
    return next((each for each in stages if isinstance(each, _STAGES)), None)


def check_bare(
    program: Traced | Lowered, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise TypeError if arguments come with a program that has its own."""
    if args or kwargs:
        raise TypeError(
            f"{type(program).__name__} takes no further arguments; "
            f"{len(args) + len(kwargs)} were given. Its own are part of it."
        )


def graph_of(equation: Any) -> TracedGraph | None:
    """Return the graph that an equation runs, if it is a call of one."""
    if equation.primitive is not graph_p:
        return None
    params = equation.params
    return TracedGraph(params["graph"], params["options"], is_linear=False)


def subprograms(jaxpr: Any) -> Iterator[TracedGraph]:
    """Yield the graphs of a jaxpr and its inner ones."""
    for graph, _ in _counted(jaxpr, 1):
        yield graph


def _counted(jaxpr: Any, runs: int | None) -> Iterator[tuple[TracedGraph, int | None]]:
    """Yield the graphs of a jaxpr that runs so many times, and how many times each."""
    for equation in jaxpr.eqns:
        if equation.primitive in (graph_p, linear_p):
            params = equation.params
            is_linear = equation.primitive is linear_p
            yield TracedGraph(params["graph"], params["options"], is_linear), runs
        again = _jax.inner_runs(equation)
        known = None if runs is None or again is None else runs * again
        for inner in _jax.inner_jaxprs(equation.params):
            yield from _counted(inner, known)


def _unbound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function within methods and partials, with all its arguments.

    A jitted function within is then traced by its own rules, and a module that it is
    bound to (`nnx.jit` of a method) is an argument like any other.
    """
    while True:
        if isinstance(function, functools.partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        elif inspect.ismethod(function):
            args, function = (function.__self__, *args), function.__func__
        else:
            return function, args, kwargs


def _trace(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Traced:
    """Trace a function by its own rules if it is jitted, else all of its arrays."""
    if isinstance(function, Wrapped):
        program = stage_of(function.trace(*args, **kwargs))
        if isinstance(program, Traced):
            return program
    # The function may be a module, which is a tree of arrays and has state to change.
    leaves, tree = jax.tree.flatten((function, args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*arrays: jax.Array) -> list[jax.Array]:
        filled = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        function, args, kwargs = jax.tree.unflatten(tree, filled.values())
        results = jax.tree.leaves(function(*args, **kwargs))
        # A function that is not jitted may return more than arrays.
        return [x for x in results if isinstance(x, jax.Array)]

    return jax.jit(call).trace(*(leaves[i] for i in places))


def _is_array(leaf: object) -> bool:
    """Whether an argument is an array or its shape. NumPy's numbers are numbers."""
    is_number_or_type = isinstance(leaf, np.generic | type)
    return not is_number_or_type and hasattr(leaf, "shape") and hasattr(leaf, "dtype")
