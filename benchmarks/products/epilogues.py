# SPDX-License-Identifier: Apache-2.0
"""Times activations inside a matmul's or a convolution's kernel.

    python -m benchmarks.epilogues --out docs/internals/measured

times one product and one convolution on one GPU with each activation behind it, and
the product with each activation's gradient. An activation is a node of cuDNN's, or is
written as other nodes where these are better (legalize/products/pointwise.py): where
both are there, both are timed. It writes epilogues.json and epilogues.md there.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import jax_cudnn
from benchmarks.harness.first_plans import fastest_us, first_plans
from benchmarks.harness.page import measured_by, page, table
from benchmarks.harness.program import run_benchmark
from jax_cudnn.graph import Graph, Target, is_anchor
from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.devices import local_device, local_target
from jax_cudnn.policy import ranked
from jax_cudnn.tuning.stopwatch import OperandSets, PlanStopwatch
from jax_cudnn.tuning.together import together

_NAME = "epilogues"
_PLANS = 5
_MODES = (
    *("identity", "relu", "relu6", "leaky_relu", "elu", "silu", "gelu_tanh"),
    *("gelu_erf", "sigmoid", "tanh", "softplus", "reciprocal"),
)
_GRADIENTS = (
    *("mul", "relu_grad", "relu6_grad", "leaky_relu_grad", "elu_grad", "silu_grad"),
    *("gelu_tanh_grad", "gelu_erf_grad", "sigmoid_grad", "tanh_grad"),
    "softplus_grad",
)
_SLOPES = {"elu": 1.0, "elu_grad": 1.0, "leaky_relu": 0.01, "leaky_relu_grad": 0.01}
# In whose place the others are put: these are not written as other nodes.
_PLACE, _PLACE_GRADIENT = "gelu_tanh", "gelu_tanh_grad"


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A kernel with a node where an activation or its gradient goes."""

    title: str
    part: Graph
    place: str

    def graphs(self, mode: str, target: Target) -> dict[str, Graph]:
        """Return what cuDNN may be given: its own node, and other nodes if there are.

        A graph with another activation in the place of its own is legal as well.
        """
        placed = ranked(self.part, target)[0].rewrite.graph
        own = _with_mode(placed, self.place, mode)
        (written, *_) = [
            way.rewrite
            for way in ranked(_with_mode(self.part, self.place, mode), target)
        ]
        found = {"node": own}
        if len(written.graph.nodes) != len(own.nodes):
            found["written"] = written.graph
        return found


def _with_mode(graph: Graph, old: str, new: str) -> Graph:
    mode, alpha = new.removeprefix("leaky_"), _SLOPES.get(new, 0.0)
    nodes = tuple(
        replace(node, attributes=replace(node.attributes, mode=mode, alpha=alpha))
        if isinstance(node.attributes, PointwiseAttributes)
        and node.attributes.mode == old
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def cases(*, small: bool) -> list[_Case]:
    """Return the kernels: an MLP's product and its gradient, and a convolution."""
    m, d, f = (256, 64, 128) if small else (32768, 768, 3072)
    n, s, c = (2, 8, 16) if small else (64, 56, 96)

    @jax_cudnn.fuse
    def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
        return jax.nn.gelu(x @ w + b) @ v

    def mlp_gradients(cotangent: Any, *operands: Any) -> Any:
        return jax.vjp(mlp, *operands)[1](cotangent)

    def conv(x: Any, w: Any, b: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax_cudnn.conv(
            x, w, (1, 1), "SAME", dimension_numbers=layout, bias=b, activation="gelu"
        )

    shapes = (m, d), (d, f), (f,), (f, d)
    product = f"[{m}, {d}] x [{d}, {f}]"
    image, window = (n, s, s, c), (3, 3, c, c)
    return [
        _Case(
            title=f"{product}, bias, activation; its argument is saved",
            part=_part(mlp_gradients, ((m, d), *shapes), _PLACE),
            place=_PLACE,
        ),
        _Case(
            title=f"{product}, an activation's gradient, its sum over the rows",
            part=_part(mlp_gradients, ((m, d), *shapes), _PLACE_GRADIENT),
            place=_PLACE_GRADIENT,
        ),
        _Case(
            title=f"convolution of {[*image]} by {[*window]}, bias, activation",
            part=_part(conv, (image, window, (c,)), _PLACE),
            place=_PLACE,
        ),
    ]


def _part(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], mode: str
) -> Graph:
    """Return the kernel of a function that has a node of this mode and a product."""
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    (found,) = (
        part
        for graph, _, _ in traced_graphs(function, *types)
        for part in partition(graph)
        if mode in {getattr(node.attributes, "mode", "") for node in part.nodes}
        and any(map(is_anchor, part.nodes))
    )
    return found


def measure(found: Sequence[_Case]) -> Iterator[dict[str, Any]]:
    """Yield a row for each activation in each place."""
    local = local_target()
    assert local is not None, "needs a GPU"
    device = local_device()
    for case in found:
        modes = _MODES if case.place == _PLACE else _GRADIENTS
        graphs = {mode: case.graphs(mode, local[1]) for mode in modes}
        every = [graph for ways in graphs.values() for graph in ways.values()]
        plans = iter(
            together([functools.partial(first_plans, each, _PLANS) for each in every])
        )
        # Graphs whose operands are the same are timed on the same arrays.
        sets: dict[Any, Any] = {}
        for mode, ways in graphs.items():
            us: dict[str, float | None] = {}
            for way, graph in ways.items():
                types = tuple((t.dims, t.dtype) for t in graph.input_tensors)
                if types not in sets:
                    sets[types] = OperandSets(graph, device).draw()
                stopwatch = PlanStopwatch(graph, sets[types], device)
                us[way] = fastest_us(stopwatch, next(plans))
            yield {"case": case.title, "mode": mode, "us": us}


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "Microseconds of bf16 kernels by the fastest of cuDNN's first "
        f"{_PLANS} plans: with",
        "cuDNN's own node for the activation, and with the nodes that jax_cudnn writes",
        "in its place, if it does. The last column is the time of what runs over that",
        "of the first row, which has no activation.",
    ]
    for title in dict.fromkeys(row["case"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["case"] == title]
        first = rows[0]["us"]["node"] or float("nan")
        lines += [
            "",
            f"**{title}**",
            "",
            *table(
                " | >cuDNN's node | >written as others | >over none",
                (_cells(row, first) for row in rows),
            ),
        ]
    return page(
        data,
        lines,
        title="Activations within a kernel",
        comment="Activations within cuDNN's products and convolutions.",
        command=measured_by("epilogues"),
    )


def _cells(row: dict[str, Any], first: float) -> list[str]:
    times = row["us"]["node"], row["us"].get("written")
    shown = ["-" if us is None else f"{us:.1f}" for us in times]
    runs = times[-1] or times[0]
    return [row["mode"], *shown, "-" if runs is None else f"{runs / first:.2f}"]


def main() -> None:
    """Measure, and write the tables."""
    run_benchmark(__doc__, cases, measure, markdown, name=_NAME)


if __name__ == "__main__":
    main()
