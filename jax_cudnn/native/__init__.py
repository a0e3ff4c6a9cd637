# SPDX-License-Identifier: Apache-2.0
"""The C++ extension, loaded when first needed; starts no JAX backend.

``register_targets`` tells XLA of the handlers and needs nothing but the extension
itself. Everything that plans opens cuDNN on first use; see library.py.
"""

from jax_cudnn.native._extension import (
    extension_directory,
    extension_problem,
    library_directories,
)
from jax_cudnn.native.library import (
    LibraryInfo,
    cudnn_version,
    load_libraries,
    version_text,
)
from jax_cudnn.native.logs import LogSink, set_log_sink
from jax_cudnn.native.planner import (
    CAUSAL_CONV_ENGINE,
    CUBLASLT_ENGINE,
    CacheStats,
    Candidate,
    LaunchBuffers,
    PlanInfo,
    cache_stats,
    candidates,
    clear_cache,
    cublaslt_preference,
    cublaslt_request,
    device_properties,
    device_target,
    has_cublaslt_plan,
    is_by_place,
    is_cublaslts,
    plan,
    plan_offline,
    time_plan,
)
from jax_cudnn.native.registration import (
    TARGET_CAPTURED,
    TARGET_SCRATCH,
    BuildInfo,
    build_info,
    register_targets,
)
from jax_cudnn.native.store import (
    ImportedPlan,
    clear_plan_store,
    export_plan,
    export_plan_offline,
    import_plan,
    import_plan_offline,
    plan_store_files,
    set_plan_store,
    set_plan_store_source,
)

__all__ = [
    "CAUSAL_CONV_ENGINE",
    "CUBLASLT_ENGINE",
    "TARGET_CAPTURED",
    "TARGET_SCRATCH",
    "BuildInfo",
    "CacheStats",
    "Candidate",
    "ImportedPlan",
    "LaunchBuffers",
    "LibraryInfo",
    "LogSink",
    "PlanInfo",
    "build_info",
    "cache_stats",
    "candidates",
    "clear_cache",
    "clear_plan_store",
    "cublaslt_preference",
    "cublaslt_request",
    "cudnn_version",
    "device_properties",
    "device_target",
    "export_plan",
    "export_plan_offline",
    "extension_directory",
    "extension_problem",
    "has_cublaslt_plan",
    "import_plan",
    "import_plan_offline",
    "is_by_place",
    "is_cublaslts",
    "library_directories",
    "load_libraries",
    "plan",
    "plan_offline",
    "plan_store_files",
    "register_targets",
    "set_log_sink",
    "set_plan_store",
    "set_plan_store_source",
    "time_plan",
    "version_text",
]
