# SPDX-License-Identifier: Apache-2.0
"""Tests of the C++ extension that need neither cuDNN nor a GPU."""
