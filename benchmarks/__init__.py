# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that print the numbers in the documentation."""
