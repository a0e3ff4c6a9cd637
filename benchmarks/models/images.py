# SPDX-License-Identifier: Apache-2.0
"""Models of images: DiT, EfficientNet, MLP-Mixer, and a CNN of private training.

They are written over the kits of JAX alone, like those of biased.py.
"""

from typing import Any

import numpy as np

from benchmarks.models.zoo import (
    Batch,
    Images,
    Model,
    Shape,
    Weights,
    model,
    pictures,
    square,
)

# --- DiT ------------------------------------------------------------------------------


def _dit(kit: Any, w: Weights, batch: dict[str, Any], size: Images) -> Any:
    """Return the noise of latent images, in blocks that a time step modulates."""
    (d,), (layers,), h = size.widths, size.depths, size.heads
    x = kit.conv(batch["images"], *w.window(2, 2, 4, d), 2)
    b, side = x.shape[:2]
    x = x.reshape(b, side * side, d) + w.table(side * side, d)
    time = kit.dense(batch["time"], *w.layer(256, d), activation="silu")
    time = kit.dense(time, *w.layer(d, d), activation="silu")
    for _ in range(layers):
        told = kit.dense(time, *w.layer(d, 6 * d))
        shift, scale, gate, *rest = kit.split(told, 6)
        y = kit.adaptive_norm(x, scale, shift)
        qkv = kit.dense(y, *w.layer(d, 3 * d))
        y = kit.self_attention(qkv, h, is_causal=False)
        x = kit.branch(y, *w.layer(d, d), gate, x)
        shift, scale, gate = rest
        y = kit.adaptive_norm(x, scale, shift)
        y = kit.dense(y, *w.layer(d, 4 * d), activation="gelu")
        x = kit.branch(y, *w.layer(4 * d, d), gate, x)
    told = kit.dense(time, *w.layer(d, 2 * d))
    shift, scale = kit.split(told, 2)
    x = kit.adaptive_norm(x, scale, shift)
    return kit.dense(x, *w.layer(d, 16))


