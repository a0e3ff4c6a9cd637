# SPDX-License-Identifier: Apache-2.0
"""Measuring on the GPU: clocks for plans and programs, and contests between them."""

from jax_cudnn.measuring.contest import OutOfTimeError, measure

__all__ = ["OutOfTimeError", "measure"]
