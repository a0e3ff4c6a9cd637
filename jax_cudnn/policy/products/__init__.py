# SPDX-License-Identifier: Apache-2.0
"""Decides which rewrite of a contraction is tried first, and what runs it."""

from jax_cudnn.policy.products.contractions import (
    contraction_of,
    measured_as,
    point_of,
    properties_of,
)
from jax_cudnn.policy.products.cublaslt import cublaslt_product
from jax_cudnn.policy.products.orders import in_order
from jax_cudnn.policy.products.properties import CausalConvolution

__all__ = [
    "CausalConvolution",
    "contraction_of",
    "cublaslt_product",
    "in_order",
    "measured_as",
    "point_of",
    "properties_of",
]
