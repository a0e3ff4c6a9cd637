# SPDX-License-Identifier: Apache-2.0
"""Chooses the GPU that plans are for: one of this machine, or one by its name."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from jax_cudnn import native, offline
from jax_cudnn.config import Options
from jax_cudnn.graph import Target
from jax_cudnn.native import Candidate, PlanInfo
from jax_cudnn.offline import NamedGpu


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalGpu:
    """The GPU of this machine that the process plans for."""

    ordinal: int
    target: Target
    is_here: ClassVar[bool] = True

    def plan(self, graph_json: str, request: str = "") -> PlanInfo:
        """Return the plan of a graph; built once, then cached."""
        return native.plan(graph_json, request=request, device=self.ordinal)

    def candidates(self, graph_json: str, request: str = "") -> tuple[Candidate, ...]:
        """Return cuDNN's candidates for a graph, none of them built."""
        return native.candidates(graph_json, request=request, device=self.ordinal)


# A GPU that plans are made for, here or elsewhere; hashable.
Gpu = LocalGpu | NamedGpu


def local_device() -> Any:
    """Return the first local CUDA device.

    Raises:
      RuntimeError: JAX has none.
    """
    return jax.local_devices(backend="cuda")[0]


def local_target() -> tuple[int, Target] | None:
    """Return the first local CUDA device's ordinal and description, if JAX has one."""
    try:
        device = local_device()
    except RuntimeError:
        return None
    ordinal = device.local_hardware_id
    return ordinal, native.device_target(ordinal)


def gpu_for(options: Options) -> Gpu | None:
    """Return the GPU that a call is planned for; None where there is none.

    Raises:
      ValueError: the options name a GPU that is not known.
      LibraryError: they name one, and cuDNN is not installed here.
    """
    if options.device is not None:
        return offline.named_gpu(options.device)
    local = local_target()
    return None if local is None else LocalGpu(ordinal=local[0], target=local[1])


def local_ordinals() -> list[int]:
    """Return the ordinals of all CUDA devices of this process, which has some."""
    return [device.local_hardware_id for device in jax.local_devices(backend="cuda")]
