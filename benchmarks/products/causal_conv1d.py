# SPDX-License-Identifier: Apache-2.0
"""Times causal convolutions with bias and silu, forward and with all gradients.

    python -m benchmarks.causal_conv1d --out docs/internals/measured

times, on one GPU, cuDNN's function and XLA's code for `jax_cudnn.causal_conv1d`, the
same as a depthwise `jax_cudnn.conv` and in plain JAX: as a convolution of JAX's, and as
a sum of shifted products. Each is compared with the least that the arrays of x's size
take to be read and written, two of them forward and five with gradients, at 3.0 TB/s.
It writes causal_conv1d.json and causal_conv1d.md there.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.contest import BOTH, FORWARD, program
from benchmarks.harness.page import Data, Page, Row, table
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, compare

_BYTES_PER_US = 3.0e6
# Arrays of x's size: x and y; and again x, with the cotangent and x's gradient.
_ARRAYS = {FORWARD: 2, BOTH: 5}


@dataclass(frozen=True)
class _Case:
    """A convolution of a batch of steps and channels."""

    batch: int
    steps: int
    channels: int
    taps: int = 4
    dtype: str = "bfloat16"
    layout: str = "NWC"

    @property
    def is_last(self) -> bool:
        """Whether the channels are the last axis of x, w and y."""
        return self.layout == "NWC"

    def least_us(self, what: str) -> float:
        """Return the time of the arrays of x's size."""
        size = self.batch * self.steps * self.channels * jnp.dtype(self.dtype).itemsize
        return _ARRAYS[what] * size / _BYTES_PER_US

    def operands(self) -> list[jax.Array]:
        """Return x, w, bias and a cotangent."""
        shape, weights = (self.steps, self.channels), (self.taps, self.channels)
        if not self.is_last:
            shape, weights = shape[::-1], weights[::-1]
        x = (self.batch, *shape)
        keys = jax.random.split(jax.random.key(0), 4)
        pairs = zip(keys, (x, weights, (self.channels,), x), strict=True)
        return [jax.random.normal(key, each, self.dtype) for key, each in pairs]

    def along(self, channels: jax.Array) -> jax.Array:
        """Return a number for each channel as it is added to y."""
        return channels if self.is_last else channels[:, None]


def cases(*, small: bool) -> list[_Case]:
    """Return the convolutions."""
    if small:
        return [_Case(2, 64, 32), _Case(2, 64, 32, layout="NCW")]
    return [
        _Case(8, 8192, 2048),
        _Case(1, 65536, 4096),
        _Case(8, 8192, 2048, layout="NCW"),
        _Case(8, 8192, 2048, dtype="float32"),
        _Case(8, 8192, 2048, taps=16),
        _Case(8, 2048, 1536),
        _Case(1, 2048, 2048),
    ]


# --- contenders -----------------------------------------------------------------------


def _contenders(case: _Case) -> dict[str, Callable[..., jax.Array]]:
    layout: Any = case.layout
    ours = functools.partial(jax_cudnn.causal_conv1d, dimension_numbers=layout)
    filters = "WIO" if case.is_last else "OIW"
    options: dict[str, Any] = {
        "window_strides": (1,),
        "padding": [(case.taps - 1, 0)],
        "dimension_numbers": (layout, filters, layout),
        "feature_group_count": case.channels,
    }

    def depthwise(x: Any, w: Any, bias: Any) -> jax.Array:
        added = case.along(bias)
        return jax_cudnn.conv(x, w[:, None], **options, bias=added, activation="silu")

    def by_lax(x: Any, w: Any, bias: Any) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, w[:, None], **options)
        return jax.nn.silu(y + case.along(bias))

    return {
        "cuDNN": lambda x, w, bias: ours(x, w, bias=bias, implementation="cudnn"),
        "XLA": lambda x, w, bias: ours(x, w, bias=bias, implementation="xla"),
        "conv": depthwise,
        "jax.lax": by_lax,
        "shifted": functools.partial(_shifted, case),
    }


def _shifted(case: _Case, x: Any, w: Any, bias: Any) -> jax.Array:
    axis = 1 if case.is_last else 2
    pads = [(0, 0)] * 3
    pads[axis] = (case.taps - 1, 0)
    front = jnp.pad(x, pads).astype(jnp.float32)
    taps = w.astype(jnp.float32)
    taps = taps if case.is_last else taps.T
    total = case.along(bias.astype(jnp.float32))
    for tap in range(case.taps):
        piece = jax.lax.slice_in_dim(front, tap, tap + case.steps, axis=axis)
        total = total + piece * case.along(taps[tap])
    return jax.nn.silu(total).astype(x.dtype)


# --- measuring ------------------------------------------------------------------------


def measure(found: Sequence[_Case]) -> Iterator[Row]:
    """Yield a row for each convolution, forward and with gradients."""
    for case in found:
        *operands, cotangent = case.operands()
        functions = _contenders(case)
        _check(functions, operands)
        for what in _ARRAYS:
            runs: dict[str, Contender] = {}
            for name, function in functions.items():
                run = jax.jit(program(function, what))
                call = functools.partial(run, operands, [cotangent])
                runs[name] = Contender(call=call, wait=jax.block_until_ready)
            times = compare(runs, baseline="cuDNN")
            us = {name: round(time.median_us, 1) for name, time in times.items()}
            shares = {x: round(y / case.least_us(what), 2) for x, y in us.items()}
            yield {**asdict(case), "what": what, "us": us, "of the least": shares}


def _check(
    functions: Mapping[str, Callable[..., jax.Array]], operands: Sequence[jax.Array]
) -> None:
    """Compare results, which round the sums once or twice, with those of the first."""
    results = [jax.jit(each)(*operands) for each in functions.values()]
    # f32 may be multiplied in TF32.
    bound = 40 * max(float(jnp.finfo(operands[0].dtype).eps), 2.0**-11)
    for name, each in zip(functions, results, strict=True):
        error = jnp.abs(each.astype(jnp.float32) - results[0].astype(jnp.float32))
        largest = float(jnp.max(error))
        if not (math.isfinite(largest) and largest <= bound):
            raise ValueError(f"{name} differs from cuDNN's function by {largest}")


def _lines(data: Data) -> list[str]:
    columns = ["batch, steps, channels | >taps | dtype | layout | "]
    columns += [f">{name}, µs" for name in data["rows"][0]["us"]]
    return [
        "Times of `jax_cudnn.causal_conv1d` with bias and silu, by cuDNN's function",
        "and by XLA, of the same as a depthwise `jax_cudnn.conv`, and in plain JAX: by",
        "`jax.lax.conv_general_dilated` and as a sum of shifted products. In",
        "parentheses is the time over the least: that of two arrays of x's size",
        "forward, and of five with all gradients, at 3.0 TB/s.",
        "",
        *table(" | ".join(columns), map(_cells, data["rows"])),
    ]


def _cells(row: Row) -> list[Any]:
    sizes = f"{row['batch']}, {row['steps']}, {row['channels']}"
    times = (f"{us} ({row['of the least'][name]})" for name, us in row["us"].items())
    return [sizes, row["taps"], row["dtype"], row["layout"], row["what"], *times]


markdown = Page(
    name="causal_conv1d",
    title="Causal convolutions",
    comment="Causal convolutions by cuDNN's function, by XLA and as convolutions.",
    lines=_lines,
)

if __name__ == "__main__":
    run_benchmark(__doc__, cases, measure, markdown)
