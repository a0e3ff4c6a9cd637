# SPDX-License-Identifier: Apache-2.0
"""Judges a machine's facts for cuDNN under JAX, and says what to do about them.

``examine`` is a pure function of the facts: one rule per function, each of which yields
a ``Finding`` with its fix.
"""

import itertools
from collections.abc import Callable, Iterator

from jax_cudnn.doctor import cudnn_rules, gpu_rules, jax_rules
from jax_cudnn.doctor.finding import Finding
from jax_cudnn.doctor.machine import Facts

_RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    jax_rules.package,
    gpu_rules.driver_state,
    gpu_rules.gpu_kinds,
    jax_rules.no_backend,
    jax_rules.jax_devices,
    jax_rules.jax_parts,
    cudnn_rules.cuda_versions,
    cudnn_rules.cudnn_version,
    cudnn_rules.cudnn_limits,
    cudnn_rules.copies,
    cudnn_rules.sublibraries,
    cudnn_rules.companions,
    gpu_rules.broken_calibration,
    gpu_rules.calibration,
    jax_rules.environment,
    jax_rules.unread,
)


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return what is wrong, errors first."""
    found = itertools.chain.from_iterable(rule(facts) for rule in _RULES)
    order = ("error", "warning", "note")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))
