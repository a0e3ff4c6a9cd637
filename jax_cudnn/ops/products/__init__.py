# SPDX-License-Identifier: Apache-2.0
"""The public products: conv, matmul, dot_general, gated_matmul and ragged_dot."""
