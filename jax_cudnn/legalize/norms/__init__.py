# SPDX-License-Identifier: Apache-2.0
"""Norms as cuDNN takes them."""
