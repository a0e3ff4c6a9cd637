# SPDX-License-Identifier: Apache-2.0
"""Execution plans in the user's hands: which run, which are fastest, and why."""

from jax_cudnn.choices import (
    Choice,
)
from jax_cudnn.config import (
    PlanOptions,
)
from jax_cudnn.plans.explanation import (
    Attempt,
    ExplainedCall,
    Explanation,
    explain,
)
from jax_cudnn.plans.inspection import (
    Call,
    Report,
    inspect,
)
from jax_cudnn.plans.logs import (
    log,
)
from jax_cudnn.plans.scoping import (
    using,
)
from jax_cudnn.plans.tuning import (
    Tuning,
    autotune,
    autotuning,
    load_choices,
)

__all__ = [
    "Attempt",
    "Call",
    "Choice",
    "ExplainedCall",
    "Explanation",
    "PlanOptions",
    "Report",
    "Tuning",
    "autotune",
    "autotuning",
    "explain",
    "inspect",
    "load_choices",
    "log",
    "using",
]
