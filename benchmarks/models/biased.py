# SPDX-License-Identifier: Apache-2.0
"""Models that take long to compile: T5-like, Swin-like and a U-Net of diffusion.

The first two have attention with a learned bias. They are written over the kits of
JAX alone. benchmarks/models/compile_times.py compiles them, too.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models.zoo import (
    Batch,
    Language,
    Model,
    Weights,
    model,
    pictures,
    square,
)

# --- T5 -------------------------------------------------------------------------------


def _buckets(count: int, *, is_causal: bool) -> np.ndarray:
    """Return T5's bucket of 32 for each pair of positions: exact near, log far."""
    distance = np.arange(count)[:, None] - np.arange(count)[None, :]
    half = 32 if is_causal else 16
    first = np.zeros_like(distance) if is_causal else np.where(distance < 0, 16, 0)
    distance = np.maximum(distance, 0) if is_causal else np.abs(distance)
    exact = half // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / np.log(128 / exact)
    far = np.minimum(exact + ratio * (half - exact), half - 1).astype(np.int32)
    return (first + np.where(distance < exact, distance, far)).astype(np.int32)


def _relative_bias(kit: Any, w: Weights, size: Language, *, is_causal: bool) -> Any:
    """Return a learned bias (1, h, s, s), which all layers of a stack share."""
    # Not a lookup: XLA adds up its gradient by atomics, 8192 and more to a number.
    chosen = np.eye(32, dtype=np.float32)[_buckets(size.context, is_causal=is_causal)]
    bias = kit.dense(kit.constant(chosen), w.product(32, size.heads))
    return _of_heads(bias)


def _of_heads(bias: jax.Array) -> jax.Array:
    """Return a bias (1, h, s, t), of one whose heads are the last axis."""
    return jnp.transpose(bias, (2, 0, 1))[None]


