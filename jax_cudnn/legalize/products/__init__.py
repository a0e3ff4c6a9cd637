# SPDX-License-Identifier: Apache-2.0
"""Convolutions, matmuls and grouped matmuls as cuDNN takes them, fused or alone."""
