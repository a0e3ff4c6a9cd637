# SPDX-License-Identifier: Apache-2.0
"""Reads XLA's shardings, and writes programs in the form in which XLA takes them."""

import io
from typing import Any

import jax
import numpy as np

# For each axis, the part that each device has, or None where all have all of it.
Parts = list[tuple[int, ...] | None]


def parts_of(sharding: Any, rank: int) -> tuple[int, Parts]:
    """Return how many devices a sharding names, and which part of each axis they have.

    A sharding that divides nothing need not name its devices.
    """
    if sharding.is_replicated() or sharding.is_maximal() or not sharding.is_tiled():
        return 1, [None] * rank
    # Tiles [2, 1, 2] of the devices 0 to 3 divide the first and the last axis of three:
    # device 2 is at (1, 0, 0). The parts are (0, 0, 1, 1), None and (0, 1, 0, 1).
    dims = list(sharding.tile_assignment_dimensions())
    devices = np.array(sharding.tile_assignment_devices())
    coordinates = np.indices(dims).reshape(len(dims), -1)
    by_device = np.empty_like(coordinates)
    by_device[:, devices] = coordinates
    return devices.size, [
        tuple(int(part) for part in by_device[axis]) if dims[axis] > 1 else None
        for axis in range(rank)
    ]


def bytecode(lowered: jax.stages.Lowered) -> bytes:
    """Return a lowered program as StableHLO's bytecode."""
    data = io.BytesIO()
    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.write_bytecode(data)
    return data.getvalue()
