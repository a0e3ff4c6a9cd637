# SPDX-License-Identifier: Apache-2.0
"""Computes attention and its gradient; queries, keys and values may be one array.

It equals attention over the parts (graph/attention/qkv.py), whose gradients are written
side by side.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_cudnn.graph.attention.qkv import PARTS, parts_of
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.reference.attention import sdpa

Operands = Mapping[str, jax.Array]


def forward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the results of `sdpa.forward`."""
    divided = _divided(inputs, outputs["output"].dims[1])
    return sdpa.forward(attributes, divided, outputs)


def backward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the gradients of `sdpa.backward`, for one array as one array."""
    divided = _divided(inputs, inputs["output"].shape[1])
    found = sdpa.backward(attributes, divided, outputs)
    if "qkv" not in inputs:
        return found
    b, _, heads, s, d = inputs["qkv"].shape
    parts = [
        jnp.reshape(found.pop(f"grad_{role}"), (b, -1, heads, s, d))
        for role in ("query", "key", "value")
    ]
    return {**found, "grad_qkv": jnp.concatenate(parts, axis=PARTS)}


def _divided(inputs: Operands, query_heads: int) -> dict[str, jax.Array]:
    """Return the operands with (b, h, s, d) for each part in place of qkv."""
    given = dict(inputs)
    if (qkv := given.pop("qkv", None)) is None:
        return given
    b, _, heads, s, d = qkv.shape
    for role, (first, count, _) in parts_of(qkv.shape, query_heads).items():
        part = jax.lax.slice_in_dim(qkv, first, first + count, axis=PARTS)
        given[role] = jnp.reshape(part, (b, count * heads, s, d))
    return given
