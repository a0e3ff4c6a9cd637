# SPDX-License-Identifier: Apache-2.0
"""The nodes of products: convolutions, matmuls and grouped matmuls."""
