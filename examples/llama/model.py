# SPDX-License-Identifier: Apache-2.0
"""Llama in Flax nnx, with the kernels of jax_cudnn or those of plain JAX.

How the arrays are divided over devices is said by llama/layout.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jax_cudnn
import jax_cudnn.flax
from jax_cudnn import f8, masks, parallel
from jax_cudnn.flax.nnx import F8DotGeneral, RMSNorm
from llama.layout import Layout
from llama.settings import LlamaSettings


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Who computes what.

    ``layer`` returns the `dot_general` of a layer, by the name of its weights;
    ``dot_general`` is that of the output layer. ``rotary`` takes queries or keys and
    positions. ``within`` makes of the document of each token what ``attention`` takes
    after query, key and value; None is for no documents. ``add_norm`` returns the norm
    of a sum, and the sum. ``gated`` returns the hidden layer of a block.
    """

    attention: Callable[..., jax.Array]
    within: Callable[..., Any]
    rotary: Callable[..., jax.Array]
    norm: Callable[..., nnx.RMSNorm]
    add_norm: Callable[..., tuple[jax.Array, jax.Array]]
    layer: Callable[[str], Any]
    dot_general: Callable[..., jax.Array]
    gated: Callable[..., jax.Array]


def kernels_for(
    settings: LlamaSettings, layout: Layout, most_documents: int
) -> Kernels:
    """Return who computes what: jax_cudnn, in f8 if asked for, or plain JAX."""
    if settings.baseline:
        return _plain_kernels(settings)

    def in_f8(name: str) -> F8DotGeneral:
        # Scales are those of the tensors themselves, so that there is no state to carry
        # along. Copies in f8 are gathered, not the weights: a byte for each number.
        used = layout.used(f"{name}.kernel")
        return F8DotGeneral(f8.Current(), rhs_sharding=used)

    def add_norm(norm: RMSNorm, x: jax.Array, residual: jax.Array) -> Any:
        return norm(x, residual=residual)

    return Kernels(
        attention=functools.partial(_attention, layout),
        within=functools.partial(_packed, layout, most_documents),
        rotary=functools.partial(jax_cudnn.apply_rotary, base=settings.rotary_base),
        norm=RMSNorm,
        add_norm=add_norm,
        layer=in_f8 if settings.f8 else lambda _: jax_cudnn.flax.dot_general,
        dot_general=jax_cudnn.flax.dot_general,
        gated=_gated_by_layers if settings.f8 else _gated_in_kernel,
    )


def _attention(
    layout: Layout,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: masks.Packed | None,
) -> jax.Array:
    """Return causal attention, within documents if there are some."""
    if layout.sequence == 1:
        return jax_cudnn.sdpa(query, key, value, mask=mask, is_causal=True)
    return parallel.sharded_sdpa(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        mesh=layout.mesh,
        axis="sequence",
        batch_axis=("data", "fsdp"),
        head_axis="tensor",
        method=layout.method,
        order=layout.order,
    )


def _packed(layout: Layout, most: int, documents: jax.Array) -> masks.Packed:
    """Return where the documents of each row begin and end."""
    return masks.Packed.from_segment_ids(layout.in_sequence(documents), most)


def _gated_in_kernel(x: jax.Array, gate: nnx.Linear, up: nnx.Linear) -> jax.Array:
    return jax_cudnn.gated_matmul(x, gate.kernel[...], up.kernel[...])


def _gated_by_layers(x: jax.Array, gate: nnx.Linear, up: nnx.Linear) -> jax.Array:
    return jax.nn.silu(gate(x)) * up(x)


