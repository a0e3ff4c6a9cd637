# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts of whole arrays, which are divided over a mesh."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from jax_cudnn.ops.common.arguments import describe
from jax_cudnn.ops.common.meshes import (
    by_operands,
    check_axes,
    device_count,
    typed_part,
)
from jax_cudnn.ops.products.moe.call import OP, Settings, run
from jax_cudnn.ops.products.moe.routing import Auxiliary
from jax_cudnn.ops.products.moe.states import States


def run_sharded(
    mesh: Mesh | AbstractMesh,
    settings: Settings,
    arrays: Mapping[str, jax.Array],
    states: States,
) -> tuple[jax.Array, Auxiliary, States]:
    """Return the result, the losses and the next states of whole arrays."""
    check_axes(
        OP,
        mesh,
        "experts, batch and hidden widths",
        expert_axis=settings.expert,
        batch_axis=settings.batch,
        tensor_axis=settings.tensor,
    )
    settings.check(arrays, devices=1)
    specs = {name: _spec(name, x.ndim, settings) for name, x in arrays.items()}
    for name, x in arrays.items():
        _check_sizes(mesh, name, x, specs[name])
    return _program(mesh, tuple(specs.items()), settings)(states, *arrays.values())


def _spec(name: str, rank: int, settings: Settings) -> P:
    """Return how an array of the layer is divided."""
    expert, tensor = settings.expert or None, settings.tensor or None
    specs = {
        "x": P((*settings.batch, *settings.expert) or None, *[None] * (rank - 1)),
        "gate_w": P(expert, None, tensor),
        "up_w": P(expert, None, tensor),
        "down_w": P(expert, tensor, None),
        "gate_bias": P(expert, tensor),
        "up_bias": P(expert, tensor),
        "down_bias": P(expert, None),
        "shared_gate_w": P(None, tensor),
        "shared_up_w": P(None, tensor),
        "shared_down_w": P(tensor, None),
    }
    return specs.get(name, P())


def _check_sizes(mesh: Mesh | AbstractMesh, name: str, x: jax.Array, spec: P) -> None:
    """Raise ValueError unless the devices divide an array evenly."""
    if name == "x" and x.ndim == 1:
        raise ValueError(
            f"{OP}: x is {describe(x)}, one token. Devices divide the first of its "
            "axes (..., width). Give it an axis of tokens."
        )
    for number, axis in enumerate(tuple(spec)):
        count = device_count(mesh, axis)
        if x.shape[number] % count:
            raise ValueError(
                f"{OP}: {name} is {describe(x)}. Its axis {number} of size "
                f"{x.shape[number]} is divided over {axis!r}, which has {count} "
                "devices, and must be a multiple of that. "
                + ("Pad the array, or use" if name == "x" else "Use")
                + " an axis of fewer devices."
            )


# One for each way to call it, so that calls outside of jit compile once.
@functools.lru_cache(maxsize=256)
def _program(
    mesh: Mesh | AbstractMesh, specs: tuple[tuple[str, P], ...], settings: Settings
) -> Any:
    names, in_specs = zip(*specs, strict=True)

    def of_one_device(
        states: States, *arrays: jax.Array
    ) -> tuple[jax.Array, Auxiliary, States]:
        return run(settings, dict(zip(names, arrays, strict=True)), states)

    sharded = jax.shard_map(
        by_operands(mesh, of_one_device),
        mesh=mesh,
        # Gradients by the states are added up over the devices.
        in_specs=(P(), *in_specs),
        out_specs=(dict(specs)["x"], P(), P()),
    )
    if AxisType.Explicit not in mesh.axis_types:
        return jax.jit(sharded)

    def moved(
        states: States, *arrays: jax.Array
    ) -> tuple[jax.Array, Auxiliary, States]:
        shardings = (NamedSharding(mesh, typed_part(mesh, spec)) for spec in in_specs)
        states = reshard(states, NamedSharding(mesh, P()))
        return sharded(states, *map(reshard, arrays, shardings))

    return jax.jit(moved)
