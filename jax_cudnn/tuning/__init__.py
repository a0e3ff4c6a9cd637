# SPDX-License-Identifier: Apache-2.0
"""Measures which plan, or XLA, is fastest, and whether its results are right.

It also times whole programs with these choices.
"""

from jax_cudnn.tuning.expected import expected_bytes
from jax_cudnn.tuning.fastest import measure, measure_each
from jax_cudnn.tuning.pace import OutOfTimeError
from jax_cudnn.tuning.programs import NotRunError, Programs

__all__ = [
    "NotRunError",
    "OutOfTimeError",
    "Programs",
    "expected_bytes",
    "measure",
    "measure_each",
]