def _plain_kernels(settings: LlamaSettings) -> Kernels:
    """Return what JAX and Flax have themselves, with cuDNN's attention on a GPU."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def attention(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        documents: jax.Array | None,
    ) -> jax.Array:
        mask = None
        if documents is not None:
            mask = documents[:, None, :, None] == documents[:, None, None, :]
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=True,
            implementation=implementation,
        )

    def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        omega = settings.rotary_base ** (-jnp.arange(half) / half)
        angles = (positions[:, None] * omega)[:, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return turned.astype(x.dtype)

    def add_norm(norm: nnx.RMSNorm, x: jax.Array, residual: jax.Array) -> Any:
        total = x + residual
        return norm(total), total

    return Kernels(
        attention=attention,
        within=lambda documents: documents,
        rotary=rotary,
        norm=nnx.RMSNorm,
        add_norm=add_norm,
        layer=lambda _: jax.lax.dot_general,
        dot_general=jax.lax.dot_general,
        gated=_gated_by_layers,
    )


class Block(nnx.Module):
    """Attention and a gated perceptron (SwiGLU), each on the normalised residual.

    The products `out` and `down` sum over what is split by "tensor", so the residual is
    added after that sum.
    """

    def __init__(self, settings: LlamaSettings, kernels: Kernels, rngs: nnx.Rngs):
        width, hidden, size = settings.width, settings.hidden, settings.head_size
        self.kernels = kernels
        common = {"use_bias": False, "dtype": settings.dtype, "rngs": rngs}
        first = {"kernel_init": nnx.initializers.normal(0.02), **common}
        # Each layer adds two terms to the residual.
        deviation = 0.02 / math.sqrt(2 * settings.layers)
        last = {"kernel_init": nnx.initializers.normal(deviation), **common}
        norm = functools.partial(
            kernels.norm,
            width,
            epsilon=settings.epsilon,
            dtype=settings.dtype,
            rngs=rngs,
        )

        def heads(name: str, count: int) -> nnx.LinearGeneral:
            product = kernels.layer(name)
            return nnx.LinearGeneral(width, (count, size), dot_general=product, **first)

        self.attention_norm = norm()
        self.query = heads("query", settings.heads)
        self.key = heads("key", settings.key_heads)
        self.value = heads("value", settings.key_heads)
        self.out = nnx.LinearGeneral(
            (settings.heads, size),
            width,
            axis=(-2, -1),
            dot_general=kernels.layer("out"),
            **last,
        )
        self.mlp_norm = norm()
        self.gate, self.up = (
            nnx.Linear(width, hidden, dot_general=kernels.layer(name), **first)
            for name in ("gate", "up")
        )
        self.down = nnx.Linear(hidden, width, dot_general=kernels.layer("down"), **last)

    def __call__(self, x: jax.Array, positions: jax.Array, documents: Any) -> jax.Array:
        """Return the residual (batch, length, width) after the block."""
        kernels, y = self.kernels, self.attention_norm(x)
        query, key = (
            kernels.rotary(heads, positions) for heads in (self.query(y), self.key(y))
        )
        attended = kernels.attention(query, key, self.value(y), documents)
        y, x = kernels.add_norm(self.mlp_norm, self.out(attended), x)
        return x + self.down(kernels.gated(y, self.gate, self.up))


class Llama(nnx.Module):
    """Llama; takes (batch, length) tokens and returns f32 logits.

    The parameters of all blocks are stacked, and one block is compiled for all of them.
    """

    def __init__(
        self,
        settings: LlamaSettings,
        layout: Layout,
        rngs: nnx.Rngs,
        most_documents: int,
    ):
        width, dtype = settings.width, settings.dtype
        init = nnx.initializers.normal(0.02)
        kernels = kernels_for(settings, layout, most_documents)
        self.settings, self.layout, self.kernels = settings, layout, kernels
        self.tokens = nnx.Embed(
            settings.vocabulary, width, embedding_init=init, dtype=dtype, rngs=rngs
        )

        @nnx.split_rngs(splits=settings.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(settings, kernels, rngs)

        self.blocks = stacked(rngs)
        self.norm = kernels.norm(
            width, epsilon=settings.epsilon, dtype=dtype, rngs=rngs
        )
        self.head = nnx.Linear(
            width, settings.vocabulary, use_bias=False, kernel_init=init, rngs=rngs
        )

    def __call__(
        self, tokens: jax.Array, documents: jax.Array | None = None
    ) -> jax.Array:
        """Return the logits (batch, length, vocabulary).

        Tokens lie in the order of the layout. `documents` has the document of each, of
        which it sees no other; a row has at most `most_documents`. Scores depend on
        differences of positions only, so positions go on from one document to the next.
        """
        settings, layout = self.settings, self.layout
        positions = jnp.asarray(layout.positions(tokens.shape[1]))
        graph, stacked = nnx.split(self.blocks)
        within = None if documents is None else self.kernels.within(documents)

        def layer(x: jax.Array, params: nnx.State) -> tuple[jax.Array, None]:
            params = layout.gathered(params, settings.dtype, f8=settings.f8)
            x = nnx.merge(graph, params)(x, positions, within)
            return jax.lax.with_sharding_constraint(x, layout.activations), None

        x = self.tokens(tokens)
        x = jax.lax.with_sharding_constraint(x, layout.activations)
        layer = layout.checkpointed(layer)
        x = jax.lax.scan(layer, x, stacked, unroll=layout.unroll)[0]
        return self.kernels.dot_general(
            self.norm(x),
            self.head.kernel[...],
            (((2,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
