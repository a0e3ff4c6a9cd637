# SPDX-License-Identifier: Apache-2.0
"""NVIDIA cuDNN's graph API under JAX's transformations.

``jax_cudnn.flax`` is imported when it is first asked for: it imports Flax, which is an
optional dependency.
"""

import importlib as _importlib
import importlib.util as _importlib_util
import typing as _typing

from jax_cudnn import keywords as _keywords
from jax_cudnn import startup as _startup
from jax_cudnn.errors import GraphError, LibraryError, UnsupportedError

if _typing.TYPE_CHECKING:
    from jax_cudnn import flax as flax

__version__ = "0.1.0"

try:
    from jax_cudnn import native as _native

    _native.register_targets()  # first: without the extension, nothing else is of use

    from jax.export import DisabledSafetyCheck

    from jax_cudnn import cache as _cache
    from jax_cudnn import (
        checkpoint_policies,
        f8,
        kv_cache,
        masks,
        moe,
        parallel,
        plans,
        score_mods,
    )
    from jax_cudnn.fusing.explanation import FuseExplanation
    from jax_cudnn.fusing.function import Fused, fuse
    from jax_cudnn.lowering import LAYOUT_TARGET as _LAYOUT_TARGET
    from jax_cudnn.lowering import PARTITIONED_TARGET as _PARTITIONED_TARGET
    from jax_cudnn.lowering import UNDIVIDED_TARGET as _UNDIVIDED_TARGET
    from jax_cudnn.ops.attention.caches.cached_sdpa import cached_sdpa
    from jax_cudnn.ops.attention.caches.paged_sdpa import paged_sdpa
    from jax_cudnn.ops.attention.qkv_sdpa import qkv_sdpa
    from jax_cudnn.ops.attention.rotary import apply_rotary
    from jax_cudnn.ops.attention.sdpa import sdpa
    from jax_cudnn.ops.norms.adaptive import adaptive_layer_norm
    from jax_cudnn.ops.norms.batch import batch_norm
    from jax_cudnn.ops.norms.groups import group_norm, instance_norm
    from jax_cudnn.ops.norms.rows import layer_norm, rms_norm
    from jax_cudnn.ops.pooling import avg_pool, max_pool
    from jax_cudnn.ops.products.causal_conv1d import causal_conv1d
    from jax_cudnn.ops.products.conv import conv
    from jax_cudnn.ops.products.dot_general import dot_general
    from jax_cudnn.ops.products.folded_norms import fold_batch_norm
    from jax_cudnn.ops.products.gated import gated_matmul
    from jax_cudnn.ops.products.gated_conv import gated_conv
    from jax_cudnn.ops.products.matmul import matmul
    from jax_cudnn.ops.products.ragged_dot import ragged_dot

    _cache.connect()

    # What `jax.export.export(f, disabled_checks=...)` needs to accept our custom calls.
    # A program exported with a GPU at hand is for that kind of GPU and cuDNN, and
    # refuses to run elsewhere; exported without one (JAX_PLATFORMS=cpu) it plans where
    # it runs. A graph of another schema number is refused. A program for several
    # devices is divided where it is loaded.
    EXPORT_SAFETY_CHECKS = (
        DisabledSafetyCheck.custom_call(_native.TARGET_CAPTURED),
        DisabledSafetyCheck.custom_call(_native.TARGET_SCRATCH),
        DisabledSafetyCheck.custom_call(_PARTITIONED_TARGET),
        DisabledSafetyCheck.custom_call(_LAYOUT_TARGET),
        DisabledSafetyCheck.custom_call(_UNDIVIDED_TARGET),
    )
except Exception as _error:
    if not _startup.is_program():
        if isinstance(_error, LibraryError):
            raise ImportError(str(_error)) from _error
        raise
    _startup.failure = _error  # which __main__.py tells of

if not _typing.TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> _typing.Any:
        if name == "flax":
            return _importlib.import_module(f"{__name__}.flax")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    has_flax = _importlib_util.find_spec("flax") is not None
    return sorted({*globals(), *(("flax",) if has_flax else ())})


# Without "flax": a star import would import Flax.
__all__ = [
    "EXPORT_SAFETY_CHECKS",
    "FuseExplanation",
    "Fused",
    "GraphError",
    "LibraryError",
    "UnsupportedError",
    "__version__",
    "adaptive_layer_norm",
    "apply_rotary",
    "avg_pool",
    "batch_norm",
    "cached_sdpa",
    "causal_conv1d",
    "checkpoint_policies",
    "conv",
    "dot_general",
    "f8",
    "fold_batch_norm",
    "fuse",
    "gated_conv",
    "gated_matmul",
    "group_norm",
    "instance_norm",
    "kv_cache",
    "layer_norm",
    "masks",
    "matmul",
    "max_pool",
    "moe",
    "paged_sdpa",
    "parallel",
    "plans",
    "qkv_sdpa",
    "ragged_dot",
    "rms_norm",
    "score_mods",
    "sdpa",
]

_keywords.hint_on(globals(), __all__)
