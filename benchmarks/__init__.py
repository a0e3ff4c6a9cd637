# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that print the numbers in the documentation."""

import os

# Choices and plans of earlier runs must not affect a run's numbers.
os.environ["JAX_CUDNN_CACHE_DIR"] = "off"
