# SPDX-License-Identifier: Apache-2.0
"""Models of sound: Whisper and WaveNet.

They are written over the kits of JAX alone, like those of biased.py.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.zoo import Batch, Model, Weights, model

# --- Whisper --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Speech:
    layers: int
    width: int
    heads: int
    frames: int
    vocabulary: int
    context: int
    batch: int

    @property
    def told(self) -> str:
        return f"{self.batch} x {self.frames}"


def _attended(
    kit: Any, w: Weights, x: Any, source: Any, h: int, *, is_causal: bool = False
) -> Any:
    """Return x plus its attention to a source, or to itself where that is None."""
    b, s, d = x.shape
    y = kit.layer_norm(x, *w.norm(d))
    source = y if source is None else source
    t = source.shape[1]
    q = kit.dense(y, *w.layer(d, d)).reshape(b, s, h, d // h)
    k = kit.dense(source, w.product(d, d)).reshape(b, t, h, d // h)
    v = kit.dense(source, *w.layer(d, d)).reshape(b, t, h, d // h)
    y = kit.attention(q, k, v, is_causal=is_causal).reshape(b, s, d)
    return kit.dense(y, *w.layer(d, d), residual=x)


def _computed(kit: Any, w: Weights, x: Any) -> Any:
    d = x.shape[-1]
    y = kit.layer_norm(x, *w.norm(d))
    return kit.mlp(y, *w.mlp(d), residual=x)


def _whisper(kit: Any, w: Weights, batch: dict[str, Any], size: _Speech) -> Any:
    d, h = size.width, size.heads
    x = kit.conv(batch["sound"], *w.window(3, 80, d), activation="gelu")
    x = kit.conv(x, *w.window(3, d, d), 2, activation="gelu")
    x = x + w.table(size.frames // 2, d)
    for _ in range(size.layers):
        x = _computed(kit, w, _attended(kit, w, x, None, h))
    source = kit.layer_norm(x, *w.norm(d))
    words = w.table(size.vocabulary, d)
    x = kit.embed(words, batch["tokens"]) + w.table(size.context, d)
    for _ in range(size.layers):
        x = _attended(kit, w, x, None, h, is_causal=True)
        x = _computed(kit, w, _attended(kit, w, x, source, h))
    return kit.logits(kit.layer_norm(x, *w.norm(d)), words)


def _speech(size: _Speech, rng: np.random.Generator) -> Batch:
    shape = (size.batch, size.context + 1)
    words = rng.integers(0, size.vocabulary, shape, np.int32)
    sound = rng.standard_normal((size.batch, size.frames, 80), np.float32)
    return {"sound": sound, "tokens": words[:, :-1], "labels": words[:, 1:]}


# --- WaveNet --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Wave:
    stacks: int
    dilations: tuple[int, ...]
    width: int
    skipped: int
    levels: int
    samples: int
    batch: int

    @property
    def told(self) -> str:
        return f"{self.batch} x {self.samples}"


def _wavenet(kit: Any, w: Weights, batch: dict[str, Any], size: _Wave) -> Any:
    c, skipped = size.width, size.skipped
    x = kit.embed(w.table(size.levels, c), batch["samples"])
    total: Any = None
    for dilation in size.dilations * size.stacks:
        y = kit.conv(x, *w.window(2, c, 2 * c), dilation=dilation, is_causal=True)
        y, gate = kit.split(y, 2)
        y = jnp.tanh(y) * jax.nn.sigmoid(gate)
        total = kit.dense(y, *w.layer(c, skipped), residual=total)
        x = kit.dense(y, *w.layer(c, c), residual=x)
    y = kit.relu(total)
    y = kit.dense(y, *w.layer(skipped, skipped), activation="relu")
    return kit.dense(y, *w.layer(skipped, size.levels))


def _waves(size: _Wave, rng: np.random.Generator) -> Batch:
    # A sum of two tones, so there is to learn.
    time = np.arange(size.samples + 1) / 16000
    pitch = rng.uniform(100, 1000, (2, size.batch, 1))
    waves = np.sin(2 * np.pi * pitch * time).mean(0)
    levels = ((waves + 1) / 2 * (size.levels - 1)).astype(np.int32)
    return {"samples": levels[:, :-1], "labels": levels[:, 1:]}


# --- all ------------------------------------------------------------------------------


def sounds(*, small: bool = False) -> list[Model]:
    """Return the models; small ones try a script on a CPU."""
    if small:
        whisper = _Speech(
            layers=1, width=32, heads=2, frames=24, vocabulary=64, context=10, batch=2
        )
        wavenet = _Wave(
            stacks=1, dilations=(1, 2, 4), width=16, skipped=24, levels=32, samples=40,
            batch=2,
        )  # fmt: skip
    else:
        whisper = _Speech(
            layers=6, width=768, heads=12, frames=3000, vocabulary=51872, context=448,
            batch=16,
        )  # fmt: skip
        wavenet = _Wave(
            stacks=2, dilations=tuple(2**i for i in range(10)), width=128, skipped=256,
            levels=256, samples=8192, batch=4,
        )  # fmt: skip
    return [
        model(
            "Whisper-like", whisper, _speech, _whisper, untuned_only=True,
            about="6 + 6 blocks of width 768 after two convolutions, attention to "
            "1500 frames",
        ),
        model(
            "WaveNet", wavenet, _waves, _wavenet, untuned_only=True,
            about="20 dilated causal convolutions of width 128, gated; XLA has no "
            "kernel for the gradient of a dilated filter",
        ),
    ]  # fmt: skip
