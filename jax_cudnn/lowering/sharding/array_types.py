# SPDX-License-Identifier: Apache-2.0
"""Reads from the types of arrays how they are sharded, and changes that."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from jax_cudnn.lowering._jax import ShapedArray


def _type(x: jax.Array | ShapedArray) -> Any:
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def is_explicitly_sharded(x: jax.Array | ShapedArray) -> bool:
    """Whether an array's type says that it is sharded along axes of a mesh."""
    return any(entry is not None for entry in explicit_spec(x))


def explicit_spec(x: jax.Array | ShapedArray) -> tuple[Any, ...]:
    """Return along which axes of the mesh an array's type says that it is sharded."""
    return _entries(_type(x).sharding.spec)


def partial_axes(x: jax.Array | ShapedArray) -> frozenset[str]:
    """Return the axes of the mesh along which an array, or its gradient, is unreduced.

    JAX calls an array reduced along axes if its gradient is to stay unreduced: devices
    then have partial sums of it, which nobody has added up yet.
    """
    kind = _type(x)
    both = (kind.sharding.spec, kind.manual_axis_type)
    return frozenset[str]().union(*(x.unreduced | x.reduced for x in both))


def _entries(spec: jax.sharding.PartitionSpec) -> tuple[Any, ...]:
    # JAX 0.10.0 has no `partitions`. Later ones do not iterate over what is reduced.
    return tuple(getattr(spec, "partitions", spec))


def axes_in(entry: Any) -> tuple[str, ...]:
    """Return the axes of the mesh that an entry of a sharding names."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def explicit_mesh(operands: Sequence[jax.Array | ShapedArray]) -> Any:
    """Return the mesh of operands of which some say how they are sharded."""
    return next(_type(x).sharding.mesh for x in operands if is_explicitly_sharded(x))


def typed_as(
    x: jax.Array, spec: Iterable[Any], like: Sequence[jax.Array | ShapedArray]
) -> jax.Array:
    """Return an array that is sharded so in its type, on the mesh of other arrays."""
    full = (*spec, *(None,) * x.ndim)[: x.ndim]
    if explicit_spec(x) == full:
        return x
    sharding = jax.sharding.NamedSharding(
        explicit_mesh(like), jax.sharding.PartitionSpec(*full)
    )
    return jax.sharding.reshard(x, sharding)


def gathered(x: jax.Array) -> jax.Array:
    """Return an array whose type does not say that it is sharded."""
    return typed_as(x, (), [x]) if is_explicitly_sharded(x) else x


def struct_of(x: jax.Array | ShapedArray) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, and all else that its type says."""
    kind = _type(x)
    return jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=None if kind.sharding.mesh.empty else kind.sharding,
        manual_axis_type=kind.manual_axis_type,
    )


def splittable(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Return an array whose axis can be reshaped into so many parts of equal size.

    It is gathered along the axis where a device's shard is no whole number of parts.
    """
    spec = list(explicit_spec(x))
    if not is_explicitly_sharded(x) or spec[axis] is None:
        return x
    sizes = explicit_mesh([x]).shape
    if count % math.prod(sizes[name] for name in axes_in(spec[axis])) == 0:
        return x
    spec[axis] = None
    return typed_as(x, spec, like=[x])


def typed_like(x: jax.Array, other: jax.Array | ShapedArray) -> jax.Array:
    """Return an array, sharded as another one of its shape where types say so."""
    both = (x, other)
    if not any(map(is_explicitly_sharded, both)):
        return x
    return typed_as(x, explicit_spec(other), like=both)


def typed_along(x: jax.Array, other: jax.Array, axis: int) -> jax.Array:
    """Return an array of one axis, sharded as that axis of another one."""
    both = (x, other)
    if not any(map(is_explicitly_sharded, both)):
        return x
    return typed_as(x, (explicit_spec(other)[axis],), like=both)


def sharded_where_free(
    x: jax.Array, other: jax.Array, axes: Iterable[tuple[int, int]] | None = None
) -> jax.Array:
    """Return an array sharded as another one along axes along which it is not.

    `axes` are pairs of such axes, by default the same ones of both. This gives no
    device more than it has: kernels gather axes that they need whole, and reshapes
    forget how axes of size 1 and 0 are sharded.
    """
    if not is_explicitly_sharded(other):
        return x
    sizes, theirs = explicit_mesh([other]).shape, explicit_spec(other)
    spec = [*explicit_spec(x)]
    taken = {name for entry in spec for name in axes_in(entry)}
    for own, source in axes or [(i, i) for i in range(x.ndim)]:
        names = axes_in(theirs[source])
        count = math.prod(sizes[name] for name in names)
        if spec[own] is None and taken.isdisjoint(names) and x.shape[own] % count == 0:
            spec[own] = theirs[source]
            taken.update(names)
    return typed_as(x, spec, like=(other,))


def gathered_along(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Return an array whose type does not say that it is sharded along some axes."""
    if not is_explicitly_sharded(x):
        return x
    spec = (None if i in axes else each for i, each in enumerate(explicit_spec(x)))
    return typed_as(x, spec, like=[x])


def sharded_as(x: jax.Array, sharding: Any) -> jax.Array:
    """Return an array with a sharding, in its type if the mesh has it there."""
    if sharding is None:
        return x
    if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def is_on_explicit_mesh(sharding: Any) -> bool:
    """Whether a sharding, or the mesh that is set, has axes that types speak of."""
    mesh = getattr(sharding, "mesh", None) or jax.sharding.get_abstract_mesh()
    return AxisType.Explicit in mesh.axis_types


def unreduced_in(sharding: Any) -> frozenset[str]:
    """Return the axes along which a sharding says that devices keep partial sums."""
    return frozenset(getattr(_spec(sharding), "unreduced", ()))


def entries_of(sharding: Any, rank: int) -> tuple[Any, ...]:
    """Return how a sharding, of an array of that rank, says that each axis is."""
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    found = (None if x is unconstrained else x for x in _entries(_spec(sharding)))
    return (*found, *(None,) * rank)[:rank]


def explicit_part(sharding: Any, axes: Sequence[int] = (), rank: int = 0) -> Any:
    """Return a sharding as JAX's own operations take it: None unless types speak of it.

    It may be made that of an array with further axes of size 1, counted from the end,
    and with them of that rank.
    """
    if sharding is None or not is_on_explicit_mesh(sharding):
        return None
    if not axes:
        return sharding
    own = iter(entries_of(sharding, rank - len(axes)))
    entries = (None if i in axes else next(own) for i in range(-rank, 0))
    spec = _spec(sharding).update(partitions=tuple(entries))
    return spec if sharding is _spec(sharding) else sharding.update(spec=spec)


def _spec(sharding: Any) -> Any:
    return getattr(sharding, "spec", sharding)
