# SPDX-License-Identifier: Apache-2.0
"""Classifies the values of a traced function relative to a row-normalised array.

One rule for each of JAX's primitives says what it makes of the mean of the rows, their
squares, ... A value that no rule reads has no class.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import jax.numpy as jnp

from jax_cudnn.fusing.broadcasts import inner_axes, narrowed
from jax_cudnn.fusing.program import Atom, Number, Operation, Value
from jax_cudnn.reference.dtypes import dtype_name

# What a value is of an array x. "square" is that of x or of centred x; "deviation" is
# the root of its mean, with epsilon, and "inverse" is one over that.
Kind = Literal[
    "x",
    "centred",
    "square",
    "normal",
    "sum of x",
    "mean",
    "square of mean",
    "sum of squares",
    "variance",
    "variance and epsilon",
    "deviation",
    "inverse",
]
# These have the sizes of x. The others have a number for each row.
_FULL = ("x", "centred", "square", "normal")
_NARROW = ("bf16", "f16")
# What functions with such norms are told.
_ROUNDS = "a norm that is rounded to {} on the way; cuDNN's are rounded once"
_DTYPE = "a norm in {}; cuDNN's are computed in f32"
_AXES = "a norm over other axes than the last ones"


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """The class of a value relative to an array: see ``Kind``.

    ``axes`` are the normalised ones of the array, and ``places`` says for each axis of
    the value, if it is of the rows', which one of the array it is. ``fault`` says why
    cuDNN's norms do not compute just this.
    """

    kind: Kind
    x: Value
    parts: frozenset[Operation] = frozenset()
    axes: tuple[int, ...] = ()
    places: tuple[int | None, ...] = ()
    is_centred: bool = False
    epsilon: float = 0.0
    scale: Value | None = None
    bias: Value | None = None
    is_rounded: bool = False
    fault: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether nothing followed the norm itself."""
        return self.scale is None and self.bias is None and not self.is_rounded

    @property
    def is_aligned(self) -> bool:
        """Whether the rows of the value are those of the array it is combined with."""
        shape = self.x.shape
        # A number is combined with arrays of any rank.
        places = self.places or (None,) * len(shape)
        return len(places) == len(shape) and all(
            place == axis or (place is None and (axis in self.axes or size == 1))
            for axis, (place, size) in enumerate(zip(places, shape, strict=True))
        )

    def of_same(self, other: "Term") -> bool:
        """Whether both are numbers of the same rows, in the same order."""
        return (self.x, self.axes, self.places) == (other.x, other.axes, other.places)


