# SPDX-License-Identifier: Apache-2.0
"""The layers of plain JAX, and of jax_cudnn, that the models are written over.

Weights are f32 and computed with in bf16, as in PyTorch's autocast.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from benchmarks.models.zoo import Composed, Kind
from jax_cudnn import f8

_ACTIVATIONS: dict[Any, Any] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def _window(filters: jax.Array) -> list[tuple[int, int]]:
    # Odd filters keep the size; even ones are as wide as their step.
    return [
        ((k - 1) // 2, (k - 1) // 2) if k % 2 else (0, 0) for k in filters.shape[:-2]
    ]


def _layout(x: jax.Array) -> tuple[str, str, str]:
    space = "DHW"[5 - x.ndim :]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def _attention_of_jax(q: jax.Array, k: jax.Array) -> Literal["cudnn", "xla"]:
    """Return the best of JAX's own ways: its cuDNN trains with even lengths alone."""
    is_taken = q.shape[1] % 2 == k.shape[1] % 2 == 0
    return "cudnn" if jax.default_backend() == "gpu" and is_taken else "xla"


class PlainKit(Composed):
    """Layers as a user of plain JAX writes them, with its best attention."""

    name = "plain JAX"

    def array(self, x: np.ndarray) -> jax.Array:
        """Return an array of the kit."""
        return jnp.asarray(x)

    def stored(self, x: np.ndarray, kind: Kind) -> jax.Array:
        """Return a weight as the kit stores it."""
        del kind
        return jnp.asarray(x)

    def weight(self, x: jax.Array) -> jax.Array:
        """Return a weight as products take it."""
        return x.astype(jnp.bfloat16)

    def operand(self, x: np.ndarray) -> jax.Array:
        """Return an array of the batch as the model takes it."""
        is_float = np.issubdtype(x.dtype, np.floating)
        return jnp.asarray(x, jnp.bfloat16 if is_float else None)

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

    def mean(self, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """Return means."""
        return jnp.mean(x, axes)

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
        activation: Any = None,
        residual: Any = None,
    ) -> jax.Array:
        """Return activation(x w + b), or x w + b + residual."""
        y = x @ w
        y = y if b is None else y + b
        y = _ACTIVATIONS[activation](y)
        return y if residual is None else y + residual

    def gated(self, x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return silu(x gate) * (x up)."""
        return jax.nn.silu(x @ gate) * (x @ up)

    def attention(self, q: Any, k: Any, v: Any, *, is_causal: bool) -> jax.Array:
        """Return attention."""
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=is_causal, implementation=_attention_of_jax(q, k)
        )

    def biased_attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        bias: Any,
        *,
        mask: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Return attention with a bias, a mask or neither."""
        return jax.nn.dot_product_attention(
            q, k, v, bias, mask,
            is_causal=is_causal,
            implementation=_attention_of_jax(q, k),
        )  # fmt: skip

    def bias(self, x: jax.Array) -> jax.Array:
        """Return a bias (1, h, s, t), of one whose heads are the last axis."""
        return jnp.transpose(x, (2, 0, 1))[None]

    def rolled(self, x: jax.Array, places: int) -> jax.Array:
        """Return images, moved around along both axes of space."""
        return jnp.roll(x, (places, places), (1, 2))

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
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
        y = (wide - mean) * jax.lax.rsqrt(variance + 1e-6)
        return (y * scale + bias).astype(x.dtype)

    def group_norm(
        self, x: Any, scale: Any, bias: Any, groups: int, activation: Any
    ) -> jax.Array:
        """Return activation(group norm of images)."""
        wide = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
        mean = jnp.mean(wide, (1, 2, 4), keepdims=True)
        variance = jnp.mean(jnp.square(wide - mean), (1, 2, 4), keepdims=True)
        y = ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).reshape(x.shape)
        return _ACTIVATIONS[activation](y * scale + bias).astype(x.dtype)

    def rms_norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the RMS norm over the last axis."""
        wide = x.astype(jnp.float32)
        square = jnp.mean(jnp.square(wide), -1, keepdims=True)
        return (wide * jax.lax.rsqrt(square + 1e-6) * scale).astype(x.dtype)

    def batch_norm(self, x: Any, scale: Any, bias: Any, activation: Any) -> jax.Array:
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
        groups: int = 1,
        activation: Any = None,
    ) -> jax.Array:
        """Return activation(conv(x, w) + b)."""
        y = jax.lax.conv_general_dilated(
            x,
            w,
            [step] * (x.ndim - 2),
            _window(w),
            dimension_numbers=_layout(x),
            feature_group_count=groups,
        )
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


class CountedKit(PlainKit):
    """Plain JAX with attention as products, so that XLA counts its operations."""

    def attention(self, q: Any, k: Any, v: Any, *, is_causal: bool) -> jax.Array:
        """Return attention."""
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=is_causal, implementation="xla"
        )

    def attend_lengths(self, q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
        """Return attention of a token over caches of some lengths."""
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, implementation="xla"
        )


# Fused, the products of an MLP share kernels in the gradient.
@jax_cudnn.fuse
def _mlp(x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> jax.Array:
    hidden = jax_cudnn.matmul(x, w, bias=b, activation="gelu")
    return jax_cudnn.matmul(hidden, v, bias=c, residual=residual)


@jax_cudnn.fuse
def _gated_mlp(x: Any, gate: Any, up: Any, down: Any, residual: Any) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down + residual


class CudnnKit(PlainKit):
    """The same layers by jax_cudnn, where it has them."""

    name = "jax_cudnn"

    def dense(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        activation: Any = None,
        residual: Any = None,
    ) -> jax.Array:
        """Return activation(x w + b), or x w + b + residual."""
        return jax_cudnn.matmul(x, w, bias=b, activation=activation, residual=residual)

    def gated(self, x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Return silu(x gate) * (x up)."""
        return jax_cudnn.gated_matmul(x, gate, up, activation="silu")

    def mlp(self, x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> jax.Array:
        """Return gelu(x w + b) v + c, and the residual added where there is one."""
        return _mlp(x, w, b, v, c, residual)

    def gated_mlp(
        self, x: Any, gate: Any, up: Any, down: Any, residual: Any
    ) -> jax.Array:
        """Return (silu(x gate) * (x up)) down + residual."""
        return _gated_mlp(x, gate, up, down, residual)

    def attention(self, q: Any, k: Any, v: Any, *, is_causal: bool) -> jax.Array:
        """Return attention."""
        return jax_cudnn.sdpa(q, k, v, is_causal=is_causal)

    def self_attention(self, qkv: Any, heads: int, *, is_causal: bool) -> Any:
        """Return attention, its heads joined, from one array of q, k and v."""
        b, s, d = qkv.shape
        parts = qkv.reshape(b, s, 3, heads, d // 3 // heads)
        output = jax_cudnn.qkv_sdpa(parts, is_causal=is_causal)
        return output.reshape(b, s, d // 3)

    def biased_attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        bias: Any,
        *,
        mask: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Return attention with a bias, a mask or neither."""
        return jax_cudnn.sdpa(q, k, v, bias, mask, is_causal=is_causal)

    def attend_lengths(self, q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
        """Return attention of a token over caches of some lengths."""
        return jax_cudnn.sdpa(q, k, v, key_value_seq_lengths=lengths)

    def layer_norm(self, x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
        """Return the layer norm over the last axis."""
        return jax_cudnn.layer_norm(x, scale, bias)

    def group_norm(
        self, x: Any, scale: Any, bias: Any, groups: int, activation: Any
    ) -> Any:
        """Return activation(group norm of images)."""
        return jax_cudnn.group_norm(
            x, scale, bias, groups=groups, activation=activation
        )

    def rms_norm(self, x: jax.Array, scale: jax.Array) -> Any:
        """Return the RMS norm over the last axis."""
        return jax_cudnn.rms_norm(x, scale)

    def batch_norm(self, x: Any, scale: Any, bias: Any, activation: Any) -> Any:
        """Return the batch norm with the statistics of the batch."""
        return jax_cudnn.batch_norm(x, scale, bias, activation=activation)

    def conv(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        step: int = 1,
        *,
        groups: int = 1,
        activation: Any = None,
    ) -> jax.Array:
        """Return activation(conv(x, w) + b)."""
        return jax_cudnn.conv(
            x,
            w,
            list(itertools.repeat(step, x.ndim - 2)),
            _window(w),
            dimension_numbers=_layout(x),
            feature_group_count=groups,
            bias=b,
            activation=activation,
        )

    def max_pool(self, x: jax.Array) -> Any:
        """Return maxima of 3 x 3, in steps of 2."""
        return jax_cudnn.max_pool(x, (3, 3), (2, 2), [(1, 1), (1, 1)])


class F8Kit(CudnnKit):
    """jax_cudnn's layers with products in f8: heads stay in 16 bits.

    A layer of few outputs, as a classifier's head, stays so, too.
    """

    name = "jax_cudnn, f8"

    def dense(
        self,
        x: Any,
        w: Any,
        b: Any = None,
        activation: Any = None,
        residual: Any = None,
    ) -> jax.Array:
        """Return activation(x w + b), or x w + b + residual."""
        if any(size % 16 for size in w.shape):
            return super().dense(x, w, b, activation, residual)
        y = f8.dense(x, w, bias=b, activation=activation)
        return y if residual is None else y + residual

    mlp = Composed.mlp  # of its own dense layers

    def gated_mlp(
        self, x: Any, gate: Any, up: Any, down: Any, residual: Any
    ) -> jax.Array:
        """Return (silu(x gate) * (x up)) down + residual."""
        return f8.gated_mlp(x, gate, up, down) + residual
