# SPDX-License-Identifier: Apache-2.0
"""Recognises JAX's activations among the operations of a program.

A jaxpr does not keep the name of every function, so they are found by comparing the
operations with those that JAX's function is traced to. Found ones are one node, which
is computed in f32 and rounded once, and has a gradient of its own.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_cudnn.fusing.program import Arrays, Atom, Operation, Program, Value, program_of
from jax_cudnn.lowering import same_parameters
from jax_cudnn.ops.common.activations import Form, known_forms


@dataclass(frozen=True, eq=False, slots=True)
class Activation:
    """One of JAX's activations, and the operations that it was found as."""

    form: Form
    parts: tuple[Operation, ...]
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]

    @property
    def name(self) -> str:
        """The name of its node."""
        return self.form.mode

    @property
    def place(self) -> str:
        """The place in the user's code that asked for it."""
        return self.parts[0].place

    @property
    def has_effects(self) -> bool:
        """It computes, and does nothing else."""
        return False

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values among its inputs."""
        return tuple(x for x in self.inputs if isinstance(x, Value))

    def run(self, arrays: Arrays) -> None:
        """Compute it as JAX does, and add its result to the arrays."""
        for operation in self.parts:
            operation.run(arrays)


def with_activations(program: Program) -> tuple[Operation | Activation, ...]:
    """Return the operations of a program, with activations as one each."""
    operations = program.operations
    last_reader = {x: i for i, each in enumerate(operations) for x in each.reads}
    last_reader |= {x: len(operations) for x in program.results if isinstance(x, Value)}
    found: list[Operation | Activation] = []
    i = 0
    while i < len(operations):
        activation = next(_activations(operations, i, last_reader), None)
        found.append(activation or operations[i])
        i += len(activation.parts) if activation else 1
    return tuple(found)


def _activations(
    operations: Sequence[Operation], start: int, last_reader: dict[Value, int]
) -> Any:
    """Yield the activations that begin there, those of the most operations first."""
    first = operations[start]
    aval = first.outputs[0].aval if first.outputs else None
    floats = [x for x in first.reads if jax.numpy.issubdtype(x.dtype, np.floating)]
    if aval is None or not floats:
        return
    for form, known in _known_programs(floats[0].shape, floats[0].dtype):
        parts = operations[start : start + len(known.operations)]
        x = _argument(known, parts)
        if x is None:
            continue
        (result,) = parts[-1].outputs
        inner = [made for each in parts for made in each.outputs if made is not result]
        if any(last_reader.get(made, -1) >= start + len(parts) for made in inner):
            continue  # What is within it is read elsewhere.
        yield Activation(form, tuple(parts), (x,), (result,))


@functools.lru_cache(maxsize=512)
def _known_programs(
    shape: tuple[int, ...], dtype: np.dtype
) -> tuple[tuple[Form, Program], ...]:
    like = jax.ShapeDtypeStruct(shape, dtype)
    found: list[tuple[Form, Program]] = []
    for function, form in known_forms():
        # JAX's function itself, whatever the user may have set for this trace.
        program = program_of(jax.make_jaxpr(lambda x, f=function: f(x))(like))
        last = program.operations[-1:]
        is_chain = len(program.operations) > 1 and not program.constants
        if is_chain and program.results == last[0].outputs:
            found.append((form, program))
    return tuple(sorted(found, key=lambda each: -len(each[1].operations)))


def _argument(known: Program, parts: Sequence[Operation]) -> Value | None:
    """Return what operations are a known function of; None if they are not."""
    if len(parts) != len(known.operations):
        return None
    partners: dict[Value, Value] = {}

    def same_atom(x: Atom, y: Atom) -> bool:
        if x.aval.shape != y.aval.shape or x.dtype != y.dtype:
            return False
        if isinstance(x, Value) and isinstance(y, Value):
            return partners.setdefault(x, y) is y
        if isinstance(x, Value) or isinstance(y, Value):
            return False
        return x.value.tobytes() == y.value.tobytes()

    for own, other in zip(known.operations, parts, strict=True):
        is_same = (
            own.equation.primitive is other.equation.primitive
            and len(own.inputs) == len(other.inputs)
            and all(map(same_atom, own.inputs, other.inputs))
            and same_parameters(own.equation, other.equation)
        )
        if not is_same:
            return None
        partners.update(zip(own.outputs, other.outputs, strict=True))
    return partners[known.inputs[0]]
