# SPDX-License-Identifier: Apache-2.0
"""Attention in f8, and the scales that it takes. See docs/f8.md."""

from jax_cudnn.ops.f8_scaling import (
    Quantized,
    amax,
    dequantize,
    quantize,
    quantize_current,
    scale_from_amax,
    scale_from_history,
    update_history,
)
from jax_cudnn.ops.sdpa_f8 import sdpa
from jax_cudnn.ops.sdpa_quantized import quantized_sdpa

__all__ = [
    "Quantized",
    "amax",
    "dequantize",
    "quantize",
    "quantize_current",
    "quantized_sdpa",
    "scale_from_amax",
    "scale_from_history",
    "sdpa",
    "update_history",
]