@dataclass
class Reader:
    """Reads the operations of a program; ``terms`` has what each value is."""

    operations: Sequence[Operation]
    terms: dict[Value, Term] = field(default_factory=dict)
    makers: dict[Value, Operation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for operation in self.operations:
            self._read(operation)
            self.makers |= dict.fromkeys(operation.outputs, operation)

    def _read(self, operation: Operation) -> None:
        rule = _RULES.get(operation.name)
        if rule is None or len(operation.outputs) != 1:
            return
        made = rule(self, operation)
        if made is None:
            return
        given = (self.terms.get(x) for x in operation.reads)
        used = [term for term in given if term is not None and term.x is made.x]
        parts = made.parts.union(*(term.parts for term in used), {operation})
        faults = (made.fault, *(term.fault for term in used), _fault_of(operation))
        fault = next((each for each in faults if each), "")
        self.terms[operation.outputs[0]] = replace(made, parts=parts, fault=fault)

    # --- what an operand is -----------------------------------------------------------

    def term(self, atom: Atom) -> Term | None:
        """Return what an operand is of another array, if a rule has read it."""
        return self.terms.get(atom) if isinstance(atom, Value) else None

    def stat(self, atom: Atom, *kinds: Kind) -> Term | None:
        """Return what an operand is, if it is one of some kinds."""
        term = self.term(atom)
        return term if term is not None and term.kind in kinds else None

    def either(self, atom: Atom, *kinds: Kind) -> Iterator[Term]:
        """Yield what an operand is of another array, and that it is one itself."""
        term = self.stat(atom, *kinds)
        if term is not None:
            yield term
        is_other = "x" in kinds and (term is None or term.kind != "x")
        if is_other and isinstance(atom, Value) and _is_array(atom):
            yield Term(kind="x", x=atom)

    def number(self, atom: Atom) -> float | None:
        """Return the number that an operand is everywhere, if it is one."""
        source, _ = narrowed(atom, len(atom.shape), self.makers)
        return float(source.value) if isinstance(source, Number) else None

    def factor(self, atom: Atom, term: Term) -> Value | None:
        """Return the array of features that an operand is for all rows, if it is."""
        shape = term.x.shape
        if len(atom.shape) != len(shape):
            return None
        source, sizes = narrowed(atom, len(shape), self.makers)
        wanted = [n if axis in term.axes else 1 for axis, n in enumerate(shape)]
        if not isinstance(source, Value) or list(sizes) != wanted:
            return None
        maker = self.makers.get(source)
        if maker is not None and _is_widening(maker) and maker.reads:
            (source,) = maker.reads
        return source if dtype_name(source.dtype) in ("f32", *_NARROW) else None


def _is_array(x: Value) -> bool:
    return len(x.shape) > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _is_widening(operation: Operation) -> bool:
    if operation.name != "convert_element_type":
        return False
    (before,), (after,) = operation.inputs, operation.outputs
    is_plain = operation.params.get("sharding") is None
    return (
        is_plain
        and dtype_name(before.dtype) in _NARROW
        and dtype_name(after.dtype) == "f32"
    )


def _fault_of(operation: Operation) -> str:
    """Return why an operation of a norm is not what cuDNN's norm computes."""
    name = dtype_name(operation.outputs[0].dtype) or str(operation.outputs[0].dtype)
    if name in _NARROW and operation.name != "convert_element_type":
        return _ROUNDS.format(name)
    return "" if name in ("f32", *_NARROW) else _DTYPE.format(name)


# --- one rule for each primitive ------------------------------------------------------


def _converted(reader: Reader, operation: Operation) -> Term | None:
    (source,), (output,) = operation.inputs, operation.outputs
    if not isinstance(source, Value) or operation.params.get("sharding") is not None:
        return None
    term = reader.term(source)
    if term is None:
        is_x = _is_widening(operation) and _is_array(source)
        return Term(kind="x", x=source) if is_x else None
    name = dtype_name(output.dtype)
    if output.dtype == source.dtype:
        return term
    if name not in _NARROW:
        return None if term.kind == "normal" else term
    if term.kind == "normal":
        return None if term.is_rounded else replace(term, is_rounded=True)
    if term.kind == "x":
        return None
    return replace(term, fault=term.fault or _ROUNDS.format(name))


def _summed(reader: Reader, operation: Operation) -> Term | None:
    (source,) = operation.inputs
    if operation.params.get("out_sharding") is not None or len(source.shape) == 0:
        return None
    term = next(reader.either(source, "x", "square"), None)
    if term is None:
        return None
    axes = tuple(sorted(operation.params["axes"]))
    rank = len(source.shape)
    is_last = axes == tuple(range(rank - len(axes), rank)) and axes
    if not axes or (term.axes and term.axes != axes):
        return None
    return replace(
        term,
        kind="sum of x" if term.kind == "x" else "sum of squares",
        axes=axes,
        places=tuple(axis for axis in range(rank) if axis not in axes),
        fault=term.fault or ("" if is_last else _AXES),
    )


def _moved(reader: Reader, operation: Operation) -> Term | None:
    """Read a reshape or broadcast of numbers of rows."""
    term = reader.term(operation.inputs[0])
    inner = inner_axes(operation)
    if term is None or term.kind in _FULL or inner is None:
        return None
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    places: list[int | None] = [None] * len(after)
    for own, outer in inner.items():
        if before[own] == after[outer]:
            places[outer] = term.places[own]
    return replace(term, places=tuple(places))


def _squared(reader: Reader, operation: Operation) -> Term | None:
    atom = operation.inputs[0]
    if (mean := reader.stat(atom, "mean")) is not None:
        return replace(mean, kind="square of mean")
    term = next(reader.either(atom, "centred", "x"), None)
    if term is None:
        return None
    return replace(term, kind="square", is_centred=term.kind == "centred")


def _power(reader: Reader, operation: Operation) -> Term | None:
    if operation.name == "integer_pow":
        exponent = float(operation.params["y"])
    else:
        exponent = reader.number(operation.inputs[1])
    if exponent == 2:
        return _squared(reader, operation)
    if exponent == 0.5:
        return _root(reader, operation)
    return _inverse_root(reader, operation) if exponent == -0.5 else None


def _multiplied(reader: Reader, operation: Operation) -> Term | None:
    first, second = operation.inputs
    if first is second:
        return _squared(reader, operation)
    orders = ((first, second), (second, first))
    for one, other in orders:
        inverse = reader.stat(other, "inverse")
        found = None if inverse is None else _normalised(reader, one, inverse)
        if found is not None:
            return found
    for one, other in orders:
        followed = reader.stat(one, "normal", "inverse")
        if followed is None or not followed.is_plain:
            continue
        is_fitting = followed.kind == "normal" or followed.is_aligned
        if is_fitting and (scale := reader.factor(other, followed)) is not None:
            rows = _rows(followed) if followed.kind == "inverse" else ()
            return replace(followed, scale=scale, places=rows)
    return None


def _rows(term: Term) -> tuple[int | None, ...]:
    """Return the places of what has the sizes of the array."""
    rank = len(term.x.shape)
    return tuple(None if axis in term.axes else axis for axis in range(rank))


def _normalised(reader: Reader, atom: Atom, stat: Term) -> Term | None:
    """Return the norm of an operand by the deviation of its rows, if it is one."""
    wanted: Kind = "centred" if stat.is_centred else "x"
    if not stat.is_aligned:
        return None
    for term in reader.either(atom, wanted):
        if term.x is stat.x and term.axes in ((), stat.axes):
            return replace(stat, kind="normal", fault=term.fault or stat.fault)
    return None


def _divided(reader: Reader, operation: Operation) -> Term | None:
    first, second = operation.inputs
    total = reader.stat(first, "sum of x", "sum of squares")
    if total is not None:
        count = math.prod(total.x.shape[axis] for axis in total.axes)
        if reader.number(second) != count:
            return None
        is_sum = total.kind == "sum of x"
        return replace(total, kind="mean" if is_sum else "variance")
    deviation = reader.stat(second, "deviation")
    if deviation is None:
        return None
    if reader.number(first) == 1:
        return replace(deviation, kind="inverse")
    return _normalised(reader, first, deviation)


def _subtracted(reader: Reader, operation: Operation) -> Term | None:
    first, second = operation.inputs
    squares = reader.stat(first, "variance")
    square = reader.stat(second, "square of mean")
    if squares is not None and square is not None and not squares.is_centred:
        # The same number, but for the digits that cancel.
        return replace(squares, is_centred=True) if squares.of_same(square) else None
    mean = reader.stat(second, "mean")
    if mean is not None and mean.is_aligned:
        for term in reader.either(first, "x"):
            if term.x is mean.x:
                return replace(mean, kind="centred", is_centred=True)
    term = next(reader.either(first, "x"), None)
    return term if reader.number(second) == 0 else None


def _added(reader: Reader, operation: Operation) -> Term | None:
    first, second = operation.inputs
    for one, other in ((first, second), (second, first)):
        variance = reader.stat(one, "variance")
        if variance is not None:
            epsilon = reader.number(other)
            if epsilon is None or not (math.isfinite(epsilon) and epsilon >= 0):
                return None
            return replace(variance, kind="variance and epsilon", epsilon=epsilon)
        normal = reader.stat(one, "normal")
        if normal is None or normal.bias is not None or normal.is_rounded:
            continue
        if (bias := reader.factor(other, normal)) is not None:
            return replace(normal, bias=bias)
    return None


def _larger(reader: Reader, operation: Operation) -> Term | None:
    """Read the bound that keeps a difference of means from being negative."""
    for one, other in (operation.inputs, operation.inputs[::-1]):
        variance = reader.stat(one, "variance")
        if variance is not None and reader.number(other) == 0:
            return variance
    return None


def _root(reader: Reader, operation: Operation) -> Term | None:
    term = reader.stat(operation.inputs[0], "variance", "variance and epsilon")
    return None if term is None else replace(term, kind="deviation")


def _inverse_root(reader: Reader, operation: Operation) -> Term | None:
    term = reader.stat(operation.inputs[0], "variance", "variance and epsilon")
    return None if term is None else replace(term, kind="inverse")


def _chosen(reader: Reader, operation: Operation) -> Term | None:
    """Read a selection that is known: jnp.var asks whether there are elements."""
    which = reader.number(operation.inputs[0])
    return None if which is None else reader.term(operation.inputs[1 + int(which)])


def _same(reader: Reader, operation: Operation) -> Term | None:
    return reader.term(operation.inputs[0])


_RULES: Mapping[str, Callable[[Reader, Operation], Term | None]] = {
    "add": _added,
    "broadcast_in_dim": _moved,
    "convert_element_type": _converted,
    "copy": _same,
    "div": _divided,
    "integer_pow": _power,
    "max": _larger,
    "mul": _multiplied,
    "pow": _power,
    "reduce_sum": _summed,
    "reshape": _moved,
    "rsqrt": _inverse_root,
    "select_n": _chosen,
    "sqrt": _root,
    "square": _squared,
    "squeeze": _moved,
    "sub": _subtracted,
}
