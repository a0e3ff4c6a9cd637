# SPDX-License-Identifier: Apache-2.0
"""Tests that plan with the real cuDNN on a machine without a GPU."""
