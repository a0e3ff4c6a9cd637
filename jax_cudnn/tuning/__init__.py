# SPDX-License-Identifier: Apache-2.0
"""Which plan, or XLA, is fastest on the GPU, and does it compute the right numbers?

And how long does a whole program take with that?
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
