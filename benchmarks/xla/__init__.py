# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of what XLA compiles: its code, and what its programs send."""
