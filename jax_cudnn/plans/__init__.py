# SPDX-License-Identifier: Apache-2.0
"""Execution plans in the user's hands: which run, which are fastest, and why."""

from jax_cudnn.choices import Choice
from jax_cudnn.plans.calls import Call, Report
from jax_cudnn.plans.diagnosis import Diagnosis, doctor
from jax_cudnn.plans.findings import Finding
from jax_cudnn.plans.inspection import inspect
from jax_cudnn.plans.tuning import Tuning, autotune, load_choices

__all__ = [
    "Call",
    "Choice",
    "Diagnosis",
    "Finding",
    "Report",
    "Tuning",
    "autotune",
    "doctor",
    "inspect",
    "load_choices",
]
