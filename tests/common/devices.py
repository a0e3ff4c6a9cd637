# SPDX-License-Identifier: Apache-2.0
"""Operands on several devices, and what a compiled program sends between them."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Function = Callable[..., jax.Array]
Spec = tuple[Any, ...]

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> jax.sharding.Mesh:
    """Return a mesh of the CPU's devices."""
    devices = jax.local_devices(backend="cpu")[: math.prod(sizes.values())]
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))


def placed(
    mesh: jax.sharding.Mesh, arrays: Sequence[jax.Array], specs: Sequence[Spec]
) -> list[jax.Array]:
    """Return arrays with shardings."""
    return [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def gradient(function: Function) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the gradient with respect to all operands, the cotangent not constant."""

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(*operands).astype(jnp.float32)))

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(loss, argnums=tuple(range(len(operands))))(*operands)

    return run


def collectives(function: Function, *operands: jax.Array) -> dict[str, int]:
    """Return how often a compiled program sends data between devices, by the way."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    assert text is not None
    found = {
        name: len(re.findall(rf"= .*\b{name}(?:-start)?\(", text))
        for name in _COLLECTIVES
    }
    return {name: count for name, count in found.items() if count}
