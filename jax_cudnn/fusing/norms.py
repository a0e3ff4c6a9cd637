# SPDX-License-Identifier: Apache-2.0
"""Recognises layer norms and RMS norms that a function writes out.

A function has many ways to write a norm. So no program is compared with it: each value
is read as what it is of the array that is normalised (rows.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax_cudnn.fusing.program import Atom, Operation, Program, Value
from jax_cudnn.fusing.rows import Reader

_SHARED = "a norm of which other operations read what it computes on the way"


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """A norm over the last axes of x, and the operations that it was found as.

    ``scale`` and ``bias`` have the sizes of these axes, and may have others of 1.
    """

    kind: Literal["layer_norm", "rms_norm"]
    x: Value
    axes: tuple[int, ...]
    scale: Value | None
    bias: Value | None
    epsilon: float
    parts: tuple[Operation, ...]

    @property
    def name(self) -> str:
        """The name of its node."""
        return self.kind

    @property
    def place(self) -> str:
        """The place in the user's code that asked for its result."""
        return self.parts[-1].place

    @property
    def has_effects(self) -> bool:
        """It computes, and does nothing else."""
        return False

    @property
    def reads(self) -> tuple[Value, ...]:
        """The arrays that it reads."""
        return tuple(v for v in (self.x, self.scale, self.bias) if v is not None)

    @property
    def inputs(self) -> tuple[Atom, ...]:
        """The same, as an operation has them."""
        return self.reads

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Its result."""
        return self.parts[-1].outputs


class Norms(NamedTuple):
    """The norms of a program, and why operations of others are none, by operation."""

    found: tuple[Norm, ...]
    reasons: Mapping[Operation, str]


def norms_of(program: Program) -> Norms:
    """Return the norms that a program has written out, no two of the same operation."""
    sizes = (size for x in program.inputs for size in x.shape)
    if not all(isinstance(size, int) for size in sizes):
        return Norms((), {})  # Graphs have no symbolic dimensions.
    reader = Reader(program.operations)
    readers: dict[Value, list[Operation]] = {}
    for operation in program.operations:
        for x in operation.reads:
            readers.setdefault(x, []).append(operation)
    results = {x for x in program.results if isinstance(x, Value)}
    places = {operation: i for i, operation in enumerate(program.operations)}
    found: list[Norm] = []
    taken: set[Operation] = set()
    reasons: dict[Operation, str] = {}

    def is_inner(x: Value, parts: frozenset[Operation]) -> bool:
        return x not in results and all(each in parts for each in readers.get(x, ()))

    # The largest first: with scale and bias, and rounded.
    for operation in reversed(program.operations):
        term = reader.terms.get(operation.outputs[0]) if operation.outputs else None
        if term is None or term.kind != "normal" or operation in taken:
            continue
        inner = (
            x
            for each in term.parts
            for x in each.outputs
            if each is not operation and reader.terms[x].kind != "x"
        )
        fault = term.fault
        if not fault and not all(is_inner(x, term.parts) for x in inner):
            fault = _SHARED
        if fault:
            for each in term.parts:
                reasons.setdefault(each, fault)
            continue
        taken |= term.parts
        found.append(
            Norm(
                kind="layer_norm" if term.is_centred else "rms_norm",
                x=term.x,
                axes=term.axes,
                scale=term.scale,
                bias=term.bias,
                epsilon=term.epsilon,
                parts=tuple(sorted(term.parts, key=places.__getitem__)),
            )
        )
    return Norms(tuple(reversed(found)), reasons)
