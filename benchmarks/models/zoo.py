# SPDX-License-Identifier: Apache-2.0
"""Models as people write them, each once, over a kit of layers.

A kit has the layers of one package: plain JAX, jax_cudnn or PyTorch. So all contenders
compute the same from the same weights. Images and volumes have their channels last in
memory. What the axes of an image are to a kit's convolutions, it says by ``images``,
``pixels``, ``channels`` and ``joined``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Shape = tuple[int, ...]
Batch = dict[str, np.ndarray]
# How a package stores a weight: kits have their own layouts of products and filters.
Kind = Literal["product", "filter", "plain"]


class Weights:
    """The weights of a model, in the order in which it asks for them.

    Without arrays, each weight is drawn by NumPy, and kept with its kind.
    """

    def __init__(self, kit: Any, arrays: Sequence[Any] | None = None) -> None:
        """Take a kit and its arrays, or draw new ones."""
        self._kit = kit
        self._given = None if arrays is None else iter(arrays)
        self._rng = np.random.default_rng(0)
        self.drawn: list[np.ndarray] = []
        self.kinds: list[Kind] = []

    def product(self, *shape: int) -> Any:
        """Return the matrix of a product."""
        return self._next(shape, "product", shape[-2] ** -0.5)

    def filters(self, *shape: int) -> Any:
        """Return the filters of a convolution: space, channels in, channels out."""
        return self._next(shape, "filter", math.prod(shape[:-1]) ** -0.5)

    def table(self, *shape: int) -> Any:
        """Return a table of embeddings, or positions."""
        return self._next(shape, "plain", 0.02)

    def ones(self, *shape: int, times: float = 1.0) -> Any:
        """Return a factor."""
        return self._next(shape, "plain", 0.0, times)

    def zeros(self, *shape: int) -> Any:
        """Return a bias."""
        return self._next(shape, "plain", 0.0)

    def layer(self, *shape: int) -> tuple[Any, Any]:
        """Return the matrix of a product, and the bias after it."""
        return self.product(*shape), self.zeros(shape[-1])

    def window(self, *shape: int) -> tuple[Any, Any]:
        """Return the filters of a convolution, and the bias after it."""
        return self.filters(*shape), self.zeros(shape[-1])

    def norm(self, features: int) -> tuple[Any, Any]:
        """Return the factor and the bias of a norm."""
        return self.ones(features), self.zeros(features)

    def mlp(self, d: int, inner: int = 0) -> tuple[Any, ...]:
        """Return both layers of an MLP, by default with 4 d features between them."""
        inner = inner or 4 * d
        return *self.layer(d, inner), *self.layer(inner, d)

    def _next(self, shape: Shape, kind: Kind, spread: float, mean: float = 0.0) -> Any:
        if self._given is not None:
            return self._kit.weight(next(self._given))
        drawn = self._drawn(shape, spread, mean)
        self.drawn.append(drawn)
        self.kinds.append(kind)
        return self._kit.weight(self._kit.array(drawn))

    def _drawn(self, shape: Shape, spread: float, mean: float) -> np.ndarray:
        return mean + spread * self._rng.standard_normal(shape, np.float32)


class Composed:
    """Layers of a kit that are made of its others."""

    def images(self, x: Any) -> Any:
        """Return images, channels last, as the kit's convolutions take them."""
        return x

    def pixels(self, x: Any) -> Any:
        """Return what a convolution gave with the channels last."""
        return x

    def channels(self, x: Any) -> int:
        """Return the number of channels of what a convolution gave."""
        return x.shape[-1]

    def joined(self: Any, parts: Sequence[Any]) -> Any:
        """Join the channels of what convolutions gave."""
        return self.concatenate(parts)

    def self_attention(self: Any, qkv: Any, heads: int, *, is_causal: bool) -> Any:
        """Return attention, its heads joined, from one array of q, k and v."""
        b, s, d = qkv.shape
        shape = b, s, heads, d // 3 // heads
        q, k, v = (x.reshape(shape) for x in self.split(qkv, 3))
        return self.attention(q, k, v, is_causal=is_causal).reshape(b, s, d // 3)

    def mlp(self: Any, x: Any, w: Any, b: Any, v: Any, c: Any, residual: Any) -> Any:
        """Return gelu(x w + b) v + c, and the residual added where there is one."""
        return self.dense(
            self.dense(x, w, b, activation="gelu"), v, c, residual=residual
        )

    def gated_mlp(
        self: Any, x: Any, gate: Any, up: Any, down: Any, residual: Any
    ) -> Any:
        """Return (silu(x gate) * (x up)) down + residual."""
        return self.dense(self.gated(x, gate, up), down, residual=residual)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with its batch. The loss is what is trained, the output what is inferred.

    What is ``carried`` is of the batch, and goes from step to step: the output has it
    as a second result. AdamW trains at the ``rate``. With ``clips_examples``, each
    example's gradient is clipped to a norm of 1 before their mean is taken, as in
    differentially private training. One that is ``untuned_only`` is not written for
    PyTorch, and is neither tuned nor inferred. What it is ``about`` is said on the page
    where the name does not say it.
    """

    name: str
    size: str
    batch: Callable[[np.random.Generator], Batch]
    output: Callable[[Any, Weights, dict[str, Any]], Any]
    loss: Callable[[Any, Any, dict[str, Any]], Any] | None = None
    carried: tuple[str, ...] = ()
    rate: float = 1e-4
    clips_examples: bool = False
    untuned_only: bool = False
    about: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def trains(self) -> bool:
        """Whether it can be trained."""
        return self.loss is not None


def model(
    name: str,
    size: Any,
    batch: Callable[[Any, np.random.Generator], Batch],
    output: Callable[..., Any],
    loss: Callable[[Any, Any, dict[str, Any]], Any] | None = None,
    **more: Any,
) -> Model:
    """Return a model, given functions of its sizes; by default it learns labels."""
    return Model(
        name=name,
        size=size.told,
        batch=functools.partial(batch, size),
        output=functools.partial(output, size=size),
        loss=loss or entropy,
        **more,
    )


def entropy(kit: Any, output: Any, batch: dict[str, Any]) -> Any:
    """Return the mean cross entropy of logits and the labels of a batch."""
    return kit.cross_entropy(output, batch["labels"])


def square(kit: Any, output: Any, batch: dict[str, Any]) -> Any:
    """Return the mean of squared differences from the targets of a batch."""
    return kit.mean_square(output, batch["targets"])


# --- language -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Language:
    """The sizes of a model of language, as far as it has them."""

    layers: int
    width: int
    heads: int
    head: int = 0
    key_heads: int = 0
    inner: int = 0
    vocabulary: int
    context: int
    batch: int

    @property
    def told(self) -> str:
        """The batch, on the page."""
        return f"{self.batch} x {self.context}"


def _gpt(kit: Any, w: Weights, batch: dict[str, Any], size: Language) -> Any:
    d, h = size.width, size.heads
    words = w.table(size.vocabulary, d)
    x = kit.embed(words, batch["tokens"]) + w.table(size.context, d)
    for _ in range(size.layers):
        y = kit.layer_norm(x, *w.norm(d))
        qkv = kit.dense(y, *w.layer(d, 3 * d))
        y = kit.self_attention(qkv, h, is_causal=True)
        x = kit.dense(y, *w.layer(d, d), residual=x)
        y = kit.layer_norm(x, *w.norm(d))
        x = kit.mlp(y, *w.mlp(d), residual=x)
    x = kit.layer_norm(x, *w.norm(d))
    return kit.logits(x, words)


def angles(positions: np.ndarray, d: int) -> np.ndarray:
    """Return by how much each pair of d features turns at each position."""
    return positions[..., None] / 10000.0 ** (np.arange(0, d, 2) / d)


def rotated(kit: Any, x: Any, cosine: Any, sine: Any) -> Any:
    """Return pairs of features, turned."""
    one, two = kit.split(x, 2)
    return kit.concatenate([one * cosine - two * sine, two * cosine + one * sine])


def _llama(kit: Any, w: Weights, batch: dict[str, Any], size: Language) -> Any:
    d, h, k_heads = size.width, size.heads, size.key_heads
    n = d // h
    words = w.table(size.vocabulary, d)
    x = kit.embed(words, batch["tokens"])
    b, s = x.shape[:2]
    is_step = "lengths" in batch
    carried: dict[str, Any] = {}
    positions = np.arange(size.context)[None, :]
    if is_step:
        positions = np.full((1, 1), size.context - 1)
    turns = angles(positions, n)[:, :, None]
    cosine, sine = (kit.constant(f(turns)) for f in (np.cos, np.sin))
    for i in range(size.layers):
        y = kit.rms_norm(x, w.ones(d))
        q = kit.dense(y, w.product(d, d)).reshape(b, s, h, n)
        k = kit.dense(y, w.product(d, k_heads * n)).reshape(b, s, k_heads, n)
        v = kit.dense(y, w.product(d, k_heads * n)).reshape(b, s, k_heads, n)
        q, k = (rotated(kit, each, cosine, sine) for each in (q, k))
        if is_step:
            new = {f"keys{i}": k, f"values{i}": v}
            cache = {name: kit.written(batch[name], x) for name, x in new.items()}
            y = kit.attend_lengths(q, *cache.values(), batch["lengths"])
            carried |= cache
        else:
            y = kit.attention(q, k, v, is_causal=True)
        x = kit.dense(y.reshape(b, s, d), w.product(d, d), residual=x)
        y = kit.rms_norm(x, w.ones(d))
        shapes = ((d, size.inner), (d, size.inner), (size.inner, d))
        x = kit.gated_mlp(y, *(w.product(*shape) for shape in shapes), residual=x)
    logits = kit.logits(kit.rms_norm(x, w.ones(d)), words)
    return (logits, carried) if is_step else logits


def _text(size: Language, rng: np.random.Generator) -> Batch:
    # Squares of uniform numbers: some words are frequent, so there is to learn.
    drawn = rng.random((size.batch, size.context + 1)) ** 2
    words = (drawn * size.vocabulary).astype(np.int32)
    return {"tokens": words[:, :-1], "labels": words[:, 1:]}


def _cache(size: Language, rng: np.random.Generator) -> Batch:
    n = size.width // size.heads
    shape = (size.batch, size.context, size.key_heads, n)
    caches = {name: rng.standard_normal(shape, np.float32) for name in _names(size)}
    return {
        "tokens": rng.integers(0, size.vocabulary, (size.batch, 1), np.int32),
        "lengths": np.full(size.batch, size.context, np.int32),
        **caches,
    }


def _names(size: Language) -> tuple[str, ...]:
    """Return the names of the caches."""
    layers = range(size.layers)
    return tuple(f"{what}{i}" for i in layers for what in ("keys", "values"))


# --- images ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Images:
    """The sizes of a model of images."""

    side: int
    batch: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    heads: int = 12
    classes: int = 1000

    @property
    def told(self) -> str:
        """The batch, on the page."""
        return f"{self.batch} x {self.side} x {self.side}"


def _vit(kit: Any, w: Weights, batch: dict[str, Any], size: Images) -> Any:
    (d,), (layers,), h, patch = size.widths, size.depths, size.heads, 16
    images = kit.images(batch["images"])
    x = kit.conv(images, *w.window(patch, patch, 3, d), patch)
    x = kit.pixels(x)
    b, count = x.shape[0], (size.side // patch) ** 2
    x = x.reshape(b, count, d) + w.table(count, d)
    for _ in range(layers):
        y = kit.layer_norm(x, *w.norm(d))
        qkv = kit.dense(y, *w.layer(d, 3 * d))
        y = kit.self_attention(qkv, h, is_causal=False)
        x = kit.dense(y, *w.layer(d, d), residual=x)
        y = kit.layer_norm(x, *w.norm(d))
        x = kit.mlp(y, *w.mlp(d), residual=x)
    x = kit.layer_norm(x.mean((1,)), *w.norm(d))
    return kit.dense(x, *w.layer(d, size.classes))


def _convnext(kit: Any, w: Weights, batch: dict[str, Any], size: Images) -> Any:
    x = batch["images"]
    before = 3
    for stage, (c, depth) in enumerate(zip(size.widths, size.depths, strict=True)):
        step = 2 if stage else 4
        if stage:
            x = kit.layer_norm(x, *w.norm(before))
        filters = w.filters(step, step, before, c)
        x = kit.pixels(kit.conv(kit.images(x), filters, w.zeros(c), step))
        if not stage:
            x = kit.layer_norm(x, *w.norm(c))
        for _ in range(depth):
            filters = w.filters(7, 7, 1, c)
            y = kit.conv(kit.images(x), filters, w.zeros(c), groups=c)
            y = kit.layer_norm(kit.pixels(y), *w.norm(c))
            y = kit.mlp(y, *w.mlp(c), residual=None)
            x = x + y * w.ones(c, times=0.1)
        before = c
    x = kit.layer_norm(x.mean((1, 2)), *w.norm(before))
    return kit.dense(x, *w.layer(before, size.classes))


def _resnet(kit: Any, w: Weights, batch: dict[str, Any], size: Images) -> Any:
    def unit(
        x: Any, side: int, to: int, step: int = 1, activation: Any = "relu"
    ) -> Any:
        filters = w.filters(side, side, kit.channels(x), to)
        y = kit.conv(x, filters, None, step)
        return kit.batch_norm(y, *w.norm(to), activation=activation)

    x = unit(kit.images(batch["images"]), 7, 64, 2)
    x = kit.max_pool(x)
    for stage, (c, depth) in enumerate(zip(size.widths, size.depths, strict=True)):
        for i in range(depth):
            step = 2 if stage and i == 0 else 1
            y = unit(unit(x, 1, c), 3, c, step)
            y = unit(y, 1, 4 * c, activation=None)
            if i == 0:
                x = unit(x, 1, 4 * c, step, activation=None)
            x = kit.relu(x + y)
    x, c = kit.pixels(x).mean((1, 2)), 4 * size.widths[-1]
    return kit.dense(x, *w.layer(c, size.classes))


def pictures(size: Any, rng: np.random.Generator) -> Batch:
    """Return images and their classes."""
    shape = (size.batch, size.side, size.side, 3)
    return {
        "images": rng.standard_normal(shape, np.float32),
        "labels": rng.integers(0, size.classes, size.batch, np.int32),
    }


# --- volumes --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Volumes:
    side: int
    batch: int
    widths: tuple[int, ...]

    @property
    def told(self) -> str:
        return f"{self.batch} x {self.side}^3"


def _unet(kit: Any, w: Weights, batch: dict[str, Any], size: _Volumes) -> Any:
    widths = size.widths

    def unit(x: Any, to: int, step: int = 1) -> Any:
        filters, bias = w.filters(3, 3, 3, kit.channels(x), to), w.zeros(to)
        return kit.conv(x, filters, bias, step, activation="silu")

    x = kit.images(batch["volumes"])
    kept: list[Any] = []
    for i, c in enumerate(widths):
        x = unit(unit(x, c, 2 if i else 1), c)
        kept.append(x)
    for skipped in reversed(kept[:-1]):
        c = kit.channels(skipped)
        x = kit.joined([kit.doubled(x), skipped])
        x = unit(unit(x, c), c)
    return kit.dense(kit.pixels(x), *w.layer(widths[0], 1))


def _volumes(size: _Volumes, rng: np.random.Generator) -> Batch:
    shape = (size.batch, size.side, size.side, size.side, 1)
    x = rng.standard_normal(shape, np.float32)
    return {"volumes": x, "targets": np.tanh(x)}


# --- all ------------------------------------------------------------------------------


def models(*, small: bool = False) -> list[Model]:
    """Return the models; small ones try the script on a CPU."""
    if small:
        gpt = Language(layers=1, width=32, heads=2, vocabulary=64, context=16, batch=2)
        llama = Language(
            layers=1, width=32, heads=4, key_heads=2, inner=48, vocabulary=64,
            context=16, batch=2,
        )  # fmt: skip
        step = llama
        vit = Images(side=32, batch=2, widths=(24,), depths=(1,), heads=2, classes=8)
        convnext = Images(side=32, batch=2, widths=(8, 16), depths=(1, 1), classes=8)
        resnet = Images(side=32, batch=4, widths=(8, 16), depths=(1, 2), classes=8)
        volumes = _Volumes(batch=2, side=8, widths=(8, 16))
    else:
        gpt = Language(
            layers=12, width=768, heads=12, vocabulary=50304, context=1024, batch=32
        )
        llama = Language(
            layers=8, width=2048, heads=16, key_heads=4, inner=5632,
            vocabulary=32000, context=2048, batch=4,
        )  # fmt: skip
        step = Language(
            layers=8, width=2048, heads=16, key_heads=4, inner=5632,
            vocabulary=32000, context=4096, batch=32,
        )  # fmt: skip
        vit = Images(side=224, batch=128, widths=(768,), depths=(12,))
        convnext = Images(
            side=224, batch=64, widths=(96, 192, 384, 768), depths=(3, 3, 9, 3)
        )
        resnet = Images(
            side=224, batch=128, widths=(64, 128, 256, 512), depths=(3, 4, 6, 3)
        )
        volumes = _Volumes(batch=2, side=96, widths=(32, 64, 128, 256))

    return [
        model("GPT-2 small", gpt, _text, _gpt),
        model("Llama-like", llama, _text, _llama),
        Model(
            name="decode",
            size=step.told,
            batch=functools.partial(_cache, step),
            output=functools.partial(_llama, size=step),
            carried=_names(step),
        ),
        model("ViT-B", vit, pictures, _vit),
        model("ConvNeXt-T", convnext, pictures, _convnext),
        model("ResNet-50", resnet, pictures, _resnet),
        # At 1e-4 its loss has a spike, which rounding moves.
        model("3-D U-Net", volumes, _volumes, _unet, square, rate=2e-5),
    ]
