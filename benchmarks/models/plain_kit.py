# SPDX-License-Identifier: Apache-2.0
"""The layers of plain JAX that the models are written over.

Weights are f32 and computed with in bf16, as in PyTorch's autocast.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.zoo import Composed, Kind

_ACTIVATIONS: dict[Any, Any] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


def convolution(
    x: jax.Array,
    w: jax.Array,
    step: int,
    *,
    groups: int = 1,
    dilation: int = 1,
    is_causal: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a convolution of images that both packages take.

    It is causal along the first axis of space.
    """
    space = "DHW"[5 - x.ndim :]
    # Odd filters keep the size; even ones are as wide as their step.
    sides = [(k - 1) // 2 if k % 2 else 0 for k in w.shape[:-2]]
    padding = [(side * dilation, side * dilation) for side in sides]
    if is_causal:
        padding = [((w.shape[0] - 1) * dilation, 0)]
    return {
        "window_strides": [step] * len(space),
        "padding": padding,
        "rhs_dilation": [dilation] * len(space),
        "dimension_numbers": (f"N{space}C", f"{space}IO", f"N{space}C"),
        "feature_group_count": groups,
    }


def _normed(x: jax.Array, axes: Any = -1) -> jax.Array:
    """Return x without its mean and with a variance of 1 along some axes, in f32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axes, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axes, keepdims=True)
    return (wide - mean) * jax.lax.rsqrt(variance + 1e-6)


class PlainKit(Composed):
    """Layers as a user of plain JAX writes them, with its best attention."""

    name = "plain JAX"
    dtype: Any = jnp.bfloat16

    def array(self, x: np.ndarray) -> jax.Array:
        """Return an array of the kit."""
        return jnp.asarray(x)

    def stored(self, x: np.ndarray, kind: Kind) -> jax.Array:
        """Return a weight as the kit stores it."""
        del kind
        return jnp.asarray(x)

    def weight(self, x: jax.Array) -> jax.Array:
        """Return a weight as products take it."""
        return x.astype(self.dtype)

    def operand(self, x: np.ndarray) -> jax.Array:
        """Return an array of the batch as the model takes it."""
        is_float = np.issubdtype(x.dtype, np.floating)
        return jnp.asarray(x, self.dtype if is_float else None)

    constant = operand

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return the rows of a table."""
        return table[tokens]

    def logits(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """Return products with all rows of a table."""
        return x @ table.T

    def split(self, x: jax.Array, count: int) -> Sequence[jax.Array]:
        """Return equal parts of the last axis."""
        return jnp.split(x, count, -1)

    def concatenate(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Join arrays along the last axis."""
        return jnp.concatenate(parts, -1)

    def relu(self, x: jax.Array) -> jax.Array:
        """Return max(x, 0)."""
        return jax.nn.relu(x)

    def doubled(self, x: jax.Array) -> jax.Array:
        """Repeat each element of space."""
        return functools.reduce(
            lambda x, axis: jnp.repeat(x, 2, axis), range(1, x.ndim - 1), x
        )

    def dense(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        *,
        activation: Any = None,
        residual: Any = None,
    ) -> jax.Array:
        """Return activation(x w + b), or x w + b + residual."""
        y = x @ w
        y = y if b is None else y + b
        y = _ACTIVATIONS[activation](y)
        return y if residual is None else y + residual

    def gated(self, x: Any, gate: Any, up: Any, activation: Any = "silu") -> jax.Array:
        """Return activation(x gate) * (x up)."""
        return _ACTIVATIONS[activation](x @ gate) * (x @ up)

    def branch(self, x: Any, w: Any, b: Any, scale: Any, residual: Any) -> jax.Array:
        """Return scale (x w + b) + residual, a scale for each example and feature."""
        return scale[:, None] * (x @ w + b) + residual

    def attention(
        self, q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, **options: Any
    ) -> jax.Array:
        """Return attention; options may be causality and the lengths of the keys."""
        return jax.nn.dot_product_attention(
            q, k, v, bias, mask, **options, implementation=self._fastest(q, k)
        )

    def capped_attention(
        self, q: Any, k: Any, v: Any, cap: float, window: int
    ) -> jax.Array:
        """Return causal attention to some last keys, its scores capped by tanh.

        JAX's attention caps no scores, so they are written out.
        """
        (b, s, h, d), kept = q.shape, k.shape[2]
        grouped = q.reshape(b, s, kept, h // kept, d)
        scores = jnp.einsum(
            "bskgd,btkd->bkgst", grouped, k, preferred_element_type=jnp.float32
        )
        scores = cap * jnp.tanh(scores * (d**-0.5 / cap))
        distance = jnp.arange(s)[:, None] - jnp.arange(s)[None, :]
        is_seen = (distance >= 0) & (distance < window)
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf)).astype(q.dtype)
        return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(b, s, h, d)

    def experts(
        self, x: Any, router: Any, gate: Any, up: Any, down: Any, count: int
    ) -> jax.Array:
        """Return a mixture of gated MLPs, of which each row chooses some.

        The rows of each expert lie side by side, for JAX's grouped product.
        """
        rows, all_experts = x.reshape(-1, x.shape[-1]), len(gate)
        weights, chosen = self.routed(rows, router, count)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=all_experts)
        y = rows[order // count]
        y = jax.nn.silu(jax.lax.ragged_dot(y, gate, sizes)) * jax.lax.ragged_dot(
            y, up, sizes
        )
        y = jax.lax.ragged_dot(y, down, sizes)[jnp.argsort(order)]
        y = y.reshape(len(rows), count, -1) * weights[..., None]
        return jnp.sum(y, 1, dtype=jnp.float32).astype(x.dtype).reshape(x.shape)

    def routed(self, rows: Any, router: Any, count: int) -> tuple[Any, Any]:
        """Return the experts that rows choose, and the weights of their results."""
        logits = jnp.matmul(rows, router, preferred_element_type=jnp.float32)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), count)
        weights = weights / jnp.sum(weights, -1, keepdims=True)
        return weights.astype(rows.dtype), chosen

    def _fastest(self, q: jax.Array, k: jax.Array) -> Literal["cudnn", "xla"]:
        """Return JAX's faster attention: its cuDNN trains with even lengths alone."""
        is_taken = q.shape[1] % 2 == k.shape[1] % 2 == 0
        return "cudnn" if jax.default_backend() == "gpu" and is_taken else "xla"

    def written(self, cache: jax.Array, x: jax.Array) -> jax.Array:
        """Return a cache with its last token replaced."""
        return jax.lax.dynamic_update_slice_in_dim(cache, x, cache.shape[1] - 1, 1)

    def attend_lengths(self, q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
        """Return attention of a token over caches of some lengths."""
        on_gpu = jax.default_backend() == "gpu"
        return jax.nn.dot_product_attention(
            q, k, v,
            key_value_seq_lengths=lengths,
            query_seq_lengths=jnp.ones_like(lengths),
            implementation="cudnn" if on_gpu else "xla",
        )  # fmt: skip

    def layer_norm(self, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        """Return the layer norm over the last axis."""
        return (_normed(x) * scale + bias).astype(x.dtype)

    def adaptive_norm(self, x: jax.Array, scale: jax.Array, shift: jax.Array) -> Any:
        """Return the layer norm, times 1 + scale, plus shift, of each example."""
        y = _normed(x) * (1 + scale[:, None]) + shift[:, None]
        return y.astype(x.dtype)

    def group_norm(
        self, x: Any, scale: Any, bias: Any, *, groups: int, activation: Any = None
    ) -> jax.Array:
        """Return activation(group norm of images)."""
        wide = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
        y = _normed(wide, (1, 2, 4)).reshape(x.shape)
        return _ACTIVATIONS[activation](y * scale + bias).astype(x.dtype)

    def rms_norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the RMS norm over the last axis."""
        wide = x.astype(jnp.float32)
        square = jnp.mean(jnp.square(wide), -1, keepdims=True)
        return (wide * jax.lax.rsqrt(square + 1e-6) * scale).astype(x.dtype)

    def batch_norm(
        self, x: Any, scale: Any, bias: Any, *, activation: Any = None
    ) -> jax.Array:
        """Return the batch norm with the statistics of the batch."""
        wide, axes = x.astype(jnp.float32), tuple(range(x.ndim - 1))
        mean = jnp.mean(wide, axes)
        variance = jnp.mean(jnp.square(wide), axes) - jnp.square(mean)
        y = (wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * scale) + bias
        return _ACTIVATIONS[activation](y.astype(x.dtype))

    def conv(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        step: int = 1,
        *,
        activation: Any = None,
        **options: Any,
    ) -> jax.Array:
        """Return activation(conv(x, w) + b); options are those of `convolution`."""
        y = jax.lax.conv_general_dilated(x, w, **convolution(x, w, step, **options))
        return _ACTIVATIONS[activation](y if b is None else y + b)

    def max_pool(self, x: jax.Array) -> jax.Array:
        """Return maxima of 3 x 3, in steps of 2."""
        return jax.lax.reduce_window(
            x,
            np.array(-np.inf, x.dtype),
            jax.lax.max,
            (1, 3, 3, 1),
            (1, 2, 2, 1),
            ((0, 0), (1, 1), (1, 1), (0, 0)),
        )

    def cross_entropy(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the mean cross entropy, in nats."""
        # A comparison reads the logits where they are. The gradient of an index would
        # write zeros of their size, and add to a few of them.
        wide = logits.astype(jnp.float32)
        is_label = labels[..., None] == jnp.arange(logits.shape[-1])
        own = jnp.sum(jnp.where(is_label, wide, 0), -1)
        return jnp.mean(jax.nn.logsumexp(wide, -1) - own)

    def mean_square(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the mean of squares of differences."""
        return jnp.mean(jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32)))


class AllExpertsKit(PlainKit):
    """Plain JAX in which each row goes through all experts, as one batch of products.

    Which is faster than a grouped product depends on the GPU and on JAX's version.
    """

    def experts(
        self, x: Any, router: Any, gate: Any, up: Any, down: Any, count: int
    ) -> jax.Array:
        """Return a mixture of gated MLPs, of which each row chooses some."""
        rows, all_experts = x.reshape(-1, x.shape[-1]), len(gate)
        weights, chosen = self.routed(rows, router, count)
        own = jax.nn.one_hot(chosen, all_experts, dtype=x.dtype) * weights[..., None]
        y = jax.nn.silu(jnp.einsum("rd,edf->erf", rows, gate))
        y *= jnp.einsum("rd,edf->erf", rows, up)
        y *= jnp.sum(own, 1).T[..., None]
        return jnp.einsum("erf,efd->rd", y, down).reshape(x.shape)


class CountedKit(PlainKit):
    """Plain JAX with attention as products, so that XLA counts its operations."""

    def attend_lengths(self, q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
        """Return attention of a token over caches of some lengths."""
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, implementation="xla"
        )

    def _fastest(self, q: jax.Array, k: jax.Array) -> Literal["cudnn", "xla"]:
        del q, k
        return "xla"
