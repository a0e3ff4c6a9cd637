# SPDX-License-Identifier: Apache-2.0
"""Represents a traced function as a list of operations.

Jitted functions within it are opened. What has a meaning of its own that the list could
not keep stays closed, as one operation: loops, branches, functions with derivative
rules, `jax.checkpoint`, jitted functions that say how they are sharded or compiled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.lowering import equation_function, equation_place, is_known_array


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """An array that a program takes or computes; two values are never equal."""

    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self.aval.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Number:
    """A number of rank 0 that is part of the program, in its own dtype."""

    value: np.ndarray
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of rank 0."""
        return ()

    @property
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self.aval.dtype


Atom = Value | Number
# The arrays of values, where a program is run.
Arrays = dict[Value, jax.Array]


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """An equation of the function or of one within it.

    ``place`` is where the user's code asked for it, or "".
    """

    jaxpr: Any
    equation: Any
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    place: str

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.equation.primitive.name

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of its primitive."""
        return self.equation.params

    @property
    def has_effects(self) -> bool:
        """Whether it does more than to compute, such as to print."""
        return bool(self.equation.effects)

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values among its inputs."""
        return tuple(x for x in self.inputs if isinstance(x, Value))

    def run(self, arrays: Arrays) -> None:
        """Compute it as JAX does, and add its results to the arrays."""
        # JAX's function of an equation takes each operand once.
        operands = {
            variable: atom
            for variable, atom in zip(self.equation.invars, self.inputs, strict=True)
            if not hasattr(variable, "val")
        }
        function = equation_function(self.jaxpr, self.equation)
        results = function(*(as_array(x, arrays) for x in operands.values()))
        arrays.update(zip(self.outputs, results, strict=True))


def as_array(atom: Atom, arrays: Arrays) -> jax.Array:
    """Return the array of a value or number."""
    if isinstance(atom, Value):
        return arrays[atom]
    return jnp.asarray(atom.value, atom.dtype)


class _Work(Protocol):
    """An operation, or several that are known to be one."""

    @property
    def has_effects(self) -> bool: ...
    @property
    def reads(self) -> tuple[Value, ...]: ...
    @property
    def outputs(self) -> tuple[Value, ...]: ...


_AnyWork = TypeVar("_AnyWork", bound=_Work)


class Program(NamedTuple):
    """A function as a list of operations, each after those whose results it reads."""

    operations: tuple[Operation, ...]
    inputs: tuple[Value, ...]
    constants: Mapping[Value, Any]
    results: tuple[Atom, ...]


def needed(works: Sequence[_AnyWork], results: Iterable[Atom]) -> list[_AnyWork]:
    """Return what leads to a result or has an effect, in order."""
    wanted: set[Any] = set(results)
    kept: list[_AnyWork] = []
    for work in reversed(works):
        if work.has_effects or not wanted.isdisjoint(work.outputs):
            kept.append(work)
            wanted.update(work.reads)
    return kept[::-1]


def program_of(closed: Any) -> Program:
    """Return the program of a traced function, without what leads to nothing."""
    opened = _Inliner()
    values = {variable: Value(variable.aval) for variable in closed.jaxpr.invars}
    atoms: dict[Any, Atom] = dict(values)
    results = opened.inline(closed.jaxpr, closed.consts, atoms, "")
    return Program(
        operations=tuple(needed(opened.operations, results)),
        inputs=tuple(values.values()),
        constants=opened.constants,
        results=results,
    )


class _Inliner:
    """The operations of a jaxpr and of those that are called in it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[Value, Any] = {}

    def inline(
        self, jaxpr: Any, consts: Sequence[Any], atoms: dict[Any, Atom], place: str
    ) -> tuple[Atom, ...]:
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            atoms[variable] = self._constant(const, variable.aval)

        def read(atom: Any) -> Atom:
            if not hasattr(atom, "val"):
                return atoms[atom]
            if atom.aval.shape == () and _is_number(atom.aval.dtype):
                return Number(np.asarray(atom.val, atom.aval.dtype), atom.aval)
            return self._constant(atom.val, atom.aval)

        for equation in jaxpr.eqns:
            inputs = tuple(map(read, equation.invars))
            # A jitted function is traced once for all of its callers: only where the
            # outermost one is called is sure to be the user's line.
            own_place = place or equation_place(equation)
            outputs = self._equation(jaxpr, equation, inputs, own_place)
            atoms |= dict(zip(equation.outvars, outputs, strict=True))
        return tuple(map(read, jaxpr.outvars))

    def _constant(self, value: Any, aval: Any) -> Atom:
        is_small = getattr(aval, "shape", None) == () and _is_number(aval.dtype)
        if is_small and is_known_array(value, aval):
            return Number(np.asarray(value).astype(aval.dtype), aval)
        made = Value(aval)
        is_numpy = isinstance(value, np.ndarray | np.generic)
        self.constants[made] = jnp.asarray(value) if is_numpy else value
        return made

    def _equation(
        self, jaxpr: Any, equation: Any, inputs: tuple[Atom, ...], place: str
    ) -> Iterable[Atom]:
        if (inner := _is_inlined(equation)) is not None:
            called, consts = (
                getattr(inner, "jaxpr", inner),
                getattr(inner, "consts", ()),
            )
            atoms = dict(zip(called.invars, inputs, strict=True))
            return self.inline(called, consts, atoms, place)
        if (chosen := _known_choice(equation, inputs)) is not None:
            return (chosen,)
        if inputs and all(isinstance(x, Number) for x in inputs):
            number = _folded(equation, inputs)
            if number is not None:
                return (number,)
        outputs = tuple(Value(variable.aval) for variable in equation.outvars)
        self.operations.append(Operation(jaxpr, equation, inputs, outputs, place))
        return outputs


def _is_number(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def _is_inlined(equation: Any) -> Any:
    """Return the jaxpr of a jitted function that computes no more than this, or None.

    Not so does one that says how it is sharded or compiled, or that is never inlined.
    """
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "core_call"):
        return None
    params = equation.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    is_plain = (
        all(type(each).__name__ == "UnspecifiedValue" for each in shardings)
        and all(each is None for each in layouts)
        and not params.get("compiler_options_kvs")
    )
    return params.get("jaxpr", params.get("call_jaxpr")) if is_plain else None


# What is computed once if its operands are numbers.
_FOLDED = (
    *("add", "convert_element_type", "div", "max", "min", "mul", "neg", "sub"),
    *("integer_pow", "rsqrt", "sqrt", "square"),
    *("eq", "ge", "gt", "le", "lt", "ne"),
)


def _known_choice(equation: Any, inputs: Sequence[Atom]) -> Atom | None:
    """Return what a selection by a number of the program is, if it is one.

    jnp.var selects by whether there are any elements.
    """
    if equation.primitive.name != "select_n" or not isinstance(inputs[0], Number):
        return None
    chosen = inputs[1 + int(inputs[0].value)]
    return chosen if chosen.shape == equation.outvars[0].aval.shape else None


def _folded(equation: Any, inputs: Sequence[Atom]) -> Number | None:
    """Return the number that an equation of numbers gives, or None."""
    (variable, *others) = equation.outvars
    if others or equation.primitive.name not in _FOLDED or variable.aval.shape != ():
        return None
    with jax.ensure_compile_time_eval():
        operands = (
            jnp.asarray(x.value, x.dtype) for x in inputs if isinstance(x, Number)
        )
        result = equation.primitive.bind(*operands, **equation.params)
    return Number(np.asarray(result).astype(variable.aval.dtype), variable.aval)
