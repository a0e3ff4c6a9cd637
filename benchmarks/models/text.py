# SPDX-License-Identifier: Apache-2.0
"""Models of text: BERT, blocks of Gemma 2, and a mixture of experts like Mixtral.

They are written over the kits of JAX alone, like those of biased.py.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.models.zoo import (
    Batch,
    Language,
    Model,
    Weights,
    angles,
    model,
    rotated,
)

# --- BERT -----------------------------------------------------------------------------


def _bert(kit: Any, w: Weights, batch: dict[str, Any], size: Language) -> Any:
    d, h = size.width, size.heads
    words = w.table(size.vocabulary, d)
    x = kit.embed(words, batch["tokens"]) + w.table(size.context, d)
    x = kit.layer_norm(x, *w.norm(d))
    b, s = x.shape[:2]
    for _ in range(size.layers):
        q, k, v = (
            kit.dense(x, *w.layer(d, d)).reshape(b, s, h, d // h) for _ in range(3)
        )
        y = kit.attention(q, k, v, key_value_seq_lengths=batch["lengths"])
        x = kit.dense(y.reshape(b, s, d), *w.layer(d, d), residual=x)
        x = kit.layer_norm(x, *w.norm(d))
        x = kit.mlp(x, *w.mlp(d, size.inner), residual=x)
        x = kit.layer_norm(x, *w.norm(d))
    x = jnp.take_along_axis(x, batch["places"][..., None], 1)
    x = kit.dense(x, *w.layer(d, d), activation="gelu")
    return kit.logits(kit.layer_norm(x, *w.norm(d)), words)


def _masked_text(size: Language, rng: np.random.Generator) -> Batch:
    """Return sequences of many lengths, of which 15 % of the words are to be found."""
    lengths = rng.integers(size.context // 4, size.context + 1, size.batch)
    hidden = max(1, 15 * size.context // 100)
    places = np.sort(rng.random((size.batch, hidden)) * lengths[:, None])
    shape = (size.batch, size.context)
    return {
        "tokens": rng.integers(0, size.vocabulary, shape, np.int32),
        "lengths": lengths.astype(np.int32),
        "places": places.astype(np.int32),
        "labels": rng.integers(0, size.vocabulary, (size.batch, hidden), np.int32),
    }


# --- Gemma 2 and Mixtral --------------------------------------------------------------


def _projected(kit: Any, w: Weights, x: Any, size: Language) -> tuple[Any, Any, Any]:
    """Return rotated queries and keys, and values."""
    (b, s, d), n = x.shape, size.head
    q = kit.dense(x, w.product(d, size.heads * n)).reshape(b, s, size.heads, n)
    k, v = (
        kit.dense(x, w.product(d, size.key_heads * n)).reshape(b, s, size.key_heads, n)
        for _ in range(2)
    )
    places = angles(np.arange(s)[None, :], n)[:, :, None]
    cosine, sine = (kit.constant(f(places)) for f in (np.cos, np.sin))
    return rotated(kit, q, cosine, sine), rotated(kit, k, cosine, sine), v


def _gemma(kit: Any, w: Weights, batch: dict[str, Any], size: Language) -> Any:
    """Return logits of blocks that see a window of keys, and all keys, by turns."""
    d, inner = size.width, size.inner
    words = w.table(size.vocabulary, d)
    x = kit.embed(words, batch["tokens"]) * d**0.5
    b, s = x.shape[:2]
    for i in range(size.layers):
        q, k, v = _projected(kit, w, kit.rms_norm(x, w.ones(d)), size)
        y = kit.capped_attention(q, k, v, 50.0, s if i % 2 else s // 2)
        y = kit.dense(y.reshape(b, s, -1), w.product(size.heads * size.head, d))
        x = x + kit.rms_norm(y, w.ones(d))
        y = kit.rms_norm(x, w.ones(d))
        y = kit.gated(y, w.product(d, inner), w.product(d, inner), activation="gelu")
        x = x + kit.rms_norm(kit.dense(y, w.product(inner, d)), w.ones(d))
    logits = kit.logits(kit.rms_norm(x, w.ones(d)), words)
    return 30.0 * jnp.tanh(logits / 30.0)


def _mixtral(kit: Any, w: Weights, batch: dict[str, Any], size: Language) -> Any:
    """Return logits of blocks in which 2 of 8 experts take each token."""
    d, inner, experts = size.width, size.inner, 8
    words = w.table(size.vocabulary, d)
    x = kit.embed(words, batch["tokens"])
    b, s = x.shape[:2]
    for _ in range(size.layers):
        q, k, v = _projected(kit, w, kit.rms_norm(x, w.ones(d)), size)
        y = kit.attention(q, k, v, is_causal=True).reshape(b, s, -1)
        x = kit.dense(y, w.product(size.heads * size.head, d), residual=x)
        y = kit.rms_norm(x, w.ones(d))
        shapes = (experts, d, inner), (experts, d, inner), (experts, inner, d)
        router, *mlps = w.product(d, experts), *(w.product(*each) for each in shapes)
        x = x + kit.experts(y, router, *mlps, 2)
    return kit.logits(kit.rms_norm(x, w.ones(d)), words)


def _next_words(size: Language, rng: np.random.Generator) -> Batch:
    shape = (size.batch, size.context + 1)
    words = rng.integers(0, size.vocabulary, shape, np.int32)
    return {"tokens": words[:, :-1], "labels": words[:, 1:]}


# --- all ------------------------------------------------------------------------------


def texts(*, small: bool = False) -> list[Model]:
    """Return the models; small ones try a script on a CPU."""
    if small:
        bert = gemma = mixtral = Language(
            layers=2, width=32, heads=4, head=8, key_heads=2, inner=48, vocabulary=64,
            context=16, batch=2,
        )  # fmt: skip
    else:
        bert = Language(
            layers=12, width=768, heads=12, head=64, key_heads=12, inner=3072,
            vocabulary=30528, context=512, batch=32,
        )  # fmt: skip
        gemma = Language(
            layers=4, width=2304, heads=8, head=256, key_heads=4, inner=9216,
            vocabulary=32000, context=8192, batch=1,
        )  # fmt: skip
        mixtral = Language(
            layers=2, width=2048, heads=16, head=128, key_heads=4, inner=5632,
            vocabulary=32000, context=2048, batch=8,
        )  # fmt: skip
    return [
        model(
            "BERT-base", bert, _masked_text, _bert, untuned_only=True,
            about="12 blocks of width 768, norms after residuals, padding by lengths",
        ),
        model(
            "Gemma-2-like", gemma, _next_words, _gemma, untuned_only=True,
            about="4 blocks of width 2304 with 8 query and 4 key heads of 256, "
            "scores capped by tanh, half of them with a window of 4096",
        ),
        model(
            "Mixtral-like", mixtral, _next_words, _mixtral, untuned_only=True,
            about="2 blocks of width 2048, in which 2 of 8 experts of 2048 x 5632 "
            "take each token",
        ),
    ]  # fmt: skip
