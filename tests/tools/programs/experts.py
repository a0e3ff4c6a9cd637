# SPDX-License-Identifier: Apache-2.0
"""Runs examples/train_moe.py on four CPU devices."""

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import train_moe

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_disable_most_optimizations", True)
    train_moe.main(sys.argv[1:])
