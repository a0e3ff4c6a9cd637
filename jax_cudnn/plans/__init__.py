# SPDX-License-Identifier: Apache-2.0
"""Execution plans in the user's hands: which run, which are fastest, and why.

A module of this package is imported when a name of it is first asked for: most programs
want few of them, and `import jax_cudnn` is to be quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jax_cudnn import keywords as _keywords
from jax_cudnn.choices import Choice, Key
from jax_cudnn.config import PlanOptions
from jax_cudnn.native import CacheStats, Candidate

if TYPE_CHECKING:
    from jax_cudnn.calibration.api import (
        Calibrated,
        Calibration,
        calibrate,
        calibrated,
    )
    from jax_cudnn.doctor.diagnosis import Diagnosis, doctor
    from jax_cudnn.doctor.finding import Finding
    from jax_cudnn.plans.caching import CacheInfo, cache_info, clear_cache, set_cache
    from jax_cudnn.plans.calls import Call, Report
    from jax_cudnn.plans.explanation import Attempt, ExplainedCall, Explanation, explain
    from jax_cudnn.plans.inspection import inspect
    from jax_cudnn.plans.logs import log
    from jax_cudnn.plans.scoping import using
    from jax_cudnn.plans.shipping import Shipment, Warmup, load, save, warmup
    from jax_cudnn.plans.tuning import Tuning, autotune, autotuning, load_choices
    from jax_cudnn.tuning.competing import (
        add_contender,
        add_tokamax,
        remove_contender,
    )
    from jax_cudnn.tuning.in_context import ProgramTimes

# The module of each name that is not imported at once.
_HOMES = {
    "jax_cudnn.calibration.api": (
        *("Calibrated", "Calibration"),
        *("calibrate", "calibrated"),
    ),
    "jax_cudnn.doctor.diagnosis": ("Diagnosis", "doctor"),
    "jax_cudnn.doctor.finding": ("Finding",),
    f"{__name__}.caching": ("CacheInfo", "cache_info", "clear_cache", "set_cache"),
    f"{__name__}.calls": ("Call", "Report"),
    f"{__name__}.explanation": ("Attempt", "ExplainedCall", "Explanation", "explain"),
    f"{__name__}.inspection": ("inspect",),
    f"{__name__}.logs": ("log",),
    f"{__name__}.scoping": ("using",),
    f"{__name__}.shipping": ("Shipment", "Warmup", "load", "save", "warmup"),
    f"{__name__}.tuning": ("Tuning", "autotune", "autotuning", "load_choices"),
    "jax_cudnn.tuning.competing": (
        "add_contender",
        "add_tokamax",
        "remove_contender",
    ),
    "jax_cudnn.tuning.in_context": ("ProgramTimes",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if f"{__name__}.{name}" in _HOMES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULES[name]), name)
    value = _keywords.with_hints(found) if name.islower() else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "Attempt",
    "CacheInfo",
    "CacheStats",
    "Calibrated",
    "Calibration",
    "Call",
    "Candidate",
    "Choice",
    "Diagnosis",
    "ExplainedCall",
    "Explanation",
    "Finding",
    "Key",
    "PlanOptions",
    "ProgramTimes",
    "Report",
    "Shipment",
    "Tuning",
    "Warmup",
    "add_contender",
    "add_tokamax",
    "autotune",
    "autotuning",
    "cache_info",
    "calibrate",
    "calibrated",
    "clear_cache",
    "doctor",
    "explain",
    "inspect",
    "load",
    "load_choices",
    "log",
    "remove_contender",
    "save",
    "set_cache",
    "using",
    "warmup",
]

_keywords.hint_on(globals(), ["PlanOptions"])
