# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of norms, pooling, softmax and experts."""
