# SPDX-License-Identifier: Apache-2.0
"""Meshes and their axes as arguments of functions over several devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

# An axis of the mesh, or several, the first one varying slowest.
AxisName = str | tuple[str, ...]


def names_in(axis: AxisName | None) -> tuple[str, ...]:
    """Return the names of the mesh axes that an argument names; none for None."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else axis


def check_names(op: str, argument: str, axis: AxisName | None) -> tuple[str, ...]:
    """Return the names that an argument has, or raise TypeError for what is none."""
    names = names_in(axis) if axis is None or isinstance(axis, str | tuple) else (axis,)
    if not all(isinstance(name, str) for name in names):
        raise _no_names(op, argument, axis)
    return names


def _no_names(op: str, argument: str, axis: object) -> TypeError:
    return TypeError(
        f"{op}: {argument}={axis!r} is not the name of a mesh axis, nor a tuple of "
        "names. Pass one of the two."
    )


def check_name(op: str, argument: str, axis: AxisName | None) -> None:
    """Raise TypeError unless an argument names one axis at least."""
    if not check_names(op, argument, axis):
        raise _no_names(op, argument, axis)


def size_along(op: str, argument: str, axis: AxisName, otherwise: str = "") -> int:
    """Return how many devices there are along an axis of the surrounding shard_map.

    ``otherwise`` is what to do without such an axis, beside adding it.
    """
    check_name(op, argument, axis)
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        known = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
        raise ValueError(
            f"{op}: {argument}={axis!r} is not an axis that is sharded here "
            f"({f'those are {known}' if known else 'there is none'}). Call it inside "
            f"jax.shard_map over that axis{otherwise}."
        ) from None


def mesh_of(op: str, mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """Return a mesh, or the one that is set; raise ValueError if there is none."""
    found = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not isinstance(found, Mesh | AbstractMesh):
        raise TypeError(
            f"{op}: mesh is {type(mesh).__name__}. It must be a jax.sharding.Mesh, as "
            "jax.make_mesh returns it, or an AbstractMesh."
        )
    if found.empty:
        raise ValueError(
            f"{op}: there is no mesh. Pass one as mesh, for example "
            'jax.make_mesh((8,), ("seq",)), or set one with jax.set_mesh.'
        )
    return found


def check_axes(
    op: str, mesh: Mesh | AbstractMesh, what: str, **axes: AxisName | None
) -> None:
    """Raise ValueError unless each name is an axis of the mesh, and is used once.

    ``what`` says what an axis of the mesh can shard.
    """
    seen: set[str] = set()
    for argument, axis in axes.items():
        for name in check_names(op, argument, axis):
            if name not in mesh.axis_names:
                raise ValueError(
                    f"{op}: {argument}={axis!r} is not an axis of the mesh, whose "
                    f"axes are {', '.join(map(repr, mesh.axis_names))}."
                )
            if name in seen:
                raise ValueError(
                    f"{op}: {argument}={axis!r} is used for another axis as well. "
                    f"Each mesh axis can shard one of {what}."
                )
            seen.add(name)


def device_count(mesh: Mesh | AbstractMesh, axis: AxisName | None) -> int:
    """Return the number of devices along an axis of a mesh, or along several."""
    return math.prod(mesh.shape[name] for name in names_in(axis))


def by_operands(
    mesh: Mesh | AbstractMesh, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function for `jax.shard_map` that may be inside of another one.

    Its derivative reads operands only there: JAX's `shard_map` within another one that
    is manual along some axes does not hand over other residuals (JAX 0.10 and 0.12).
    """
    if AxisType.Manual not in mesh.axis_types:
        return function
    return jax.checkpoint(function, prevent_cse=False)


def typed_part(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> PartitionSpec:
    """Return the part of a sharding that is in types: along the mesh's explicit axes.

    Along the others, `jax.shard_map` moves arrays by itself.
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def explicit(entry: Any) -> tuple[str, ...] | None:
        names = names_in(entry)
        return tuple(x for x in names if kinds[x] == AxisType.Explicit) or None

    return PartitionSpec(*map(explicit, spec))
