# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees: masks, windows, and packed sequences."""
