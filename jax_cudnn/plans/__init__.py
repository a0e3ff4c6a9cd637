# SPDX-License-Identifier: Apache-2.0
"""Execution plans in the user's hands: which run, which are fastest, and why."""

from jax_cudnn.choices import Choice
from jax_cudnn.config import PlanOptions
from jax_cudnn.plans.caching import CacheInfo, cache_info, clear_cache, set_cache
from jax_cudnn.plans.calls import Call, Report
from jax_cudnn.plans.diagnosis import Diagnosis, doctor
from jax_cudnn.plans.explanation import (
    Attempt,
    ExplainedCall,
    Explanation,
    explain,
)
from jax_cudnn.plans.findings import Finding
from jax_cudnn.plans.inspection import inspect
from jax_cudnn.plans.logs import log
from jax_cudnn.plans.scoping import using
from jax_cudnn.plans.shipping import Shipment, Warmup, load, save, warmup
from jax_cudnn.plans.tuning import Tuning, autotune, autotuning, load_choices

__all__ = [
    "Attempt",
    "CacheInfo",
    "Call",
    "Choice",
    "Diagnosis",
    "ExplainedCall",
    "Explanation",
    "Finding",
    "PlanOptions",
    "Report",
    "Shipment",
    "Tuning",
    "Warmup",
    "autotune",
    "autotuning",
    "cache_info",
    "clear_cache",
    "doctor",
    "explain",
    "inspect",
    "load",
    "load_choices",
    "log",
    "save",
    "set_cache",
    "using",
    "warmup",
]
