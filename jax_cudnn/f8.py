# SPDX-License-Identifier: Apache-2.0
"""Layers, attention and norms in f8, and the scales that they take. See docs/f8.md."""

from jax_cudnn import keywords as _keywords
from jax_cudnn.ops.attention.f8 import sdpa
from jax_cudnn.ops.attention.quantized import quantized_sdpa
from jax_cudnn.ops.common.f8_recipes import (
    MXFP8,
    NVFP4,
    Current,
    Delayed,
    DenseState,
    dense_state,
)
from jax_cudnn.ops.common.f8_scaling import (
    Quantized,
    amax,
    dequantize,
    quantize,
    quantize_current,
    scale_from_amax,
    scale_from_history,
    update_history,
)
from jax_cudnn.ops.norms.f8 import layer_norm, rms_norm
from jax_cudnn.ops.products.f8_dense import (
    GatedMlpState,
    dense,
    dot_general,
    gated_mlp,
    gated_mlp_state,
)
from jax_cudnn.ops.products.f8_groups import ragged_dot

__all__ = [
    "MXFP8",
    "NVFP4",
    "Current",
    "Delayed",
    "DenseState",
    "GatedMlpState",
    "Quantized",
    "amax",
    "dense",
    "dense_state",
    "dequantize",
    "dot_general",
    "gated_mlp",
    "gated_mlp_state",
    "layer_norm",
    "quantize",
    "quantize_current",
    "quantized_sdpa",
    "ragged_dot",
    "rms_norm",
    "scale_from_amax",
    "scale_from_history",
    "sdpa",
    "update_history",
]

_keywords.hint_on(globals(), __all__)
