# SPDX-License-Identifier: Apache-2.0
"""The meaning of convolutions, matmuls and grouped matmuls in jax.numpy."""
