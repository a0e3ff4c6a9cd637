# SPDX-License-Identifier: Apache-2.0
"""Random calls of the sizes that models have: products, convolutions, norms, attention.

A number stands for a call: it is the same in every run.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.config import Implementation
from jax_cudnn.fusing.function import fuse
from jax_cudnn.ops.attention.sdpa import sdpa
from jax_cudnn.ops.norms.rows import layer_norm, rms_norm
from jax_cudnn.ops.products.conv import conv
from jax_cudnn.ops.products.gated import gated_matmul
from jax_cudnn.ops.products.matmul import matmul

# Rows of the products of a step that generates text: its sequences.
_SEQUENCES = (1, 64)
# Multiplications in a call, and bytes of its largest array.
_WORK = (2**25, 2**38)
_LARGEST = 2**29
# Channels of a group, and the most of all groups, of convolutions in groups.
_GROUP_WIDTHS = (2, 4, 4, 8, 8, 16, 16, 24, 32, 40, 48, 64, 112, 128)
_MOST_IN_GROUPS = 2048
# Depthwise ones: their windows by how many axes they have, and multiplications.
_DEPTHWISE_WINDOWS = {
    1: (3, 4, 4, 7, 15, 31),
    2: (3, 3, 3, 5, 7, 7, 9, 13),
    3: (3, 3, 5),
}
_MOST_DEPTHWISE = 2**33
_ACTIVATIONS = ("relu", "gelu", "silu")
# Tokens of attention with a bias: windows of images, and sequences.
_BIASED_TOKENS = (16, 49, 49, 64, 64, 100, 144, 196, 256, 512, 1024, 2048)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call on operands of these shapes, with all gradients or without."""

    name: str
    function: Callable[..., jax.Array]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    has_gradients: bool

    @property
    def title(self) -> str:
        """The call in a table."""
        shapes = ", ".join(str(list(x.shape)) for x in self.operands)
        tail = ", with gradients" if self.has_gradients else ""
        return f"{self.name} {self.operands[0].dtype} {shapes}{tail}"

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Return the operands of `run`: a cotangent comes last, with gradients."""
        if not self.has_gradients:
            return list(self.operands)
        run = functools.partial(self.function, implementation="xla")
        result = jax.eval_shape(run, *self.operands)
        return [*self.operands, jax.ShapeDtypeStruct(result.shape, result.dtype)]

    def run(self, implementation: Implementation, *operands: jax.Array) -> Any:
        """Return the result, and the gradients by all operands if they are wanted."""
        run = functools.partial(self.function, implementation=implementation)
        if not self.has_gradients:
            return run(*operands)
        result, pullback = jax.vjp(run, *operands[:-1])
        return result, pullback(operands[-1])


class _Draw:
    def __init__(self, number: int) -> None:
        self._rng = np.random.default_rng(number)
        self.dtype = self.one_of(("bfloat16",) * 8 + ("float16", "float32"))

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[int(self._rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def size(self, low: int, high: int, step: int) -> int:
        """Draw a multiple of a step, all magnitudes alike; often a power of two."""
        drawn = math.exp(self._rng.uniform(math.log(low), math.log(high)))
        if self.chance(0.5):
            return 2 ** round(math.log2(drawn))
        return max(1, round(drawn / step)) * step

    def array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))


# A call's name, its function and its operands.
_Drawn = tuple[str, Callable[..., jax.Array], list[Any]]
_Kind = Callable[[_Draw], _Drawn]


@dataclass(frozen=True, kw_only=True)
class _Epilogue:
    """What follows a contraction: bias, residual, activation."""

    has_bias: bool
    has_residual: bool
    activation: str | None

    @classmethod
    def drawn(cls, draw: _Draw) -> "_Epilogue":
        if draw.chance(0.25):
            return cls(has_bias=False, has_residual=False, activation=None)
        return cls(
            has_bias=draw.chance(0.7),
            has_residual=draw.chance(0.25),
            activation=draw.one_of((None, *_ACTIVATIONS)),
        )

    def text(self, name: str) -> str:
        parts = [name]
        parts += ["bias"] if self.has_bias else []
        parts += ["residual"] if self.has_residual else []
        return "+".join(parts + ([self.activation] if self.activation else []))

    def operands(
        self, draw: _Draw, shape: Sequence[int], channels: int
    ) -> list[jax.ShapeDtypeStruct]:
        found = [draw.array(channels)] if self.has_bias else []
        return [*found, draw.array(*shape)] if self.has_residual else found

    def named(self, terms: Sequence[jax.Array]) -> dict[str, Any]:
        return {
            "bias": terms[0] if self.has_bias else None,
            "residual": terms[-1] if self.has_residual else None,
            "activation": self.activation,
        }


def _product(
    tail: _Epilogue, a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct, draw: _Draw
) -> _Drawn:
    def run(a: Any, b: Any, *terms: Any, implementation: Implementation) -> jax.Array:
        options: dict[str, Any] = tail.named(terms)
        return matmul(a, b, **options, implementation=implementation)

    shape = (*a.shape[:-1], b.shape[-1])
    return tail.text("matmul"), run, [a, b, *tail.operands(draw, shape, shape[-1])]


def _gated_product(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> _Drawn:
    def run(a: Any, gate: Any, up: Any, *, implementation: Implementation) -> jax.Array:
        return gated_matmul(
            a, gate, up, activation="silu", implementation=implementation
        )

    return "gated matmul+silu", run, [a, b, b]


def _fits(work: float, *arrays: jax.ShapeDtypeStruct) -> bool:
    largest = max(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return _WORK[0] <= work <= _WORK[1] and largest <= _LARGEST


def _matmul(draw: _Draw) -> _Drawn:
    tail = _Epilogue.drawn(draw)
    while True:
        m, n, r = draw.size(8, 32768, 8), *(draw.size(64, 16384, 64) for _ in "nr")
        a, b = draw.array(m, r), draw.array(r, n)
        if _fits(m * n * r, a, b, draw.array(m, n)):
            return _product(tail, a, b, draw)


def _gated(draw: _Draw) -> _Drawn:
    while True:
        m, n, r = draw.size(64, 16384, 8), *(draw.size(256, 16384, 64) for _ in "nr")
        a, b = draw.array(m, r), draw.array(r, n)
        if _fits(2 * m * n * r, a, b, draw.array(m, n)):
            return _gated_product(a, b)


def _of_few_rows(draw: _Draw) -> _Drawn:
    """Draw a product of a step that generates text: it reads many more weights."""
    m, (n, r) = draw.size(*_SEQUENCES, 1), (draw.size(512, 16384, 64) for _ in "nr")
    a, b = draw.array(m, r), draw.array(r, n)
    if draw.chance(0.3):
        return _gated_product(a, b)
    return _product(_Epilogue.drawn(draw), a, b, draw)


@dataclass(frozen=True, kw_only=True)
class _Convolution:
    """A convolution with channels last, padded to keep the size of images.

    A causal one is so at the front only.
    """

    x: jax.ShapeDtypeStruct
    w: jax.ShapeDtypeStruct
    step: int
    groups: int
    hole: int = 1
    is_causal: bool = False

    @property
    def axes(self) -> int:
        return len(self.x.shape) - 2

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        images, *sides, _ = self.x.shape
        return (images, *(math.ceil(s / self.step) for s in sides), self.w.shape[-1])

    @property
    def work(self) -> int:
        return math.prod(self.shape) * math.prod(self.w.shape[:-1])

    def fits(self, draw: _Draw) -> bool:
        return _fits(self.work, self.x, self.w, draw.array(*self.shape))

    def call(self, tail: _Epilogue, draw: _Draw) -> _Drawn:
        letters = "DHW"[-self.axes :]
        layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        front = [(self.hole * (size - 1), 0) for size in self.w.shape[:-2]]
        padding = front if self.is_causal else "SAME"

        def run(x: Any, w: Any, *terms: Any, implementation: Implementation) -> Any:
            options: dict[str, Any] = tail.named(terms)
            return conv(
                x, w, window_strides=(self.step,) * self.axes, padding=padding,
                rhs_dilation=(self.hole,) * self.axes, dimension_numbers=layout,
                feature_group_count=self.groups, **options,
                implementation=implementation,
            )  # fmt: skip

        name = "causal conv" if self.is_causal else "conv"
        name += f" {'x'.join(map(str, self.w.shape[:-2]))}/{self.step}"
        name += f", dilated by {self.hole}" if self.hole > 1 else ""
        name += f", {self.groups} groups" if self.groups > 1 else ""
        terms = tail.operands(draw, self.shape, self.shape[-1])
        return tail.text(name), run, [self.x, self.w, *terms]


def _conv(axes: int, draw: _Draw) -> _Drawn:
    tail = _Epilogue.drawn(draw)
    while True:
        window = draw.one_of((1, 1, 3, 3, 3, 5) if axes > 1 else (3, 5, 7))
        step = draw.one_of((1, 1, 1, 2))
        side = draw.size(7, {1: 4096, 2: 112, 3: 64}[axes], 7)
        images = draw.size(1, {1: 64, 2: 128, 3: 8}[axes], 1)
        inner, outer = (draw.size(32, 1024, 16) for _ in range(2))
        groups = draw.one_of((1,) * 9 + (32,))
        if inner % groups or outer % groups:
            continue
        x = draw.array(images, *[side] * axes, inner)
        w = draw.array(*[window] * axes, inner // groups, outer)
        found = _Convolution(x=x, w=w, step=step, groups=groups)
        if found.fits(draw):
            return found.call(tail, draw)


def _conv_in_groups(draw: _Draw) -> _Drawn:
    """Draw a convolution in groups of widths as ResNeXts, RegNets and others have."""
    tail = _Epilogue.drawn(draw)
    axes = draw.one_of((1, *[2] * 7, 3))
    while True:
        window = draw.one_of((1, 3, 3, 3, 5))
        step = draw.one_of((1, 1, 1, 2))
        side = draw.size(7, {1: 4096, 2: 112, 3: 32}[axes], 7)
        images = draw.size(1, {1: 64, 2: 128, 3: 8}[axes], 1)
        width, groups = draw.one_of(_GROUP_WIDTHS), draw.size(2, 64, 1)
        inner = width * groups
        outer = inner * draw.one_of((1, 1, 1, 2))
        x = draw.array(images, *[side] * axes, inner)
        w = draw.array(*[window] * axes, width, outer)
        found = _Convolution(x=x, w=w, step=step, groups=groups)
        if inner <= _MOST_IN_GROUPS and found.fits(draw):
            return found.call(tail, draw)


def _depthwise(draw: _Draw) -> _Drawn:
    """Draw a depthwise convolution as models of images, sequences and videos have."""
    tail = _Epilogue.drawn(draw)
    axes = draw.one_of((1, 1, 2, 2, 2, 2, 3))
    while True:
        window = draw.one_of(_DEPTHWISE_WINDOWS[axes])
        step = draw.one_of((1, 1, 1, 2))
        hole = draw.one_of((1, 1, 1, 1, 2, 4)) if step == 1 else 1
        side = draw.size(7, {1: 4096, 2: 112, 3: 32}[axes], 7)
        images = draw.size(1, {1: 64, 2: 128, 3: 8}[axes], 1)
        inner = draw.size(32, _MOST_IN_GROUPS, 8)
        outer = inner * draw.one_of((1,) * 7 + (2,))
        x = draw.array(images, *[side] * axes, inner)
        w = draw.array(*[window] * axes, 1, outer)
        found = _Convolution(
            x=x,
            w=w,
            step=step,
            groups=inner,
            hole=hole,
            is_causal=axes == step == 1 and draw.chance(0.7),
        )
        if found.work <= _MOST_DEPTHWISE and found.fits(draw):
            return found.call(tail, draw)


def _norm(draw: _Draw) -> _Drawn:
    name = draw.one_of(("layer_norm", "rms_norm"))
    norm: Any = layer_norm if name == "layer_norm" else rms_norm
    while True:
        rows, features = draw.size(256, 65536, 8), draw.size(64, 16384, 64)
        if 2**20 <= rows * features <= 2**28:
            break
    factor = draw.array(features)
    factors = [factor, factor] if name == "layer_norm" else [factor]

    def run(x: Any, *factors: Any, implementation: Implementation) -> jax.Array:
        return norm(x, *factors, implementation=implementation)

    return name, run, [draw.array(rows, features), *factors]


def _attention(draw: _Draw) -> _Drawn:
    draw.dtype = draw.one_of(("bfloat16", "float16"))
    is_causal = draw.chance(0.6)
    while True:
        b, s = draw.size(1, 64, 1), draw.size(128, 8192, 64)
        k, g, d = (
            draw.one_of((1, 2, 4, 8)),
            draw.one_of((1, 1, 4)),
            draw.one_of((64, 64, 96, 128, 128, 256)),
        )
        q = draw.array(b, s, k * g, d)
        if _fits(b * k * g * s * s * d, q):
            break

    def run(q: Any, k: Any, v: Any, *, implementation: Implementation) -> jax.Array:
        return sdpa(q, k, v, is_causal=is_causal, implementation=implementation)

    key = draw.array(b, s, k, d)
    return "causal sdpa" if is_causal else "sdpa", run, [q, key, key]


def _biased_attention(draw: _Draw) -> _Drawn:
    """Draw attention with a trained bias that all sequences share, or all windows."""
    draw.dtype = draw.one_of(("bfloat16", "bfloat16", "float16"))
    is_masked = draw.chance(0.3)
    while True:
        b, s = draw.size(1, 8192, 1), draw.one_of(_BIASED_TOKENS)
        h, d = draw.one_of((3, 4, 6, 8, 12, 16, 24)), draw.one_of((32, 32, 64, 64, 128))
        q, bias = draw.array(b, s, h, d), draw.array(1, h, s, s)
        # XLA's code has all scores in f32.
        scores = jax.ShapeDtypeStruct((b, h, s, s), jnp.float32)
        if _fits(b * h * s * s * d, q, bias, scores):
            break

    def run(
        q: Any, k: Any, v: Any, bias: Any, *, implementation: Implementation
    ) -> jax.Array:
        region = jnp.arange(s) * 2 // s
        mask = (region[:, None] == region)[None, None] if is_masked else None
        return sdpa(q, k, v, bias, mask, implementation=implementation)

    name = "masked biased sdpa" if is_masked else "biased sdpa"
    return name, run, [q, q, q, bias]


_KINDS: Sequence[_Kind] = (
    *[_matmul] * 8,
    *[_gated] * 2,
    *[functools.partial(_conv, 2)] * 6,
    *[functools.partial(_conv, 3)] * 2,
    functools.partial(_conv, 1),
    *[_norm] * 2,
    *[_attention] * 2,
)


def drawn_call(number: int) -> Call:
    """Return the call of a number."""
    return _drawn_of(_KINDS, number)


def drawn_conv_in_groups(number: int) -> Call:
    """Return the call of a number that is a convolution in groups, or depthwise."""
    return _drawn_of((_depthwise, _depthwise, _conv_in_groups), number)


def drawn_alone(number: int) -> Call:
    """Return the call of a number that is a norm or attention, with no product."""
    return _drawn_of((_norm, _attention), number)


def drawn_biased(number: int) -> Call:
    """Return the call of a number that is attention with a trained bias."""
    return _drawn_of((_biased_attention,), number)


def _drawn_of(kinds: Sequence[_Kind], number: int) -> Call:
    draw = _Draw(number)
    name, function, operands = draw.one_of(kinds)(draw)
    return Call(
        name=name,
        function=function,
        operands=tuple(operands),
        has_gradients=draw.chance(0.5),
    )


def _mlp_sizes(draw: _Draw) -> tuple[int, int, int]:
    """Draw rows, features and inner features of the MLP of a transformer's block."""
    while True:
        m, d = draw.size(256, 65536, 8), draw.size(128, 8192, 64)
        inner = draw.one_of((2 * d, 3 * d, 4 * d))
        if _fits(m * inner * d, draw.array(m, inner), draw.array(d, inner)):
            return m, d, inner


