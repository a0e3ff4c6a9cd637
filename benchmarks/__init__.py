# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that print the numbers in the documentation."""

import os

# What earlier runs tuned and planned must not show in a run's numbers.
os.environ["JAX_CUDNN_CACHE_DIR"] = "off"
