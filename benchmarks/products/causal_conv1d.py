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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.page import measured_by, page, table
from benchmarks.harness.program import run_benchmark
from benchmarks.harness.timing import Contender, compare

_NAME = "causal_conv1d"
_BYTES_PER_US = 3.0e6
# Arrays of x's size: x and y; and again x, with the cotangent and x's gradient.
_ARRAYS = {"forward": 2, "with gradients": 5}


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
    def least_us(self) -> dict[str, float]:
        """The time of the arrays of x's size, by what is computed."""
        size = self.batch * self.steps * self.channels * jnp.dtype(self.dtype).itemsize
        return {what: n * size / _BYTES_PER_US for what, n in _ARRAYS.items()}

    def operands(self) -> list[jax.Array]:
        """Return x, w, bias and a cotangent."""
        steps, channels = self.steps, self.channels
        shape = (self.batch, steps, channels)
        weights = (self.taps, channels)
        if self.layout == "NCW":
            shape, weights = (self.batch, channels, steps), (channels, self.taps)
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (shape, weights, (channels,), shape)
        pairs = zip(keys, shapes, strict=True)
        return [jax.random.normal(key, each, self.dtype) for key, each in pairs]


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


def _ours(case: _Case, implementation: Any, x: Any, w: Any, bias: Any) -> jax.Array:
    layout: Any = case.layout
    return jax_cudnn.causal_conv1d(
        x, w, bias=bias, dimension_numbers=layout, implementation=implementation
    )


def _filters(case: _Case, w: jax.Array) -> tuple[jax.Array, tuple[str, str, str]]:
    """Return weights as a convolution of JAX's has them, and its layouts."""
    if case.layout == "NWC":
        return w[:, None], ("NWC", "WIO", "NWC")
    return w[:, None], ("NCW", "OIW", "NCW")


def _depthwise(case: _Case, x: Any, w: Any, bias: Any) -> jax.Array:
    filters, layouts = _filters(case, w)
    return jax_cudnn.conv(
        x,
        filters,
        (1,),
        [(case.taps - 1, 0)],
        dimension_numbers=layouts,
        feature_group_count=case.channels,
        bias=bias if case.layout == "NWC" else bias[:, None],
        activation="silu",
    )


def _lax(case: _Case, x: Any, w: Any, bias: Any) -> jax.Array:
    filters, layouts = _filters(case, w)
    y = jax.lax.conv_general_dilated(
        x,
        filters,
        (1,),
        [(case.taps - 1, 0)],
        dimension_numbers=layouts,
        feature_group_count=case.channels,
    )
    return jax.nn.silu(y + (bias if case.layout == "NWC" else bias[:, None]))


def _shifted(case: _Case, x: Any, w: Any, bias: Any) -> jax.Array:
    axis = 1 if case.layout == "NWC" else 2
    pads = [(0, 0)] * 3
    pads[axis] = (case.taps - 1, 0)
    front = jnp.pad(x, pads).astype(jnp.float32)
    wide = w.astype(jnp.float32)
    total = bias.astype(jnp.float32)
    total = total if axis == 1 else total[:, None]
    for tap in range(case.taps):
        piece = jax.lax.slice_in_dim(front, tap, tap + case.steps, axis=axis)
        total = total + piece * (wide[tap] if axis == 1 else wide[:, tap, None])
    return jax.nn.silu(total).astype(x.dtype)


def _contenders(case: _Case) -> dict[str, Callable[..., jax.Array]]:
    return {
        "cuDNN": functools.partial(_ours, case, "cudnn"),
        "XLA": functools.partial(_ours, case, "xla"),
        "conv": functools.partial(_depthwise, case),
        "jax.lax": functools.partial(_lax, case),
        "shifted": functools.partial(_shifted, case),
    }


def _with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(x: Any, w: Any, bias: Any, cotangent: Any) -> Any:
        y, back = jax.vjp(function, x, w, bias)
        return y, *back(cotangent)

    return run


# --- measuring ------------------------------------------------------------------------


def measure(found: Sequence[_Case]) -> Iterator[dict[str, Any]]:
    """Yield a row for each convolution, forward and with gradients."""
    for case in found:
        operands = case.operands()
        functions = _contenders(case)
        _check(functions, operands)
        for what, least in case.least_us.items():
            count = 3 if what == "forward" else 4
            runs: dict[str, Contender] = {}
            for name, function in functions.items():
                wanted = function if what == "forward" else _with_gradients(function)
                call = functools.partial(jax.jit(wanted), *operands[:count])
                runs[name] = Contender(call=call, wait=jax.block_until_ready)
            times = compare(runs, baseline="cuDNN")
            us = {name: round(time.median_us, 1) for name, time in times.items()}
            yield {
                **asdict(case),
                "what": what,
                "us": us,
                "of the least": {name: round(x / least, 2) for name, x in us.items()},
            }


def _check(
    functions: dict[str, Callable[..., jax.Array]], operands: Sequence[jax.Array]
) -> None:
    """Compare results, which round the sums once or twice, with f32 of the first."""
    results = [jax.jit(each)(*operands[:3]) for each in functions.values()]
    unit = float(jnp.finfo(operands[0].dtype).eps)
    for name, each in zip(functions, results, strict=True):
        error = jnp.abs(each.astype(jnp.float32) - results[0].astype(jnp.float32))
        largest = float(jnp.max(error))
        # f32 may be multiplied in TF32.
        bound = 40 * max(unit, 2.0**-11)
        if not (math.isfinite(largest) and largest <= bound):
            raise ValueError(f"{name} differs from cuDNN's function by {largest}")


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    columns = ["batch, steps, channels | >taps | dtype | layout | "]
    columns += [f">{name}, µs" for name in data["rows"][0]["us"]]
    lines = [
        "Times of `jax_cudnn.causal_conv1d` with bias and silu, by cuDNN's function",
        "and by XLA, of the same as a depthwise `jax_cudnn.conv`, and in plain JAX: by",
        "`jax.lax.conv_general_dilated` and as a sum of shifted products. In",
        "parentheses is the time over the least: that of two arrays of x's size",
        "forward, and of five with all gradients, at 3.0 TB/s.",
        "",
        *table(" | ".join(columns), map(_cells, data["rows"])),
    ]
    return page(
        data,
        lines,
        title="Causal convolutions",
        comment="Causal convolutions by cuDNN's function, by XLA and as convolutions.",
        command=measured_by(_NAME),
    )


def _cells(row: dict[str, Any]) -> list[Any]:
    sizes = f"{row['batch']}, {row['steps']}, {row['channels']}"
    times = (f"{us} ({row['of the least'][name]})" for name, us in row["us"].items())
    return [sizes, row["taps"], row["dtype"], row["layout"], row["what"], *times]


def main() -> None:
    """Measure, and write the table."""
    run_benchmark(__doc__, cases, measure, markdown, name=_NAME)


if __name__ == "__main__":
    main()
