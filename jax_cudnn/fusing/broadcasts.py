# SPDX-License-Identifier: Apache-2.0
"""Finds what an array was before it was broadcast, and its axes in the result."""

from collections.abc import Mapping
from typing import Any

from jax_cudnn.fusing.program import Atom, Operation, Value

# What made each value.
Makers = Mapping[Value, Any]


def narrowed(atom: Atom, rank: int, makers: Makers) -> tuple[Atom, tuple[int, ...]]:
    """Return what an operand was broadcast from, in a shape of that rank."""
    # If b (5,) is reshaped to (1, 5) and broadcast to (7, 5), return b and (1, 5).
    # The sizes other than 1, and the axes of the full rank that they are.
    sizes = {axis: size for axis, size in enumerate(atom.shape) if size != 1}
    places = {axis: axis for axis in sizes}
    while isinstance(atom, Value) and (maker := makers.get(atom)) is not None:
        inner = inner_axes(maker)
        if inner is None:
            break
        source = maker.inputs[0]
        places = {
            own: places[outer] for own, outer in inner.items() if source.shape[own] != 1
        }
        atom = source
    shape = [1] * rank
    for own, place in places.items():
        shape[place] = atom.shape[own]
    return atom, tuple(shape)


def inner_axes(maker: Any) -> dict[int, int] | None:
    """Return where the axes of an operand are in the result that repeats it, or None.

    Axes of size 1 need not be among them.
    """
    if not isinstance(maker, Operation) or maker.params.get("sharding") is not None:
        return None
    if maker.name == "broadcast_in_dim":
        if len(maker.inputs) != 1:
            return None
        return dict(enumerate(maker.params["broadcast_dimensions"]))
    is_plain = maker.params.get("dimensions") is None or maker.name == "squeeze"
    if maker.name in ("reshape", "squeeze") and is_plain:
        before, after = (
            [axis for axis, size in enumerate(x.shape) if size != 1]
            for x in (maker.inputs[0], maker.outputs[0])
        )
        sizes = (
            [maker.inputs[0].shape[axis] for axis in before],
            [maker.outputs[0].shape[axis] for axis in after],
        )
        if sizes[0] == sizes[1]:
            return dict(zip(before, after, strict=True))
    return None
