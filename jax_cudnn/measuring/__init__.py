# SPDX-License-Identifier: Apache-2.0
"""Which plan, or XLA, is fastest on the GPU, and does it compute the right numbers?"""

from jax_cudnn.measuring.fastest import OutOfTimeError, measure

__all__ = ["OutOfTimeError", "measure"]