def _plain_mlp(draw: _Draw) -> _Drawn:
    activation, (m, d, inner) = draw.one_of(_ACTIVATIONS), _mlp_sizes(draw)

    def run(
        x: Any, up: Any, bias: Any, down: Any, last: Any,
        *, implementation: Implementation,
    ) -> jax.Array:  # fmt: skip
        @functools.partial(fuse, implementation=implementation)
        def mlp(x: Any, up: Any, bias: Any, down: Any, last: Any) -> jax.Array:
            options: dict[str, Any] = {"implementation": implementation}
            hidden = matmul(x, up, bias=bias, activation=activation, **options)
            return matmul(hidden, down, bias=last, residual=x, **options)

        return mlp(x, up, bias, down, last)

    shapes = (m, d), (d, inner), (inner,), (inner, d), (d,)
    return f"MLP+{activation}", run, [draw.array(*shape) for shape in shapes]


def _gated_mlp(draw: _Draw) -> _Drawn:
    activation, (m, d, inner) = draw.one_of(_ACTIVATIONS), _mlp_sizes(draw)

    def run(
        x: Any, gate: Any, up: Any, down: Any, *, implementation: Implementation
    ) -> jax.Array:
        @functools.partial(fuse, implementation=implementation)
        def mlp(x: Any, gate: Any, up: Any, down: Any) -> jax.Array:
            activated = getattr(jax.nn, activation)(x @ gate)
            return (activated * (x @ up)) @ down + x

        return mlp(x, gate, up, down)

    shapes = (m, d), (d, inner), (d, inner), (inner, d)
    return f"gated MLP+{activation}", run, [draw.array(*shape) for shape in shapes]


def drawn_mlp(number: int) -> Call:
    """Return the call of a number that is an MLP, whose products share kernels."""
    draw = _Draw(number)
    name, function, operands = draw.one_of((_plain_mlp, _plain_mlp, _gated_mlp))(draw)
    return Call(
        name=name, function=function, operands=tuple(operands), has_gradients=True
    )


def drawn_grouped(number: int) -> Call:
    """Return the call of a number that is a convolution in groups."""
    name, function, operands = _conv_in_groups(_Draw(number))
    return Call(
        name=name, function=function, operands=tuple(operands), has_gradients=True
    )


def drawn_step(number: int) -> Call:
    """Return the call of a number from a step that generates text: few rows."""
    name, function, operands = _of_few_rows(_Draw(number))
    return Call(
        name=name, function=function, operands=tuple(operands), has_gradients=False
    )
