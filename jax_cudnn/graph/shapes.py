# SPDX-License-Identifier: Apache-2.0
"""Checks a node's attributes and tensors; ffi/graph/shape_rules.cc does the same.

Both read the same rows of node_kinds.json and give the same verdicts, word for word.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.description import (
    Axis,
    Description,
    Letters,
    Role,
    axes_of,
)
from jax_cudnn.graph.rules import FLOATS, accumulator
from jax_cudnn.graph.spec import Attributes, DTypeName, Tensor
from jax_cudnn.graph.windows import window_count

Sizes = dict[str, int]


def check_attributes(kind: Description, attributes: Attributes) -> None:
    """Raise GraphError unless every attribute has a value that its row allows."""
    for name, field in kind.attributes.items():
        value = getattr(attributes, name)
        if field.type == "number" and not math.isfinite(value):
            raise GraphError(f"{kind.name}: {name} {value} is not finite")
        if field.entries and len(value) not in field.entries:
            counts = " or ".join(map(str, field.entries))
            raise GraphError(
                f"{kind.name}: {name} has {len(value)} entries, not {counts}"
            )
        values = value if field.type == "integers" else (value,)
        if field.least is not None and any(each < field.least for each in values):
            shown = list(value) if field.type == "integers" else value
            raise GraphError(f"{kind.name}: {name} {shown} is below {field.least}")
    if kind.arity and getattr(attributes, "mode", None) not in kind.arity:
        mode = getattr(attributes, "mode", None)
        raise GraphError(f"{kind.name}: mode {mode!r} is not a known one")


def check_tensors(
    kind: Description, roles: Mapping[str, Tensor], attributes: Attributes
) -> Mapping[str, int]:
    """Return the size of each letter, or raise GraphError where a tensor does not fit.

    ``roles`` has the tensors that the node has. A starred letter is followed by a
    number, as in "y0".
    """
    return _sizes(kind.form(roles), tuple(roles.items()), attributes)


# Tracing builds the same nodes again and again.
@functools.lru_cache(maxsize=8192)
def _sizes(
    kind: Description, tensors: tuple[tuple[str, Tensor], ...], attributes: Attributes
) -> Sizes:
    roles = dict(tensors)
    present = [role for role in kind.roles.values() if role.name in roles]
    for role in present:
        primal = role.name.removeprefix("grad_")
        if primal != role.name and primal in kind.roles and primal not in roles:
            raise GraphError(f"{kind.name}: {role.name} without {primal}")
    stars = _check_ranks(kind, present, roles)
    for name, field in kind.attributes.items():
        if field.letter and len(getattr(attributes, name)) != stars:
            count = len(getattr(attributes, name))
            raise GraphError(f"{kind.name}: {name} has {count} entries, not {stars}")
    for role in present:
        _check_dtype(kind, role, roles)
    axes = {role.name: axes_of(kind, role.name, stars) for role in present}
    sizes = _solve(kind, present, axes, roles)
    for letter, (size, window) in kind.windows.items():
        for i in range(stars):
            reach = _window_size(attributes, kind, window, i, sizes)
            count = _windows(attributes, i, sizes[f"{size}{i}"], reach)
            if count >= 2**63:
                raise GraphError(
                    f"{kind.name}: the size of spatial axis {i} overflows 64 bits"
                )
            sizes[f"{letter}{i}"] = count
    for role in present:
        _check_dims(kind, role, axes, roles, sizes)
    return sizes


def _dims_of(
    axes: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the product of the sizes of each axis's letters."""
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in axes)


def letters_of(
    kind: Description, role: str, roles: Mapping[str, Tensor]
) -> list[Letters]:
    """Return the letters of each axis of a role, beside tensors that fit."""
    kind = kind.form(roles)
    stars = (
        len(tensor.dims) - kind.roles[name].fixed_rank
        for name, tensor in roles.items()
        if kind.roles[name].is_starred
    )
    return [letters for _, letters in axes_of(kind, role, next(stars, 0))]


def result_dims(
    kind: Description, role: str, roles: Mapping[str, Tensor], attributes: Attributes
) -> tuple[int, ...]:
    """Return the dims of a result in a role, given the operands."""
    sizes = check_tensors(kind, roles, attributes)
    return _dims_of(letters_of(kind, role, roles), sizes)


def result_like(
    kind: Description, role: str, roles: Mapping[str, Tensor], attributes: Attributes
) -> Tensor:
    """Return the tensor of a result whose dtype follows from the operands."""
    dims = result_dims(kind, role, roles, attributes)
    return Tensor(
        name=role,
        dtype=cast("DTypeName", _wanted_dtype(kind.form(roles).roles[role], roles)),
        dims=dims,
        order=tuple(range(len(dims))),
    )


def resized(
    kind: Description,
    roles: Mapping[str, Tensor],
    attributes: Attributes,
    changed: Mapping[str, int],
) -> dict[str, tuple[int, ...]]:
    """Return the dims of each role with some letters in other sizes."""
    sizes = {**check_tensors(kind, roles, attributes), **changed}

    def dims(role: str, tensor: Tensor) -> tuple[int, ...]:
        axes = letters_of(kind, role, roles)
        new = _dims_of(axes, sizes)
        # What is broadcast stays so.
        return tuple(
            old if old == 1 and axis and not set(axis) & {*changed} else size
            for old, size, axis in zip(tensor.dims, new, axes, strict=True)
        )

    return {role: dims(role, tensor) for role, tensor in roles.items()}


# --- the steps ------------------------------------------------------------------------


_Axes = tuple[tuple[Axis, Letters], ...]


