# SPDX-License-Identifier: Apache-2.0
"""The mesh axis that a sequence is sharded over: its size, with clear errors."""

from jax_cudnn.ops.common.meshes import AxisName, size_along


def axis_size(op: str, axis_name: AxisName) -> int:
    """Return how many devices there are along an axis of the surrounding shard_map."""
    otherwise = ", or use jax_cudnn.parallel.sharded_sdpa on whole arrays"
    return size_along(op, "axis_name", axis_name, otherwise)
