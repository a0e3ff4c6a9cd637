# SPDX-License-Identifier: Apache-2.0
"""Visibility: which keys a query sees, by masks, windows and packed sequences."""
