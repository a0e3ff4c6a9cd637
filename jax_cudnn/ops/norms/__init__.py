# SPDX-License-Identifier: Apache-2.0
"""The norms' public functions, and the parts that they share."""