def _check_ranks(
    kind: Description, present: Sequence[Role], roles: Mapping[str, Tensor]
) -> int:
    """Return how many axes a starred letter stands for: the same in all roles."""
    stars: int | None = None
    for role in present:
        rank = len(roles[role.name].dims)
        fixed = role.fixed_rank
        if role.is_starred and stars is None:
            stars = rank - fixed
            least, most = kind.ranks
            if not least <= stars <= most:
                raise GraphError(
                    f"{kind.name}: {role.name} has rank {rank}, not {fixed + least} to "
                    f"{fixed + most}"
                )
        expected = fixed + (stars or 0) * role.is_starred
        if rank != expected:
            raise GraphError(
                f"{kind.name}: {role.name} has rank {rank}, not {expected}"
            )
    return stars or 0


def _check_dtype(kind: Description, role: Role, roles: Mapping[str, Tensor]) -> None:
    dtype = roles[role.name].dtype
    wanted = _wanted_dtype(role, roles)
    if wanted == "float" and dtype not in FLOATS:
        raise GraphError(f"{kind.name}: {role.name} is {dtype}, not a float")
    if wanted == "not bool" and dtype == "bool":
        raise GraphError(f"{kind.name}: {role.name} is bool")
    if wanted in ("float", "not bool", "any"):
        return
    allowed = wanted.split()
    if dtype not in allowed:
        raise GraphError(
            f"{kind.name}: {role.name} is {dtype}, not {' or '.join(allowed)}"
        )


def _wanted_dtype(role: Role, roles: Mapping[str, Tensor]) -> str:
    """Return the dtype that a role has to have, or what its row says of it."""
    if role.same_as is not None and role.same_as in roles:
        return roles[role.same_as].dtype
    if role.dtype.startswith("like "):
        return roles[role.dtype.removeprefix("like ")].dtype
    if role.is_sum:
        return accumulator(roles[role.dtype.removeprefix("sum of ")].dtype)
    return role.dtype


def _solve(
    kind: Description,
    present: Sequence[Role],
    axes: Mapping[str, _Axes],
    roles: Mapping[str, Tensor],
) -> Sizes:
    """Return the size of each letter: that of the first tensor that has it alone.

    A letter that operands have in brackets only has the size to which they broadcast.
    """
    sizes: Sizes = {}
    bracketed: Sizes = {}
    for are_inputs in (True, False):
        for role in present:
            if role.is_input != are_inputs or role.same_as is not None:
                continue
            pairs = zip(axes[role.name], roles[role.name].dims, strict=True)
            for (axis, letters), dim in pairs:
                if len(letters) == 1 and not axis.is_optional:
                    sizes.setdefault(letters[0], dim)
                elif len(letters) == 1 and bracketed.get(letters[0], 1) == 1:
                    bracketed[letters[0]] = dim
        if are_inputs:
            sizes = {**bracketed, **sizes}
    _factor(kind, present, axes, roles, sizes)
    return sizes


def _factor(
    kind: Description,
    present: Sequence[Role],
    axes: Mapping[str, _Axes],
    roles: Mapping[str, Tensor],
    sizes: Sizes,
) -> None:
    """Find the letters that stand beside others on every axis, by division."""
    # The query heads of attention are an axis "kg", and the key heads an axis "k". With
    # 8 query heads and 2 key heads, g is 8 / 2 = 4.
    while True:
        found = False
        for role in present:
            for i, (axis, letters) in enumerate(axes[role.name]):
                unknown = [letter for letter in letters if letter not in sizes]
                if axis.is_optional or len(unknown) != 1 or len(letters) == 1:
                    continue
                size = roles[role.name].dims[i]
                known = math.prod(sizes[x] for x in letters if x != unknown[0])
                if size % known if known else size:
                    others = [x for x in letters if x != unknown[0]]
                    name = " and ".join(kind.letters.get(x, x) for x in others)
                    raise GraphError(
                        f"{kind.name}: {size} along axis {i} of {role.name} does not "
                        f"divide by {known} ({name})"
                    )
                sizes[unknown[0]] = size // known if known else 1
                found = True
        if not found:
            return


def _window_size(
    attributes: Attributes, kind: Description, window: str, axis: int, sizes: Sizes
) -> int:
    """Return the size of a letter, or the entry of the attribute of that name."""
    if window in kind.attributes:
        return getattr(attributes, window)[axis]
    return sizes[f"{window}{axis}"]


def _windows(attributes: Any, axis: int, size: int, window: int) -> int:
    def dilation(name: str) -> int:
        # Kinds without dilations have 1.
        return getattr(attributes, name)[axis] if hasattr(attributes, name) else 1

    return window_count(
        size,
        window,
        stride=attributes.window_strides[axis],
        padding=(attributes.padding_low[axis], attributes.padding_high[axis]),
        size_dilation=dilation("lhs_dilation"),
        window_dilation=dilation("rhs_dilation"),
    )


def _check_dims(
    kind: Description,
    role: Role,
    axes: Mapping[str, _Axes],
    roles: Mapping[str, Tensor],
    sizes: Sizes,
) -> None:
    dims = roles[role.name].dims
    full = _dims_of([letters for _, letters in axes[role.name]], sizes)
    if role.same_as is not None and role.same_as in roles:
        full = roles[role.same_as].dims
    fits = [
        dim == size or (dim == 1 and axis.is_optional and role.same_as is None)
        for dim, size, (axis, _) in zip(dims, full, axes[role.name], strict=True)
    ]
    if not all(fits):
        is_free = role.same_as is None and all(
            axis.is_optional for axis, _ in axes[role.name]
        )
        text = f"{role.name} has dims {list(dims)}, not {list(full)}"
        if is_free:
            text = f"{role.name} dims {list(dims)} do not broadcast to {list(full)}"
        raise GraphError(f"{kind.name}: {text}")
