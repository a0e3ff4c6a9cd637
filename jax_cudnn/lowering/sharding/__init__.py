# SPDX-License-Identifier: Apache-2.0
"""Divides a graph's arrays among devices, and reads and sets their types for it."""
