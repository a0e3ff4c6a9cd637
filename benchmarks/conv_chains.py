# SPDX-License-Identifier: Apache-2.0
"""Times convolutions with the batch norms around them as one kernel.

    python -m benchmarks.conv_chains --out docs/internals/measured

times convolutions of ResNet-50 on one GPU: alone, with the sums of its result and of
its squares as further results (what the next batch norm needs), and behind scale, bias
and relu (what the last one left to do). Each is timed by the fastest of cuDNN's plans
and by XLA. It writes conv_chains.json and conv_chains.md there.
"""

import contextlib
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.first_plans import fastest_us, first_plans
from benchmarks.report import versions_text
from benchmarks.row_by_row import run_benchmark
from benchmarks.timing import Contender, alternate
from jax_cudnn import native
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, from_json
from jax_cudnn.lowering.devices import local_device
from jax_cudnn.tuning.stopwatch import (
    OperandSets,
    PlanStopwatch,
    compile_over_sets,
)
from jax_cudnn.tuning.together import together

_NAME = "conv_chains"
_PLANS = 12
_CHANNELS_LAST = [0, 2, 3, 1]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A convolution in steps of 1, with what is around it in its kernel."""

    images: int
    size: int
    inner: int
    outer: int
    window: int
    dtype: str = "bf16"
    is_normalized: bool = False
    has_sums: bool = False

    @property
    def title(self) -> str:
        """What is around it, and of which dtype."""
        words = ["scale, bias, relu"] if self.is_normalized else []
        words += ["conv"] + (["sums"] if self.has_sums else [])
        return f"{self.dtype}: {', '.join(words)}"

    def graph(self) -> Graph:
        """Return it as one of cuDNN's graphs."""
        x, y = [[self.images, c, *[self.size] * 2] for c in (self.inner, self.outer)]
        tensors, nodes = _Tensors(), list[dict[str, Any]]()
        tensors.add(self.dtype, x=x, w=[self.outer, self.inner, *[self.window] * 2])
        tensors.add(self.dtype, y=y)
        inputs, outputs, image = ["x", "w"], ["y"], "x"
        if self.is_normalized:
            channels = [1, self.inner, 1, 1]
            tensors.add(self.dtype, scale=channels, bias=channels)
            tensors.add(self.dtype, scaled=x, shifted=x, positive=x)
            nodes += [
                _pointwise("mul", "scaled", a="x", b="scale"),
                _pointwise("add", "shifted", a="scaled", b="bias"),
                _pointwise("relu", "positive", a="shifted"),
            ]
            inputs, image = ["x", "scale", "bias", "w"], "positive"
        ends = [self.window // 2] * 2
        attributes = {"padding_high": ends, "padding_low": ends}
        for name in ("lhs_dilation", "rhs_dilation", "window_strides"):
            attributes[name] = [1, 1]
        nodes.append(_node("conv_fprop", attributes, "y", w="w", x=image))
        if self.has_sums:
            tensors.add("f32", wide=y, squares=y)
            totals = [1, self.outer, 1, 1]
            tensors.add("f32", sum=totals, sum_of_squares=totals)
            nodes += [
                _pointwise("identity", "wide", a="y"),
                _node("reduction", {"mode": "add"}, "sum", input="wide"),
                _pointwise("mul", "squares", a="wide", b="wide"),
                _node("reduction", {"mode": "add"}, "sum_of_squares", input="squares"),
            ]
            outputs = ["y", "sum", "sum_of_squares"]
        data = {
            "schema": 1,
            "inputs": inputs,
            "outputs": outputs,
            "nodes": nodes,
            "tensors": sorted(tensors, key=lambda tensor: tensor["name"]),
        }
        return from_json(json.dumps(data, sort_keys=True, separators=(",", ":")))

    def run(self, *operands: jax.Array) -> list[jax.Array]:
        """Compute it as XLA does."""
        x, *middle, w = operands
        if middle:
            scale, bias = middle
            x = jax.nn.relu(x * scale + bias)
        ends = self.window // 2
        # A filter lies in memory with its inner channels last.
        layout = ("NHWC", "OHWI", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), [(ends, ends)] * 2, dimension_numbers=layout
        )
        if not self.has_sums:
            return [y]
        wide = y.astype(jnp.float32)
        return [y, wide.sum((0, 1, 2)), (wide * wide).sum((0, 1, 2))]


class _Tensors(list[dict[str, Any]]):
    def add(self, dtype: str, **tensors: Sequence[int]) -> None:
        for name, dims in tensors.items():
            self.append(
                {"name": name, "dims": dims, "dtype": dtype, "order": _CHANNELS_LAST}
            )


