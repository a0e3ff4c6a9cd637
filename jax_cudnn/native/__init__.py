# SPDX-License-Identifier: Apache-2.0
"""The C++ extension, loaded when first needed; starts no JAX backend.

``register_targets`` tells XLA of the handlers and needs nothing but the extension
itself. Everything that plans opens cuDNN on first use; see library.py.
"""

from jax_cudnn.native.library import (
    LibraryInfo,
    cudnn_version,
    load_libraries,
    version_text,
)
from jax_cudnn.native.logs import LogSink, set_log_sink
from jax_cudnn.native.planner import (
    CacheStats,
    Candidate,
    LaunchBuffers,
    PlanInfo,
    cache_stats,
    candidates,
    clear_cache,
    device_properties,
    device_target,
    parse_choice,
    parse_graph,
    plan,
    plan_offline,
    time_plan,
)
from jax_cudnn.native.registration import (
    TARGET_CAPTURED,
    TARGET_SCRATCH,
    build_info,
    register_targets,
)

__all__ = [
    "TARGET_CAPTURED",
    "TARGET_SCRATCH",
    "CacheStats",
    "Candidate",
    "LaunchBuffers",
    "LibraryInfo",
    "LogSink",
    "PlanInfo",
    "build_info",
    "cache_stats",
    "candidates",
    "clear_cache",
    "cudnn_version",
    "device_properties",
    "device_target",
    "load_libraries",
    "parse_choice",
    "parse_graph",
    "plan",
    "plan_offline",
    "register_targets",
    "set_log_sink",
    "time_plan",
    "version_text",
]
