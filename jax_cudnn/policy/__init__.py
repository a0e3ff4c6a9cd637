# SPDX-License-Identifier: Apache-2.0
"""Decides what runs a part of a graph where nothing was tuned, and by which rewrite.

Legalisation says how a part can be written for cuDNN. Here alone is decided whether
cuDNN or XLA runs it, and which rewrite comes first: by tables of what was measured, one
for each architecture and version of cuDNN (``jax_cudnn/data/policy``). What was tuned
for a graph itself goes before (choices.py).
"""

from jax_cudnn.policy.ranking import Ranked, measured_as, rank, ranked

__all__ = ["Ranked", "measured_as", "rank", "ranked"]
