# SPDX-License-Identifier: Apache-2.0
"""Compiles for tests that need XLA's own choice of how to write code for the CPU.

`make test` chooses an older way for JAX 0.10, which compiles faster. It rounds a little
differently, and some conversions to complex numbers fail.
"""

import os

_FLAG = "xla_cpu_use_fusion_emitters"

# For `jax.jit`: that way is not taken.
BY_DEFAULT = (
    {_FLAG: True} if f"--{_FLAG}=false" in os.environ.get("XLA_FLAGS", "") else None
)