def _noise(size: Images, rng: np.random.Generator) -> Batch:
    shapes: dict[str, Shape] = {
        "images": (size.batch, size.side, size.side, 4),
        "time": (size.batch, 256),
        "targets": (size.batch, (size.side // 2) ** 2, 16),
    }
    return {k: rng.standard_normal(v, np.float32) for k, v in shapes.items()}


# --- EfficientNet ---------------------------------------------------------------------


def _normed(
    kit: Any,
    w: Weights,
    x: Any,
    to: int,
    side: int = 1,
    step: int = 1,
    *,
    is_depthwise: bool = False,
    activation: Any = "silu",
) -> Any:
    c = x.shape[-1]
    filters = w.filters(side, side, 1 if is_depthwise else c, to)
    y = kit.conv(x, filters, None, step, groups=c if is_depthwise else 1)
    return kit.batch_norm(y, *w.norm(to), activation=activation)


def _squeezed(kit: Any, w: Weights, x: Any, inner: int) -> Any:
    """Return images times what a small MLP makes of each one's mean."""
    c = x.shape[-1]
    y = kit.dense(x.mean((1, 2)), *w.layer(c, inner), activation="silu")
    y = kit.dense(y, *w.layer(inner, c), activation="sigmoid")
    return x * y[:, None, None]


def _efficientnet(kit: Any, w: Weights, batch: dict[str, Any], size: Images) -> Any:
    first, *widths, last = size.widths
    steps, sides = (1, 2, 2, 2, 1, 2, 1), (3, 3, 5, 3, 5, 5, 3)
    x = _normed(kit, w, batch["images"], first, 3, 2)
    stages = zip(widths, size.depths, steps, sides, strict=False)
    for stage, (to, depth, step, side) in enumerate(stages):
        for i in range(depth):
            c = x.shape[-1]
            wide = 6 * c if stage else c
            y = _normed(kit, w, x, wide) if stage else x
            y = _normed(kit, w, y, wide, side, 1 if i else step, is_depthwise=True)
            y = _squeezed(kit, w, y, max(1, c // 4))
            y = _normed(kit, w, y, to, activation=None)
            x = x + y if i else y
    x = _normed(kit, w, x, last).mean((1, 2))
    return kit.dense(x, *w.layer(last, size.classes))


# --- MLP-Mixer ------------------------------------------------------------------------


def _mixer(kit: Any, w: Weights, batch: dict[str, Any], size: Images) -> Any:
    """Return classes after MLPs over patches and over channels, by turns."""
    (d,), (layers,), patch = size.widths, size.depths, 16
    x = kit.conv(batch["images"], *w.window(patch, patch, 3, d), patch)
    b, s = x.shape[0], x.shape[1] * x.shape[2]
    x = x.reshape(b, s, d)

    def mlp(y: Any, inner: int, residual: Any) -> Any:
        return kit.mlp(y, *w.mlp(y.shape[-1], inner), residual=residual)

    for _ in range(layers):
        y = kit.layer_norm(x, *w.norm(d)).transpose(0, 2, 1)
        x = x + mlp(y, d // 2, None).transpose(0, 2, 1)
        x = mlp(kit.layer_norm(x, *w.norm(d)), 4 * d, x)
    x = kit.layer_norm(x, *w.norm(d)).mean((1,))
    return kit.dense(x, *w.layer(d, size.classes))


# --- gradients of single examples -----------------------------------------------------


def _small_cnn(kit: Any, w: Weights, batch: dict[str, Any], size: Images) -> Any:
    x = batch["images"]
    for stage, (to, depth) in enumerate(zip(size.widths, size.depths, strict=True)):
        for i in range(depth):
            filters = w.filters(3, 3, x.shape[-1], to)
            x = kit.conv(x, filters, w.zeros(to), 2 if stage and not i else 1)
            x = kit.group_norm(x, *w.norm(to), groups=8, activation="relu")
    x, c = x.mean((1, 2)), size.widths[-1]
    return kit.dense(x, *w.layer(c, size.classes))


# --- all ------------------------------------------------------------------------------


def images(*, small: bool = False) -> list[Model]:
    """Return the models; small ones try a script on a CPU."""
    if small:
        dit = Images(side=8, batch=3, widths=(32,), depths=(2,), heads=4)
        efficientnet = Images(
            side=32, batch=4, widths=(8, 8, 16, 24, 32), depths=(1, 2, 1), classes=8
        )
        mixer = Images(side=48, batch=3, widths=(24,), depths=(2,), classes=8)
        cnn = Images(side=8, batch=3, widths=(16, 24), depths=(1, 2), classes=8)
    else:
        dit = Images(side=32, batch=64, widths=(1152,), depths=(8,), heads=16)
        efficientnet = Images(
            side=224, batch=128, widths=(32, 16, 24, 40, 80, 112, 192, 320, 1280),
            depths=(1, 2, 2, 3, 3, 4, 1),
        )  # fmt: skip
        mixer = Images(side=224, batch=128, widths=(768,), depths=(12,))
        cnn = Images(
            side=32, batch=256, widths=(64, 128, 256), depths=(2, 2, 2), classes=10
        )
    return [
        model(
            "DiT-XL/2 blocks", dit, _noise, _dit, square, untuned_only=True,
            about="8 blocks of width 1152 with 16 heads of 72, adaptive layer norm "
            "and gates",
        ),
        model(
            "EfficientNet-B0", efficientnet, pictures, _efficientnet, untuned_only=True,
            about="depthwise convolutions, batch norm, squeeze and excitation",
        ),
        model(
            "MLP-Mixer-B/16", mixer, pictures, _mixer, untuned_only=True,
            about="12 blocks of width 768, MLPs over 196 patches and over channels",
        ),
        model(
            "per-example gradients", cnn, pictures, _small_cnn, untuned_only=True,
            clips_examples=True,
            about="a CNN of six convolutions with group norms, each example's "
            "gradient clipped",
        ),
    ]  # fmt: skip