def _pointwise(mode: str, output: str, **inputs: str) -> dict[str, Any]:
    return _node("pointwise", {"alpha": 0, "mode": mode}, output, **inputs)


def _node(
    kind: str, attributes: dict[str, Any], output: str, **inputs: str
) -> dict[str, Any]:
    return {
        "kind": kind,
        "attributes": attributes,
        "inputs": inputs,
        "outputs": {"output": output},
    }


def chains(*, small: bool) -> list[list[Chain]]:
    """Return the convolutions, each with different work around it."""
    shapes = [
        (56, 64, 64, 1), (56, 64, 64, 3), (56, 64, 256, 1), (56, 256, 64, 1),
        (28, 128, 128, 3), (28, 128, 512, 1), (28, 512, 128, 1), (14, 256, 256, 3),
        (14, 256, 1024, 1), (14, 1024, 256, 1), (7, 512, 512, 3), (7, 512, 2048, 1),
    ]  # fmt: skip
    if small:
        shapes = [(8, 16, 8, 3)]
    around: list[dict[str, Any]] = [
        {},
        {"has_sums": True},
        {"dtype": "f16", "is_normalized": True, "has_sums": True},
    ]
    return [
        [
            Chain(
                images=2 if small else 128,
                size=size,
                inner=inner,
                outer=outer,
                window=window,
                **each,
            )
            for each in around
        ]
        for size, inner, outer, window in shapes
    ]


class _Kernel:
    """A chain with cuDNN's plans for it, and XLA's program."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.graph = chain, chain.graph()
        self._operands = OperandSets(self.graph, local_device())
        self.plans: list[native.PlanInfo] = []
        self.program: Callable[..., Any] | None = None

    def prepare(self) -> None:
        """Build plans and compile the program; may run in a thread."""
        with contextlib.suppress(UnsupportedError):
            self.plans = first_plans(self.graph, _PLANS)
        with jax.default_device(local_device()):
            self._operands.compile()
            self.program = compile_over_sets(self.chain.run, self._operands.types)

    def measured(self) -> dict[str, float]:
        """Return microseconds by cuDNN's fastest plan, if any runs, and by XLA."""
        sets = self._operands.draw()
        stopwatch = PlanStopwatch(self.graph, sets, local_device())
        fastest = fastest_us(stopwatch, self.plans)
        call = functools.partial(self.program, sets)  # type: ignore[arg-type]
        contender = Contender(call=call, wait=jax.block_until_ready)
        times = alternate({"XLA": contender}, rounds=5, round_ms=8.0, least_calls=2)
        found = {"XLA": round(statistics.median(times["XLA"]) / len(sets), 2)}
        return found if fastest is None else {"cuDNN": fastest, **found}


def measure(found: Sequence[Sequence[Chain]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each convolution."""
    kernels = [[_Kernel(chain) for chain in each] for each in found]
    together([kernel.prepare for each in kernels for kernel in each])
    for each in kernels:
        chain = each[0].chain
        yield {
            "x": [chain.images, chain.size, chain.size, chain.inner],
            "w": [chain.window, chain.window, chain.inner, chain.outer],
            "us": {kernel.chain.title: kernel.measured() for kernel in each},
        }


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    titles = list(data["rows"][0]["us"])
    names = [f"{title} | XLA" for title in titles]
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Convolutions with batch norms around them in one kernel. -->",
        "",
        "# Convolutions with batch norms around them",
        "",
        "Printed by `python -m benchmarks.conv_chains --out "
        "docs/internals/measured`; do not "
        f"edit. {versions_text(data['environment'])}.",
        "",
        "Microseconds of convolutions of ResNet-50: alone; with the sums of the result",
        "and of its squares for each channel, as the next batch norm needs them; and",
        "with scale, bias and relu of the last batch norm in front of it, too. Each by",
        f"the fastest of cuDNN's first {_PLANS} plans, and by XLA (-: not timed).",
        "",
        f"| x | w | {' | '.join(names)} |",
        f"| --- | --- |{' ---: |' * (2 * len(titles))}",
    ]
    for row in data["rows"]:
        times = (
            row["us"][title].get(name) for title in titles for name in ("cuDNN", "XLA")
        )
        cells = ["-" if us is None else f"{us:.1f}" for us in times]
        lines.append(f"| {row['x']} | {row['w']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the table."""
    run_benchmark(__doc__, chains, measure, markdown, name=_NAME)


if __name__ == "__main__":
    main()
