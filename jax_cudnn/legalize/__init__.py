# SPDX-License-Identifier: Apache-2.0
"""Turns a graph into one that cuDNN takes, with the array work before and after it.

Graphs say what users mean; cuDNN takes less (head sizes in multiples of 8, no boolean
masks, no cotangent of the log-sum-exp, ...). The difference is made up here, in
jax.numpy, and nowhere else. Knows cuDNN's documented limits and asks no library.
"""

from jax_cudnn.legalize.rules import Legal, legalize

__all__ = ["Legal", "legalize"]
