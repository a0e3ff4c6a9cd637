# SPDX-License-Identifier: Apache-2.0
"""Execution plans in the user's hands: which cuDNN calls a function makes, and how."""

from jax_cudnn.plans.inspection import Call, Report, inspect

__all__ = ["Call", "Report", "inspect"]
