# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions of each channel in jax.numpy.

Roles, axis letters and attributes are those of graph/products/causal_conv1d.py. A few
taps are a sum of shifted products, which XLA computes in one pass over x. Many taps
would be a long program: they are a convolution of JAX's, or with segments a loop.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_cudnn.graph.products.causal_conv1d import CausalConvAttributes
from jax_cudnn.graph.spec import Attributes, Tensor
from jax_cudnn.reference.pointwise import apply_mode

Operands = Mapping[str, jax.Array]

# Programs with more products compile slowly.
_MOST_UNROLLED = 32


def forward(
    attributes: Attributes, inputs: Operands, outputs: Mapping[str, Tensor]
) -> dict[str, jax.Array]:
    """Return the activation of the sums, in the dtype of the sums."""
    del outputs
    assert isinstance(attributes, CausalConvAttributes)
    floats, ids = _split(inputs)
    return {"output": _activated(attributes.activation, floats, ids)}


def backward(
    attributes: Attributes,
    inputs: Operands,
    outputs: Mapping[str, Tensor],
    *,
    narrow: bool = False,
) -> dict[str, jax.Array]:
    """Return the gradients that are asked for, in the dtype of the sums.

    With ``narrow``, the cotangent of the activation's argument is rounded to 16 bits
    where x has them, as it is in programs that use that dtype throughout. XLA writes
    it, and reads it twice: the rest of the gradient moves 8 arrays of x's size then,
    and 11 without (compiled for an H200 by JAX 0.10.2).
    """
    floats, ids = _split(inputs)
    moved = argument_gradient(attributes, inputs)
    dtype = inputs["x"].dtype
    if narrow and dtype.itemsize == 2:
        limits = jnp.finfo(dtype)
        # Of a cast to 16 bits and back alone, XLA would leave out both.
        rounded = jax.lax.reduce_precision(
            moved.astype(dtype), limits.nexp, limits.nmant
        )
        moved = rounded.astype(moved.dtype)
    wanted = {role: floats[role.removeprefix("grad_")] for role in outputs}

    def function(moving: dict[str, jax.Array]) -> jax.Array:
        changed = {role.removeprefix("grad_"): x for role, x in moving.items()}
        return _activated("identity", {**floats, **changed}, ids)

    _, transposed = jax.vjp(function, wanted)
    (gradients,) = transposed(moved)
    return gradients


def argument_gradient(attributes: Attributes, inputs: Operands) -> jax.Array:
    """Return the cotangent of the activation's argument, in the dtype of the sums."""
    assert isinstance(attributes, CausalConvAttributes)
    floats, ids = _split(inputs)
    grad = floats.pop("grad_output")
    if attributes.activation == "identity":
        return grad
    sums = _activated("identity", floats, ids)
    _, transposed = jax.vjp(lambda x: apply_mode(attributes.activation, x), sums)
    (gradient,) = transposed(grad)
    return gradient


def activated(activation: str, inputs: Operands) -> jax.Array:
    """Return the result for arrays by role, (b, s, c) and (k, c), rounded to x's dtype.

    For calls that no graph has, such as those with symbolic dimensions.
    """
    floats, ids = _split(inputs)
    return _activated(activation, floats, ids).astype(inputs["x"].dtype)


def _split(inputs: Operands) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Return the floats in the dtype of their sums, and the ids of segments."""
    wide = jnp.float64 if inputs["x"].dtype == jnp.float64 else jnp.float32
    floats = {
        role: x.astype(wide) for role, x in inputs.items() if role != "segment_ids"
    }
    return floats, inputs.get("segment_ids")


def _activated(activation: str, floats: Operands, ids: jax.Array | None) -> jax.Array:
    sums = _sums(floats["x"], floats["w"], ids)
    if "bias" in floats:
        sums = sums + floats["bias"][None]
    return sums if activation == "identity" else apply_mode(activation, sums)


def _sums(x: jax.Array, w: jax.Array, ids: jax.Array | None) -> jax.Array:
    taps, steps = w.shape[0], x.shape[1]
    if not isinstance(taps, int):  # A symbolic number is compared with no other one.
        one = jnp.zeros(x.shape[:2], jnp.int32)
        return _looped(x, w, one if ids is None else ids)
    if taps > _MOST_UNROLLED:
        return _convolved(x, w) if ids is None else _looped(x, w, ids)
    front = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    earlier = None if ids is None else jnp.pad(ids, ((0, 0), (taps - 1, 0)))
    total = None
    for tap in range(taps):
        product = jax.lax.slice_in_dim(front, tap, tap + steps, axis=1) * _row(w, tap)
        if ids is not None and earlier is not None and tap < taps - 1:
            own = jax.lax.slice_in_dim(earlier, tap, tap + steps, axis=1) == ids
            product = jnp.where(own[..., None], product, jnp.zeros((), product.dtype))
        total = product if total is None else total + product
    assert total is not None
    return total


def _row(w: jax.Array, tap: int | jax.Array) -> jax.Array:
    """Return the weights of a tap as (1, 1, c)."""
    return jax.lax.dynamic_slice_in_dim(w, tap, 1, axis=0)[None]


def _convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    if x.shape[2] == 0:
        return x  # A convolution has one group at least.
    # The axes of w are in the order that contraction.py has for filters of groups.
    return jax.lax.conv_general_dilated(
        x,
        w[None],
        (1,),
        [(w.shape[0] - 1, 0)],
        dimension_numbers=("NWC", "IWO", "NWC"),
        feature_group_count=x.shape[2],
        precision="highest",
    )


def _looped(x: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the sums within segments, tap by tap from the last one."""
    steps = x.shape[1]
    front = jnp.pad(x, ((0, 0), (w.shape[0] - 1, 0), (0, 0)))
    earlier = jnp.pad(ids, ((0, 0), (w.shape[0] - 1, 0)))

    def add(total: jax.Array, tap: jax.Array) -> tuple[jax.Array, None]:
        product = jax.lax.dynamic_slice_in_dim(front, tap, steps, axis=1) * _row(w, tap)
        own = jax.lax.dynamic_slice_in_dim(earlier, tap, steps, axis=1) == ids
        zero = jnp.zeros((), product.dtype)
        return total + jnp.where(own[..., None], product, zero), None

    # Like the operands, so that it varies inside shard_map as they do.
    nothing = jnp.zeros_like(x * _row(w, 0))
    return jax.lax.scan(add, nothing, jnp.arange(w.shape[0], dtype=jnp.int32))[0]
