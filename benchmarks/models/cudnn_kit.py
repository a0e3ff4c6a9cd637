# SPDX-License-Identifier: Apache-2.0
"""The layers of jax_cudnn, in 16 bits and in f8, that the models are written over."""

from typing import Any

import jax

import jax_cudnn
from benchmarks.models.plain_kit import PlainKit, convolution
from benchmarks.models.zoo import Composed
from jax_cudnn import f8, moe, score_mods


# Fused, the products of an MLP share kernels in the gradient.
@jax_cudnn.fuse
def _mlp(x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> jax.Array:
    hidden = jax_cudnn.matmul(x, w, bias=b, activation="gelu")
    return jax_cudnn.matmul(hidden, v, bias=c, residual=residual)


@jax_cudnn.fuse
def _gated_mlp(x: Any, gate: Any, up: Any, down: Any, residual: Any) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down + residual


class CudnnKit(PlainKit):
    """The same layers by jax_cudnn, where it has them: see `PlainKit`."""

    name = "jax_cudnn"

    gated: Any = staticmethod(jax_cudnn.gated_matmul)
    attention: Any = staticmethod(jax_cudnn.sdpa)
    layer_norm: Any = staticmethod(jax_cudnn.layer_norm)
    group_norm: Any = staticmethod(jax_cudnn.group_norm)
    rms_norm: Any = staticmethod(jax_cudnn.rms_norm)
    batch_norm: Any = staticmethod(jax_cudnn.batch_norm)

    def dense(self, x: Any, w: Any, b: Any = None, **more: Any) -> jax.Array:
        return jax_cudnn.matmul(x, w, bias=b, **more)

    def branch(self, x: Any, w: Any, b: Any, scale: Any, residual: Any) -> jax.Array:
        return jax_cudnn.matmul(
            x, w, bias=b, branch_scale=scale[:, None], residual=residual
        )

    def mlp(self, x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> jax.Array:
        return _mlp(x, w, b, v, c, residual)

    def gated_mlp(
        self, x: Any, gate: Any, up: Any, down: Any, residual: Any
    ) -> jax.Array:
        return _gated_mlp(x, gate, up, down, residual)

    def self_attention(self, qkv: Any, heads: int, *, is_causal: bool) -> Any:
        b, s, d = qkv.shape
        parts = qkv.reshape(b, s, 3, heads, d // 3 // heads)
        output = jax_cudnn.qkv_sdpa(parts, is_causal=is_causal)
        return output.reshape(b, s, d // 3)

    def capped_attention(self, q: Any, k: Any, v: Any, cap: float, window: int) -> Any:
        return jax_cudnn.sdpa(
            q, k, v,
            is_causal=True,
            local_window_size=(window - 1, 0),
            score_mod=score_mods.softcap(cap),
        )  # fmt: skip

    def experts(
        self, x: Any, router: Any, gate: Any, up: Any, down: Any, count: int
    ) -> jax.Array:
        return moe.layer(x, router, gate, up, down, top_k=count)[0]

    def attend_lengths(self, q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
        return jax_cudnn.sdpa(q, k, v, key_value_seq_lengths=lengths)

    def adaptive_norm(self, x: jax.Array, scale: jax.Array, shift: jax.Array) -> Any:
        return jax_cudnn.adaptive_layer_norm(x, 1 + scale, shift)

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
        given = convolution(x, w, step, **options)
        return jax_cudnn.conv(x, w, bias=b, activation=activation, **given)

    def max_pool(self, x: jax.Array) -> Any:
        return jax_cudnn.max_pool(x, (3, 3), (2, 2), [(1, 1), (1, 1)])


class F8Kit(CudnnKit):
    """jax_cudnn's layers with products in f8: heads stay in 16 bits.

    A layer of few outputs, as a classifier's head, stays so, too.
    """

    name = "jax_cudnn, f8"

    def dense(
        self, x: Any, w: Any, b: Any = None, *, residual: Any = None, **more: Any
    ) -> jax.Array:
        if any(size % 16 for size in w.shape):
            return super().dense(x, w, b, residual=residual, **more)
        y = f8.dense(x, w, bias=b, **more)
        return y if residual is None else y + residual

    mlp = Composed.mlp  # of its own dense layers

    def gated_mlp(
        self, x: Any, gate: Any, up: Any, down: Any, residual: Any
    ) -> jax.Array:
        return f8.gated_mlp(x, gate, up, down) + residual
