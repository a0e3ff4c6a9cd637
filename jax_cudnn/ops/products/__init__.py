# SPDX-License-Identifier: Apache-2.0
"""The public products: convolutions, matmuls, and grouped and gated ones."""
