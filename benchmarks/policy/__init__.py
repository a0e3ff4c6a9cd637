# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that decide who runs a call, and with which plan."""
