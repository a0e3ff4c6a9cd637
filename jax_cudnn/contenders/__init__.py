# SPDX-License-Identifier: Apache-2.0
"""Which other implementations may run a part of a graph, beside cuDNN's plans and XLA?

None, until a program adds one. Tuning times those that offer to run a part and compares
what they compute with the reference; nothing but a measured choice ever picks one.
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
