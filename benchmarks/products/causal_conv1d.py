# SPDX-License-Identifier: Apache-2.0
"""Times causal convolutions with bias and silu, forward and with all gradients.

    python -m benchmarks.causal_conv1d --out docs/internals/measured

times, on one GPU, cuDNN's function and XLA's code for `jax_cudnn.causal_conv1d`, the
same as a depthwise `jax_cudnn.conv` and in plain JAX: as a convolution of JAX's, and as
a sum of shifted products. It writes causal_conv1d.json and causal_conv1d.md there. See
contest.py for how contenders are checked and timed. `--only REGEX` chooses cells by
size; those that the file in the folder has beside them are kept. `--small` tries the
script on a CPU.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness import contest_report
from benchmarks.harness.contest import BOTH, FORWARD, Cell, Way
from benchmarks.harness.operands import Operand

_BYTES_PER_US = 3.0e6
# Arrays of x's size: x and y; and again x, with the cotangent and x's gradient.
_ARRAYS = {FORWARD: 2, BOTH: 5}


@dataclass(frozen=True)
class _Workload:
    """A convolution of a batch of steps and channels."""

    batch: int
    steps: int
    channels: int
    taps: int = 4
    dtype: str = "bfloat16"
    layout: str = "NWC"

    @property
    def size(self) -> str:
        """The sizes, in words."""
        shape = f"{self.batch} x {self.steps} x {self.channels}"
        return f"{shape}, {self.taps} taps, {self.layout}, {self.dtype}"

    @property
    def is_last(self) -> bool:
        """Whether the channels are the last axis of x, w and y."""
        return self.layout == "NWC"

    def least_us(self, what: str) -> float:
        """Return the time of the arrays of x's size."""
        size = self.batch * self.steps * self.channels * jnp.dtype(self.dtype).itemsize
        return _ARRAYS[what] * size / _BYTES_PER_US

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands x, w and bias."""
        shape, weights = (self.steps, self.channels), (self.taps, self.channels)
        if not self.is_last:
            shape, weights = shape[::-1], weights[::-1]
        shapes = (self.batch, *shape), weights, (self.channels,)
        return tuple(Operand(each, dtype=self.dtype) for each in shapes)

    def along(self, channels: jax.Array) -> jax.Array:
        """Return a number for each channel as it is added to y."""
        return channels if self.is_last else channels[:, None]


_WORKLOADS = (
    _Workload(8, 8192, 2048),
    _Workload(1, 65536, 4096),
    _Workload(8, 8192, 2048, layout="NCW"),
    _Workload(8, 8192, 2048, dtype="float32"),
    _Workload(8, 8192, 2048, taps=16),
    _Workload(8, 2048, 1536),
    _Workload(1, 2048, 2048),
)
_SMALL = (_Workload(2, 64, 32), _Workload(2, 64, 32, layout="NCW"))


def cells(*, small: bool) -> list[Cell]:
    """Return the convolutions; small ones are for a CPU."""
    return [_cell(work) for work in (_SMALL if small else _WORKLOADS)]


def _cell(work: _Workload) -> Cell:
    layout: Any = work.layout
    filters = "WIO" if work.is_last else "OIW"
    options: dict[str, Any] = {
        "window_strides": (1,),
        "padding": [(work.taps - 1, 0)],
        "dimension_numbers": (layout, filters, layout),
        "feature_group_count": work.channels,
    }

    def ours(implementation: Any, x: Any, w: Any, bias: Any) -> jax.Array:
        return jax_cudnn.causal_conv1d(
            x, w, bias=bias, dimension_numbers=layout, implementation=implementation
        )

    def depthwise(x: Any, w: Any, bias: Any) -> jax.Array:
        added = work.along(bias)
        return jax_cudnn.conv(x, w[:, None], **options, bias=added, activation="silu")

    def by_lax(x: Any, w: Any, bias: Any) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, w[:, None], **options)
        return jax.nn.silu(y + work.along(bias))

    return Cell(
        operation="causal convolution",
        size=work.size,
        operands=work.operands,
        rivals={
            "jax.lax": Way(function=by_lax),
            "shifted": Way(function=functools.partial(_shifted, work)),
            "jax_cudnn.conv": Way(function=depthwise),
        },
        ours=lambda: functools.partial(ours, "auto"),
        by_xla=functools.partial(ours, "xla"),
        first=functools.partial(ours, "cudnn"),
        has_products=True,
    )


def _shifted(work: _Workload, x: Any, w: Any, bias: Any) -> jax.Array:
    axis = 1 if work.is_last else 2
    pads = [(0, 0)] * 3
    pads[axis] = (work.taps - 1, 0)
    front = jnp.pad(x, pads).astype(jnp.float32)
    taps = w.astype(jnp.float32)
    taps = taps if work.is_last else taps.T
    total = work.along(bias.astype(jnp.float32))
    for tap in range(work.taps):
        piece = jax.lax.slice_in_dim(front, tap, tap + work.steps, axis=axis)
        total = total + piece * work.along(taps[tap])
    return jax.nn.silu(total).astype(x.dtype)


def _about() -> Iterator[str]:
    yield "`cudnn` is cuDNN's function, and `jax_cudnn by xla` XLA's code for it, with"
    yield "bias and silu. `jax_cudnn.conv` is the same as a depthwise convolution. In"
    yield "plain JAX it is `jax.lax.conv_general_dilated`, or a sum of shifted"
    yield "products. Sizes are batch x steps x channels. The least is the time of two"
    yield "arrays of x's size forward, and of five with all gradients, at 3.0 TB/s:"
    yield ""
    for work in _WORKLOADS:
        forward, both = (f"{work.least_us(what):.1f}" for what in _ARRAYS)
        yield f"- {work.size}: {forward} and {both} µs"


markdown = contest_report.page_of(
    name="causal_conv1d",
    title="Causal convolutions",
    comment="Causal convolutions by cuDNN's function, by XLA and as convolutions.",
    about=tuple(_about()),
)

if __name__ == "__main__":
    contest_report.main(__doc__, markdown, cells)
