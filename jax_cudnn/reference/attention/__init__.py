# SPDX-License-Identifier: Apache-2.0
"""The meaning of attention's nodes in jax.numpy."""
