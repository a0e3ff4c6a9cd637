# SPDX-License-Identifier: Apache-2.0
"""Which way of writing convolutions and products is tried first, and who runs them."""

from jax_cudnn.policy.products.contractions import contraction_of, properties_of
from jax_cudnn.policy.products.orders import in_order

__all__ = ["contraction_of", "in_order", "properties_of"]
