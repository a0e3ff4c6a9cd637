# SPDX-License-Identifier: Apache-2.0
"""Registers the FFI state type and the two targets with XLA, for CUDA only."""

import functools
from dataclasses import dataclass

from jax_cudnn.native._extension import extension

# The last result is the workspace; may be captured into a command buffer.
TARGET_CAPTURED = "jax_cudnn.graph"
# Takes its workspace from XLA at run time; never captured.
TARGET_SCRATCH = "jax_cudnn.graph_scratch"

_STATE_TYPE = "jax_cudnn.GraphState"
# Not "cpu": a stateful handler registered for it keeps JAX's CPU backend from starting
# (seen with jaxlib 0.11.2).
_PLATFORM = "CUDA"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildInfo:
    """The build of the extension; ``builder`` is a digest of its sources."""

    builder: str
    cpu: str
    frontend_version: str
    cudnn_header_version: int
    ffi_api_version: tuple[int, int]


@functools.cache
def register_targets() -> None:
    """Register the state type and both targets; the second call does nothing.

    Starts no backend and opens no library but the extension.
    """
    native = extension()
    import jax.ffi  # here: the doctor runs where JAX cannot be imported

    # The type goes first: the handlers' metadata carries its id, which XLA assigns.
    jax.ffi.register_ffi_type(_STATE_TYPE, native.state_type(), platform=_PLATFORM)
    for name, handlers in (
        (TARGET_CAPTURED, native.captured_handlers()),
        (TARGET_SCRATCH, native.scratch_handlers()),
    ):
        jax.ffi.register_ffi_target(name, handlers, platform=_PLATFORM)


def build_info() -> BuildInfo:
    """Return the versions that the extension was compiled with."""
    return BuildInfo(**extension().build_info())
