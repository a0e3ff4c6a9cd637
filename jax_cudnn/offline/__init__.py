# SPDX-License-Identifier: Apache-2.0
"""Planning for a GPU by its name, which need not be here, with the real cuDNN.

The planning is done in a process of its own: a stand-in for NVIDIA's driver is loaded
there, where there is no driver, and a crash of cuDNN ends that process only.
"""

from jax_cudnn.offline.gpus import GpuDescription, find, known
from jax_cudnn.offline.planner import (
    NamedGpu,
    has_all_engines,
    named_gpu,
    obstacle,
)

__all__ = [
    "GpuDescription",
    "NamedGpu",
    "find",
    "has_all_engines",
    "known",
    "named_gpu",
    "obstacle",
]
