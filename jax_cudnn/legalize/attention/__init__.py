# SPDX-License-Identifier: Apache-2.0
"""Attention as cuDNN takes it."""
