# SPDX-License-Identifier: Apache-2.0
"""Whole models, beside plain JAX and PyTorch: run `python -m benchmarks.models`."""
