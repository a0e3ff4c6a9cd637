# SPDX-License-Identifier: Apache-2.0
"""Convolutions that users of JAX reported as slow, and each contender's way.

Each report is a short program of our own with the sizes of the report. Where a report
names none, they are ours, and its text says so.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.contest import (
    BOTH,
    FORWARD,
    TUNED,
    UNTUNED,
    XLA,
    Cell,
    Way,
)
from benchmarks.harness.operands import Operand
from benchmarks.harness.torch_side import installed, torch

F: Any = installed("torch.nn.functional")

# Plain JAX with its channels where the report has them.
FIRST = "xla, channels first"
_GOALS = {what: {UNTUNED: 1.3, TUNED: 1.05} for what in (FORWARD, BOTH)}


@dataclass(frozen=True)
class Reported:
    """A convolution, or a chain of equal ones, that was reported.

    Attributes:
      report: the repository and number of the issue.
      about: what was slow, in a few words.
      images: the images, with their channels last.
      outer: how many channels a convolution makes.
      window: the size of the window along each axis.
      step: the step of the window, or of a transposed convolution.
      padding: how much is added at both ends; of a transposed convolution, how much
        is cut off, as in PyTorch.
      extra: how much more a transposed convolution has at its end, as in PyTorch.
      hole: the dilation of the window.
      chain: how many convolutions follow each other.
      is_first: whether the report has the channels before the axes of space.
    """

    report: str
    about: str
    images: tuple[int, ...]
    outer: int
    window: int
    step: int = 1
    padding: int = 0
    extra: int = 0
    hole: int = 1
    groups: int = 1
    has_bias: bool = False
    is_transposed: bool = False
    chain: int = 1
    dtype: str = "float32"
    is_first: bool = False

    @property
    def link(self) -> str:
        """The report as a link."""
        name, number = self.report.split()
        return f"[{self.report}](https://github.com/{_REPOSITORIES[name]}/{number})"

    @property
    def size(self) -> str:
        """The sizes in words."""
        words = [" x ".join(map(str, self.images)), f"to {self.outer}"]
        words += ["transposed"] if self.is_transposed else []
        words += [f"window {self.window}"]
        words += [f"step {self.step}"] if self.step > 1 else []
        words += [f"dilation {self.hole}"] if self.hole > 1 else []
        words += [f"{self.groups} groups"] if self.groups > 1 else []
        words += [f"{self.chain} layers"] if self.chain > 1 else []
        return ", ".join([*words, self.dtype])

    @property
    def axes(self) -> int:
        """The number of axes of space."""
        return len(self.images) - 2

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The padding of each axis, as JAX has it."""
        ends = self.padding, self.padding
        if self.is_transposed:
            ends = (
                self.window - 1 - self.padding,
                self.window - 1 - self.padding + self.extra,
            )
        return [ends] * self.axes

    def layouts(self, *, is_first: bool) -> tuple[str, str, str]:
        """Return the layouts of images, filters and result."""
        letters = "DHW"[-self.axes :]
        if is_first:
            return f"NC{letters}", f"OI{letters}", f"NC{letters}"
        return f"N{letters}C", f"{letters}IO", f"N{letters}C"

    def arguments(self, *, is_first: bool) -> dict[str, Any]:
        """Return what JAX's function and that of jax_cudnn are called with."""
        steps = (self.step,) * self.axes
        ones = (1,) * self.axes
        return {
            "window_strides": ones if self.is_transposed else steps,
            "padding": self.ends,
            "lhs_dilation": steps if self.is_transposed else ones,
            "rhs_dilation": (self.hole,) * self.axes,
            "dimension_numbers": self.layouts(is_first=is_first),
            "feature_group_count": self.groups,
        }

    def layers(self, operands: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return the filters and the bias, if there is one, of each layer."""
        each = 1 + self.has_bias
        return [
            (operands[i], operands[i + 1] if self.has_bias else None)
            for i in range(0, len(operands), each)
        ]


_REPOSITORIES = {
    "jax": "jax-ml/jax/issues",
    "xla": "openxla/xla/issues",
    "equinox": "patrick-kidger/equinox/issues",
    "keras": "keras-team/keras/issues",
    "keras-cv": "keras-team/keras-cv/pull",
    "pytorch": "pytorch/pytorch/issues",
    "tensorflow": "tensorflow/tensorflow/issues",
}

# fmt: off
_UP = Reported("xla 34273", "gradients of a transposed 3-D convolution to one channel",
               (1, 64, 64, 32, 64), 1, 3, step=2, padding=1, extra=1,
               is_transposed=True, dtype="bfloat16", is_first=True)

# Those that were asked for again and again come first.
REPORTS = (
    _UP,
    dataclasses.replace(_UP, report="jax 31662", about="the same with a bias",
                        has_bias=True),
    Reported("jax 23783",
             "transposed 1-D convolutions; sizes of ours, of a decoder of audio",
             (8, 512, 256), 128, 16, step=8, padding=4, is_transposed=True,
             is_first=True),
    Reported("jax 23713", "a depthwise convolution of Flax",
             (1, 124, 124, 256), 256, 3, padding=1, groups=256, has_bias=True),
    Reported("jax 13800", "gradients of depthwise 1-D convolutions",
             (32, 1024, 512), 512, 5, padding=2, groups=512, chain=12, is_first=True),
    Reported("jax 26266",
             "dilated depthwise 1-D convolutions; channels and window of ours",
             (32, 1024, 256), 256, 5, padding=8, hole=4, groups=256),
    Reported("jax 29875", "dilated 1-D convolutions; sizes of ours",
             (16, 4096, 256), 256, 3, padding=2, hole=2, is_first=True),
    Reported("jax 11143", "1-D convolutions in f16 with a bias",
             (16, 512, 2048), 2048, 3, padding=1, has_bias=True, chain=10,
             dtype="float16"),
    Reported("jax 17464", "a transposed convolution with large windows",
             (1, 8, 8, 128), 32, 32, step=16, padding=8, is_transposed=True),
    Reported("jax 25461",
             "a filter of 30 x 30 over images of one channel; 4 of the 100 images",
             (4, 530, 1430, 1), 1, 30, is_first=True),
    Reported("jax 23085", "gradients with respect to images of patches",
             (1, 224, 224, 3), 768, 16, step=16),
    Reported("jax 30469", "patches of small images",
             (64, 64, 64, 3), 192, 16, step=16),
    Reported("jax 37922",
             "small strided and dilated 1-D convolutions in bf16, which fail",
             (2, 16, 4), 16, 3, step=2, padding=2, hole=2, dtype="bfloat16",
             is_first=True),
    Reported("equinox 970", "a depthwise convolution of Equinox",
             (1, 124, 124, 512), 512, 3, padding=1, groups=512, has_bias=True,
             is_first=True),
    Reported("equinox 1041", "3-D convolutions of few channels; one of the four images",
             (1, 256, 256, 256, 4), 4, 3, padding=1, has_bias=True, is_first=True),
    Reported("keras 20471", "a 1 x 1 convolution in two groups",
             (32, 64, 64, 512), 128, 1, groups=2, has_bias=True),
    Reported("keras-cv 2406", "gradients of a strided convolution",
             (4, 257, 257, 256), 512, 3, step=2),
    Reported("pytorch 157334",
             "a large depthwise convolution, slower by PyTorch than by JAX",
             (128, 124, 124, 256), 256, 3, padding=1, groups=256, has_bias=True),
    Reported("tensorflow 19390", "groups of four channels; images of ours",
             (32, 56, 56, 64), 64, 3, padding=1, groups=16),
)
# fmt: on


def cells(*, small: bool) -> list[Cell]:
    """Return the cells, in the order of the reports; small ones are for a CPU."""
    return [_cell(_small(each) if small else each) for each in REPORTS]


def _small(each: Reported) -> Reported:
    """Return the same with few channels and places."""
    window = min(each.window, 5)
    is_other = window != each.window
    groups = min(each.groups, 4)
    inner = 1 if each.groups == each.images[-1] else 2
    images = each.images[-1]
    channels = groups * inner if each.groups > 1 else min(images, 6)
    return dataclasses.replace(
        each,
        images=(min(each.images[0], 2), *[12] * each.axes, channels),
        outer=channels if each.outer == images else min(each.outer, 2 * groups),
        window=window,
        step=min(each.step, window),
        padding=0 if is_other else each.padding,
        groups=groups,
        chain=min(each.chain, 2),
    )


def _cell(each: Reported) -> Cell:
    inner = each.images[-1]
    if each.chain > 1:
        assert each.outer == inner, "layers follow each other"
    shape = (*[each.window] * each.axes, inner // each.groups, each.outer)
    scale = math.prod(shape[:-1]) ** -0.5
    layer = [Operand(shape, scale, dtype=each.dtype)]
    layer += [Operand((each.outer,), dtype=each.dtype)] if each.has_bias else []
    rivals = {XLA: Way(function=_plain(each, is_first=False))}
    if each.is_first:
        rivals[FIRST] = _channels_first(each)
    return Cell(
        operation=f"{each.report}, {each.about}",
        size=each.size,
        operands=(Operand(each.images, dtype=each.dtype), *layer * each.chain),
        rivals=rivals,
        ours=lambda: _ours(each),
        torch=None if torch is None else _torch(each),
        has_products=True,
        goals=_GOALS,
    )


# --- JAX ------------------------------------------------------------------------------


def _ours(each: Reported) -> Callable[..., Any]:
    arguments = each.arguments(is_first=False)

    def run(x: Any, *operands: Any) -> Any:
        for w, bias in each.layers(operands):
            x = jax_cudnn.conv(x, w, **arguments, bias=bias)
        return x

    return run


def _plain(each: Reported, *, is_first: bool) -> Callable[..., Any]:
    arguments = each.arguments(is_first=is_first)

    def run(x: Any, *operands: Any) -> Any:
        for w, bias in each.layers(operands):
            x = jax.lax.conv_general_dilated(x, w, **arguments)
            if bias is not None:
                along = (-1, *[1] * each.axes) if is_first else (-1,)
                x = x + bias.reshape(along)
        return x

    return run


def _channels_first(each: Reported) -> Way:
    """Return plain JAX with channels first, in memory too."""
    axes = each.axes

    def first(arrays: Sequence[Any]) -> list[Any]:
        return [jnp.moveaxis(x, -1, 1) for x in arrays]

    def last(arrays: Sequence[Any]) -> list[Any]:
        return [jnp.moveaxis(x, 1, -1) for x in arrays]

    def into(w: Any) -> Any:
        return jnp.transpose(w, (axes + 1, axes, *range(axes)))

    def out(w: Any) -> Any:
        return jnp.transpose(w, (*range(2, axes + 2), 1, 0))

    return Way(
        function=_plain(each, is_first=True),
        enter=lambda arrays: _changed(arrays, first, into),
        cotangents=first,
        outputs=last,
        gradients=lambda arrays: _changed(arrays, last, out),
    )


def _changed(
    arrays: Sequence[Any],
    images: Callable[[Sequence[Any]], list[Any]],
    filters: Callable[[Any], Any],
) -> list[Any]:
    """Return images and filters in another layout; biases stay as they are."""
    if not arrays:
        return []
    x, *operands = arrays
    turned = [w if w.ndim == 1 else filters(w) for w in operands]
    return [*images([x]), *turned]


# --- PyTorch --------------------------------------------------------------------------


def _torch(each: Reported) -> Way:
    """Return PyTorch's convolution, with channels last where it has such a format."""
    axes = each.axes
    names = ("contiguous_format", "channels_last", "channels_last_3d")
    stored = getattr(torch, names[axes - 1])
    window = tuple(range(axes))

    def images(tensors: Sequence[Any]) -> list[Any]:
        return [
            x.permute(0, axes + 1, *range(1, axes + 1)).contiguous(memory_format=stored)
            for x in tensors
        ]

    def last(tensors: Sequence[Any]) -> list[Any]:
        return [x.permute(0, *range(2, axes + 2), 1) for x in tensors]

    def filters(w: Any) -> Any:
        if each.is_transposed:
            # PyTorch's windows are those of the gradient that the operation is.
            w = w.flip(window).permute(axes, axes + 1, *window)
        else:
            w = w.permute(axes + 1, axes, *window)
        return w.contiguous(memory_format=stored)

    def back(w: Any) -> Any:
        ends = (0, 1) if each.is_transposed else (1, 0)
        w = w.permute(*range(2, axes + 2), *ends)
        return w.flip(window) if each.is_transposed else w

    name = f"conv{'_transpose' if each.is_transposed else ''}{axes}d"
    options: dict[str, Any] = {"stride": each.step, "padding": each.padding}
    options |= {"dilation": each.hole, "groups": each.groups}
    options |= {"output_padding": each.extra} if each.is_transposed else {}

    def run(x: Any, *operands: Any) -> Any:
        for w, bias in each.layers(operands):
            x = getattr(F, name)(x, w, bias, **options)
        return x

    return Way(
        function=run,
        enter=lambda tensors: _changed(tensors, images, filters),
        cotangents=images,
        outputs=last,
        gradients=lambda tensors: _changed(tensors, last, back),
    )
