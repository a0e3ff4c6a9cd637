# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values in caches and pages, and how tokens enter these."""
