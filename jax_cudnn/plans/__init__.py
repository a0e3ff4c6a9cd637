# SPDX-License-Identifier: Apache-2.0
"""Execution plans in the user's hands: which run, which are fastest, and why."""

from jax_cudnn.choices import Choice
from jax_cudnn.plans.caching import CacheInfo, cache_info, clear_cache, set_cache
from jax_cudnn.plans.inspection import Call, Report, inspect
from jax_cudnn.plans.logs import log
from jax_cudnn.plans.shipping import Shipment, Warmup, load, save, warmup
from jax_cudnn.plans.tuning import Tuning, autotune, load_choices

__all__ = [
    "CacheInfo",
    "Call",
    "Choice",
    "Report",
    "Shipment",
    "Tuning",
    "Warmup",
    "autotune",
    "cache_info",
    "clear_cache",
    "inspect",
    "load",
    "load_choices",
    "log",
    "save",
    "set_cache",
    "warmup",
]
