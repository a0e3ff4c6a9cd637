# SPDX-License-Identifier: Apache-2.0
"""The mesh axis that a sequence is sharded over: its size, with clear errors."""

import jax

from jax_cudnn.ops.common.meshes import AxisName


def axis_size(op: str, axis_name: AxisName) -> int:
    """Return how many devices there are along an axis of the surrounding shard_map."""
    is_name = isinstance(axis_name, str)
    is_names = isinstance(axis_name, tuple) and all(
        isinstance(name, str) for name in axis_name
    )
    if not is_name and not (is_names and axis_name):
        raise TypeError(
            f"{op}: axis_name={axis_name!r} is not the name of a mesh axis, nor a "
            "tuple of names."
        )
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        known = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
        raise ValueError(
            f"{op}: axis_name={axis_name!r} is not an axis that is sharded here "
            f"({f'those are {known}' if known else 'there is none'}). Call it inside "
            "jax.shard_map over that axis, or use "
            "jax_cudnn.parallel.sharded_sdpa on whole arrays."
        ) from None
