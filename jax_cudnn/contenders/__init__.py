# SPDX-License-Identifier: Apache-2.0
"""Keeps the other implementations that compete with cuDNN's plans and XLA.

There are none until a program adds one. Tuning times those that offer to run a part and
compares what they compute with the reference; only a measured choice ever picks one.
"""

from jax_cudnn.contenders.registry import (
    Contender,
    Offer,
    Program,
    add,
    all_of,
    program_of,
    remove,
)

__all__ = ["Contender", "Offer", "Program", "add", "all_of", "program_of", "remove"]
