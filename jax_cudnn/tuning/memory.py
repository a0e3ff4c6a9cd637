# SPDX-License-Identifier: Apache-2.0
"""Returns how much device memory a program needs, and how much is free."""

import math
from typing import Any

import jax


def needed_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes that a program allocates: its results and what is between."""
    memory: Any = program.memory_analysis()
    if memory is None:  # The backend does not say.
        return 0
    return memory.output_size_in_bytes + memory.temp_size_in_bytes


def free_bytes(device: Any) -> float:
    """Return the bytes of a device's memory that nothing has; inf if unknown."""
    stats = device.memory_stats()  # None on a CPU.
    if not stats or "bytes_limit" not in stats:
        return math.inf
    return stats["bytes_limit"] - stats["bytes_in_use"]
