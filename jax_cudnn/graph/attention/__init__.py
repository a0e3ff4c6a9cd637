# SPDX-License-Identifier: Apache-2.0
"""The nodes of attention: over arrays, caches, one array of q, k and v, and f8."""
