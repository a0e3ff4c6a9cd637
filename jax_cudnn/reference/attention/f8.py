# SPDX-License-Identifier: Apache-2.0
"""Attention over f8 operands in jax.numpy; its formula is in graph/attention/f8.py.

Products of f8 numbers are exact in f32. The probabilities are rounded to f8 before they
are divided by their sum, as in flash kernels.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph.attention.sdpa import SdpaAttributes
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.reference.attention.sdpa import grouped_einsum, logits
from jax_cudnn.reference.attention.softmax import weights_of
from jax_cudnn.reference.dtypes import jax_dtype, saturated

Operands = Mapping[str, jax.Array]


def forward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return output, log-sum-exp and amax; a row that sees no key gives 0 and -inf."""
    assert isinstance(attributes, SdpaAttributes)
    return attention(attributes, inputs, jax_dtype(outputs["output"].dtype))


def attention(
    attributes: SdpaAttributes, inputs: Operands, dtype: np.dtype
) -> dict[str, jax.Array]:
    """Return all results, with the output in a dtype."""
    # f8 is exact in bf16, which every platform multiplies.
    wide = {
        role: inputs[role].astype(jnp.bfloat16) for role in ("query", "key", "value")
    }
    factor = inputs["descale_query"] * inputs["descale_key"]
    scores = logits(attributes, {**inputs, **wide}, factor=factor)
    weights = weights_of(scores)
    scaled = weights.unnormalised * inputs["scale_probabilities"]
    rounded = saturated(scaled, inputs["query"].dtype).astype(jnp.bfloat16)
    products = grouped_einsum("bkgst,bkte->bkgse", rounded, wide["value"])
    factor = inputs["descale_probabilities"] * inputs["descale_value"]
    result = jnp.where(weights.is_dead, 0, products / weights.total * factor)
    output = result * inputs["scale_output"]
    return {
        "output": saturated(output, dtype),
        "stats": weights.stats,
        "amax_output": _largest(result),
    }


def _largest(x: jax.Array) -> jax.Array:
    """Return max|x| without NaN, which cuDNN leaves out too (9.19 on an H200)."""
    return jnp.max(jnp.where(jnp.isnan(x), 0, jnp.abs(x)), initial=0, keepdims=True)
