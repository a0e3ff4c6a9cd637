# SPDX-License-Identifier: Apache-2.0
"""Attention's public functions, and the parts that they share."""