def _t5_attention(
    kit: Any, w: Weights, x: Any, source: Any, bias: Any, *, h: int, is_causal: bool
) -> Any:
    (b, s, d), t = x.shape, source.shape[1]
    y = kit.rms_norm(x, w.ones(d))
    source = y if source is x else source
    q = kit.dense(y, w.product(d, d)).reshape(b, s, h, d // h)
    k = kit.dense(source, w.product(d, d)).reshape(b, t, h, d // h)
    v = kit.dense(source, w.product(d, d)).reshape(b, t, h, d // h)
    y = kit.attention(q, k, v, bias, is_causal=is_causal).reshape(b, s, d)
    return kit.dense(y, w.product(d, d), residual=x)


def _t5_mlp(kit: Any, w: Weights, x: Any, d: int) -> Any:
    y = kit.rms_norm(x, w.ones(d))
    y = kit.dense(y, w.product(d, 4 * d), activation="relu")
    return kit.dense(y, w.product(4 * d, d), residual=x)


def _t5(kit: Any, w: Weights, batch: dict[str, Any], size: Language) -> Any:
    d = size.width
    words = w.table(size.vocabulary, d)
    attend = functools.partial(_t5_attention, kit, w, h=size.heads)
    x = kit.embed(words, batch["source"])
    bias = _relative_bias(kit, w, size, is_causal=False)
    for _ in range(size.layers):
        x = _t5_mlp(kit, w, attend(x, x, bias, is_causal=False), d)
    source = kit.rms_norm(x, w.ones(d))
    x = kit.embed(words, batch["tokens"])
    bias = _relative_bias(kit, w, size, is_causal=True)
    for _ in range(size.layers):
        x = attend(x, x, bias, is_causal=True)
        x = _t5_mlp(kit, w, attend(x, source, None, is_causal=False), d)
    return kit.logits(kit.rms_norm(x, w.ones(d)), words)


def _pairs_of_text(size: Language, rng: np.random.Generator) -> Batch:
    shape = (size.batch, size.context)
    return {
        name: rng.integers(0, size.vocabulary, shape, np.int32)
        for name in ("source", "tokens", "labels")
    }


# --- Swin -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Windows:
    side: int
    batch: int
    window: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    classes: int = 1000

    @property
    def told(self) -> str:
        return f"{self.batch} x {self.side} x {self.side}"


def _window_places(window: int) -> np.ndarray:
    """Return, for each pair of positions of a window, the place in a table of both."""
    y, x = (axis.ravel() for axis in np.mgrid[:window, :window])
    rows, columns = (a[:, None] - a[None, :] + window - 1 for a in (y, x))
    return (rows * (2 * window - 1) + columns).astype(np.int32)


def _same_region(side: int, window: int, shift: int, batch: int) -> np.ndarray:
    """Return the mask (b windows, 1, s, s) of windows that were shifted around."""
    part = np.zeros(side, np.int32)
    part[side - window :], part[side - shift :] = 1, 2
    region = 3 * part[:, None] + part[None, :]
    count = side // window
    region = region.reshape(count, window, count, window).transpose(0, 2, 1, 3)
    region = region.reshape(count * count, window * window)
    mask = region[:, None, :, None] == region[:, None, None, :]
    return np.tile(mask, (batch, 1, 1, 1))


def _swin_block(kit: Any, w: Weights, x: Any, *, n: int, h: int, shift: int) -> Any:
    b, side, _, c = x.shape
    s, count = n * n, side // n
    y = kit.layer_norm(x, *w.norm(c))
    y = jnp.roll(y, (-shift, -shift), (1, 2)) if shift else y
    y = y.reshape(b, count, n, count, n, c).transpose(0, 1, 3, 2, 4, 5)
    y = y.reshape(b * count * count, s, c)
    qkv = kit.dense(y, *w.layer(c, 3 * c))
    parts = (part.reshape(-1, s, h, c // h) for part in kit.split(qkv, 3))
    places = kit.constant(_window_places(n))
    bias = _of_heads(kit.embed(w.table((2 * n - 1) ** 2, h), places))
    mask = kit.constant(_same_region(side, n, shift, b)) if shift else None
    y = kit.attention(*parts, bias, mask=mask).reshape(-1, s, c)
    y = kit.dense(y, *w.layer(c, c))
    y = y.reshape(b, count, count, n, n, c).transpose(0, 1, 3, 2, 4, 5)
    y = y.reshape(b, side, side, c)
    x = x + (jnp.roll(y, (shift, shift), (1, 2)) if shift else y)
    y = kit.layer_norm(x, *w.norm(c))
    return kit.mlp(y, *w.mlp(c), residual=x)


def _swin(kit: Any, w: Weights, batch: dict[str, Any], size: _Windows) -> Any:
    c, n = size.widths[0], size.window
    x = kit.conv(batch["images"], *w.window(4, 4, 3, c), 4)
    x = kit.layer_norm(x, *w.norm(c))
    for stage, (depth, h) in enumerate(zip(size.depths, size.heads, strict=True)):
        if stage:
            b, side, _, c = x.shape
            x = x.reshape(b, side // 2, 2, side // 2, 2, c).transpose(0, 1, 3, 4, 2, 5)
            x = x.reshape(b, side // 2, side // 2, 4 * c)
            x = kit.layer_norm(x, *w.norm(4 * c))
            x = kit.dense(x, w.product(4 * c, size.widths[stage]))
        for i in range(depth):
            shift = n // 2 if i % 2 and x.shape[1] > n else 0
            x = _swin_block(kit, w, x, n=n, h=h, shift=shift)
    c = size.widths[-1]
    x = kit.layer_norm(x, *w.norm(c)).mean((1, 2))
    return kit.dense(x, *w.layer(c, size.classes))


# --- the U-Net of Stable Diffusion 1.5 ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Diffusion:
    side: int
    batch: int
    widths: tuple[int, ...]
    heads: int
    words: int
    text: int
    groups: int = 32

    @property
    def told(self) -> str:
        return f"{self.batch} x {self.side} x {self.side}"


def _residual(
    kit: Any, w: Weights, x: Any, time: Any, to: int, size: _Diffusion
) -> Any:
    c = x.shape[-1]
    y = kit.group_norm(x, *w.norm(c), groups=size.groups, activation="silu")
    y = kit.conv(y, *w.window(3, 3, c, to))
    shift = kit.dense(time, *w.layer(time.shape[-1], to))
    y = y + shift[:, None, None]
    y = kit.group_norm(y, *w.norm(to), groups=size.groups, activation="silu")
    y = kit.conv(y, *w.window(3, 3, to, to))
    if c != to:
        x = kit.conv(x, *w.window(1, 1, c, to))
    return x + y


def _attends(
    kit: Any, w: Weights, x: Any, source: Any, size: _Diffusion, residual: Any
) -> Any:
    (b, s, c), (_, t, e) = x.shape, source.shape
    h = size.heads
    q = kit.dense(x, w.product(c, c)).reshape(b, s, h, c // h)
    k = kit.dense(source, w.product(e, c)).reshape(b, t, h, c // h)
    v = kit.dense(source, w.product(e, c)).reshape(b, t, h, c // h)
    y = kit.attention(q, k, v).reshape(b, s, c)
    return kit.dense(y, *w.layer(c, c), residual=residual)


def _transformer(kit: Any, w: Weights, images: Any, text: Any, size: _Diffusion) -> Any:
    b, y, _, c = images.shape
    x = kit.group_norm(images, *w.norm(c), groups=size.groups)
    x = kit.dense(x.reshape(b, y * y, c), *w.layer(c, c))
    z = kit.layer_norm(x, *w.norm(c))
    x = _attends(kit, w, z, z, size, x)
    z = kit.layer_norm(x, *w.norm(c))
    x = _attends(kit, w, z, text, size, x)
    z = kit.layer_norm(x, *w.norm(c))
    up = kit.dense(z, *w.layer(c, 4 * c))
    gate = kit.dense(z, *w.layer(c, 4 * c), activation="gelu")
    x = kit.dense(up * gate, *w.layer(4 * c, c), residual=x)
    x = kit.dense(x, *w.layer(c, c))
    return images + x.reshape(b, y, y, c)


def _down(kit: Any, w: Weights, x: Any, time: Any, text: Any, size: _Diffusion) -> Any:
    """Return what is left of images, and what is kept of them on the way."""
    kept = [x]
    for level, c in enumerate(size.widths):
        for _ in range(2):
            x = _residual(kit, w, x, time, c, size)
            if level < len(size.widths) - 1:
                x = _transformer(kit, w, x, text, size)
            kept.append(x)
        if level < len(size.widths) - 1:
            x = kit.conv(x, *w.window(3, 3, c, c), 2)
            kept.append(x)
    return x, kept


def _diffusion(kit: Any, w: Weights, batch: dict[str, Any], size: _Diffusion) -> Any:
    first, last = size.widths[0], size.widths[-1]
    text, time = batch["text"], batch["time"]
    time = kit.dense(time, *w.layer(first, 4 * first), activation="silu")
    time = kit.dense(time, *w.layer(4 * first, 4 * first), activation="silu")
    x = kit.conv(batch["images"], *w.window(3, 3, 4, first))
    x, kept = _down(kit, w, x, time, text, size)
    x = _residual(kit, w, x, time, last, size)
    x = _transformer(kit, w, x, text, size)
    x = _residual(kit, w, x, time, last, size)
    for level, c in reversed(list(enumerate(size.widths))):
        for _ in range(3):
            x = _residual(kit, w, kit.joined([x, kept.pop()]), time, c, size)
            if level < len(size.widths) - 1:
                x = _transformer(kit, w, x, text, size)
        if level:
            x = kit.conv(kit.doubled(x), *w.window(3, 3, c, c))
    x = kit.group_norm(x, *w.norm(first), groups=size.groups, activation="silu")
    return kit.conv(x, *w.window(3, 3, first, 4))


def _noise(size: _Diffusion, rng: np.random.Generator) -> Batch:
    shapes: dict[str, Sequence[int]] = {
        "images": (size.batch, size.side, size.side, 4),
        "targets": (size.batch, size.side, size.side, 4),
        "time": (size.batch, size.widths[0]),
        "text": (size.batch, size.words, size.text),
    }
    return {k: rng.standard_normal(v, np.float32) for k, v in shapes.items()}


# --- all ------------------------------------------------------------------------------


def biased(*, small: bool = False) -> list[Model]:
    """Return the models with a learned bias; small ones try a script on a CPU."""
    if small:
        t5 = Language(layers=2, width=32, heads=2, vocabulary=64, context=16, batch=2)
        swin = _Windows(
            side=32, batch=2, window=4, widths=(8, 16), depths=(2, 1), heads=(1, 2),
            classes=8,
        )  # fmt: skip
    else:
        t5 = Language(
            layers=6, width=768, heads=12, vocabulary=32128, context=512, batch=16
        )
        swin = _Windows(
            side=224, batch=64, window=7, widths=(96, 192, 384, 768),
            depths=(2, 2, 6, 2), heads=(3, 6, 12, 24),
        )  # fmt: skip
    return [
        model(
            "T5-like", t5, _pairs_of_text, _t5, untuned_only=True,
            about="6 + 6 blocks of width 768, a learned bias of relative positions",
        ),
        model(
            "Swin-like", swin, pictures, _swin, untuned_only=True,
            about="the sizes of Swin-T, windows of 7 x 7 with a learned bias",
        ),
    ]  # fmt: skip


_SMALL_UNET = _Diffusion(
    side=8, batch=2, widths=(16, 32), heads=2, words=5, text=24, groups=4
)


def whole_unet(*, small: bool = False) -> Model:
    """Return the U-Net, which plain JAX compiles for over two minutes."""
    size = _Diffusion(
        side=64, batch=4, widths=(320, 640, 1280, 1280), heads=8, words=77, text=768
    )
    return model(
        "SD-1.5-like U-Net", _SMALL_UNET if small else size, _noise, _diffusion, square,
        about="the U-Net of Stable Diffusion 1.5", untuned_only=True,
    )  # fmt: skip


def diffusion(*, small: bool = False) -> Model:
    """Return the two outer levels of the U-Net, where most of its time goes."""
    size = _Diffusion(side=64, batch=8, widths=(320, 640), heads=8, words=77, text=768)
    return model(
        "diffusion U-Net", _SMALL_UNET if small else size, _noise, _diffusion, square,
        about="the two outer levels of Stable Diffusion 1.5's U-Net, widths 320 and "
        "640", untuned_only=True,
    )  # fmt: skip
