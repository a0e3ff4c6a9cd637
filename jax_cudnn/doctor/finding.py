# SPDX-License-Identifier: Apache-2.0
"""A `Finding`: one thing about a machine that is not as it should be."""

from dataclasses import dataclass
from typing import Literal

from jax_cudnn.doctor.machine import Facts

# An error keeps cuDNN from a GPU that is there, or the package or JAX from running at
# all. A warning costs results, memory or time. A note explains.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is not as it should be: its name, what is so, what to do."""

    severity: Severity
    name: str
    what: str
    fix: str


def extra(facts: Facts) -> str:
    """Return the extra of ours, or of JAX, that goes with the driver."""
    newest = facts.driver.cuda_version if facts.driver else 0
    return "cuda12" if 0 < newest < 13000 else "cuda13"
