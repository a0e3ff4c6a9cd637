# SPDX-License-Identifier: Apache-2.0
"""Times what may be fused into cuDNN's kernels, for docs/internals/design.md.

    python -m benchmarks.where_to_fuse --out docs/internals/measured

The gradient of a bf16 matmul with bias and activation is taken apart: the activation's
gradient with the bias sum, in XLA and as one cuDNN graph; and that of an operand from
the finished cotangent and with the activation's gradient as a prologue. Then XLA's
own code for a fused convolution, with f32 sums and with rounded ones, and 8-bit weights
with few and with many rows: by XLA, by the first of cuDNN's plans, and by the best.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.page import measured_by, page, table
from benchmarks.harness.program import parser
from benchmarks.harness.records import Table
from jax_cudnn import choices, conv, gated_matmul, matmul, native
from jax_cudnn.config import Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph, GraphWriter, MatmulAttributes, Tensor, to_json
from jax_cudnn.lowering import run_cudnn, run_xla, traced_graphs
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.lowering.devices import local_target
from jax_cudnn.lowering.primitives import run_reference
from jax_cudnn.policy import ranked
from jax_cudnn.tuning import measure as measure_part
from jax_cudnn.tuning.stopwatch import (
    PlanStopwatch,
    call_over_sets,
    draw_sets,
    time_calls,
)

_ROWS, _SUMS, _COLUMNS = 16384, 1024, 4096
_IMAGE_ORDER = (0, 2, 3, 1)
_INNER, _OUTER = 4096, 14336
_WEIGHTS = (
    (1, "int8"),
    (64, "int8"),
    (1024, "int8"),
    (64, "float8_e4m3fn"),
    (64, "uint8"),
)
_BF16 = jnp.bfloat16


def _sums_graph(activation: str) -> Graph:
    """Return the activation's gradient and its sum over rows, as an image."""
    writer = GraphWriter("f32")
    dims = (_ROWS, _COLUMNS, 1, 1)
    full = Tensor(name="ct", dtype="bf16", dims=dims, order=_IMAGE_ORDER)
    operands = [writer.input(dataclasses.replace(full, name=name)) for name in "gz"]
    slope = writer.pointwise(f"{activation}_grad", *operands)
    rounded = writer.cast(slope, "bf16")
    total = writer.reduce_to(rounded, (1, _COLUMNS, 1, 1))
    vector = Tensor(
        name="sums", dtype="f32", dims=(1, _COLUMNS, 1, 1), order=_IMAGE_ORDER
    )
    results = [writer.result(total, vector), writer.result(rounded, full)]
    return writer.finish(results)


def _gradient_graph(activation: str | None) -> Graph:
    """Return the gradient of the left operand, with the prologue if there is one."""
    writer = GraphWriter("f32")
    rows = (1, _ROWS, _COLUMNS)
    names = ["g"] if activation is None else ["g", "z"]
    cotangent = [
        writer.input(Tensor(name=name, dtype="bf16", dims=rows, order=(0, 1, 2)))
        for name in names
    ]
    weights = writer.input(
        Tensor(name="b", dtype="bf16", dims=(1, _COLUMNS, _SUMS), order=(0, 2, 1))
    )
    left = cotangent[0]
    if activation is not None:
        left = writer.pointwise(f"{activation}_grad", *cotangent, dtype="bf16")
    dims = (1, _ROWS, _SUMS)
    product = writer.node(
        "matmul",
        {"a": left, "b": weights},
        MatmulAttributes(),
        dims=dims,
        order=(0, 1, 2),
    )
    final = Tensor(name="grad", dtype="bf16", dims=dims, order=(0, 1, 2))
    return writer.finish([writer.result(product, final)])


def _gated_graph() -> Graph:
    """Return silu(a b) (a c), both products in one graph."""
    writer = GraphWriter("f32")
    a = writer.input(
        Tensor(name="a", dtype="bf16", dims=(1, _ROWS, _SUMS), order=(0, 1, 2))
    )
    dims = (1, _ROWS, _COLUMNS)
    products = [
        writer.node(
            "matmul",
            {
                "a": a,
                "b": writer.input(
                    Tensor(
                        name=name,
                        dtype="bf16",
                        dims=(1, _SUMS, _COLUMNS),
                        order=(0, 1, 2),
                    )
                ),
            },
            MatmulAttributes(),
            dims=dims,
            order=(0, 1, 2),
        )
        for name in ("b", "c")
    ]
    gated = writer.pointwise("mul", writer.pointwise("silu", products[0]), products[1])
    final = Tensor(name="gated", dtype="bf16", dims=dims, order=(0, 1, 2))
    return writer.finish([writer.result(gated, final)])


def _best_plan(graph: Graph) -> float:
    device = jax.local_devices(backend="cuda")[0]
    stopwatch = PlanStopwatch(graph, draw_sets(graph, device), device)
    times: list[float] = []
    for candidate in native.candidates(to_json(graph)):
        if candidate.refusal:
            continue
        try:
            plan = native.plan(to_json(graph), request=candidate.request)
        except UnsupportedError:
            continue
        times.append(stopwatch.time(plan, samples=5).median_us)
    return min(times)


def _program(
    function: Callable[..., Sequence[jax.Array]], sets: list[list[jax.Array]]
) -> float:
    return time_calls(call_over_sets(function, sets), len(sets), samples=7).median_us


def measure() -> list[tuple[str, float]]:
    """Return what was timed, in words, with microseconds."""
    choices.table().clear()
    device = jax.local_devices(backend="cuda")[0]
    options = Options()
    rows: list[tuple[str, float]] = []
    for activation in ("relu", "gelu_tanh"):
        graph = _sums_graph(activation)
        sets = draw_sets(graph, device)

        def plain(*xs: jax.Array, graph: Graph = graph) -> Sequence[jax.Array]:
            return run_reference(graph, xs, options)

        def kept(*xs: jax.Array, graph: Graph = graph) -> Sequence[jax.Array]:
            return run_xla(graph, xs, options)

        name = f"{activation}' with the bias sum"
        rows += [
            (f"{name}: XLA", _program(plain, sets)),
            (f"{name}: XLA, the sum from the rounded cotangent", _program(kept, sets)),
            (f"{name}: one cuDNN graph, best plan", _best_plan(graph)),
            (
                f"gradient of the operand with {activation}' as prologue, best plan",
                _best_plan(_gradient_graph(activation)),
            ),
        ]
    rows.append(
        ("gradient of the operand, plain, best plan", _best_plan(_gradient_graph(None)))
    )
    rows.append(("silu(a b) (a c) in one cuDNN graph", _best_plan(_gated_graph())))
    operands = [
        jax.ShapeDtypeStruct(shape, _BF16)
        for shape in ((_ROWS, _SUMS), (_SUMS, _COLUMNS), (_SUMS, _COLUMNS))
    ]
    halves = [graph for graph, _, _ in traced_graphs(gated_matmul, *operands)]
    rows.append(("the same in two, best plans", sum(map(_best_plan, halves))))
    for size, channels, out, window in ((64, 64, 64, 3), (128, 256, 64, 1)):
        x = jax.ShapeDtypeStruct((size, 56, 56, channels), _BF16)
        w = jax.ShapeDtypeStruct((window, window, channels, out), _BF16)
        bias = jax.ShapeDtypeStruct((out,), _BF16)

        def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
            numbers = ("NHWC", "HWIO", "NHWC")
            return conv(
                x,
                w,
                padding="SAME",
                dimension_numbers=numbers,
                bias=bias,
                activation="silu",
            )

        ((graph, _, _),) = traced_graphs(layer, x, w, bias)
        sets = draw_sets(graph, device)

        def full(*xs: jax.Array, graph: Graph = graph) -> Sequence[jax.Array]:
            return run_reference(graph, xs, options)

        def narrow(*xs: jax.Array, graph: Graph = graph) -> Sequence[jax.Array]:
            return run_xla(graph, xs, options)

        name = f"conv {window}x{window} ({size},56,56,{channels}->{out}) + bias + silu"
        rows += [
            (f"{name}: XLA, f32 sums", _program(full, sets)),
            (f"{name}: XLA, sums rounded first", _program(narrow, sets)),
        ]
    return [*rows, *_measure_weights()]


def _measure_weights() -> Iterator[tuple[str, float]]:
    """Yield what a product with scaled 8-bit weights takes as a program."""
    device = jax.local_devices(backend="cuda")[0]
    local = local_target()
    assert local is not None
    for rows, dtype in _WEIGHTS:
        operands = [
            jax.ShapeDtypeStruct((rows, _INNER), _BF16),
            jax.ShapeDtypeStruct((_INNER, _OUTER), dtype),
            jax.ShapeDtypeStruct((_OUTER,), jnp.float32),
        ]

        def layer(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
            return matmul(x, w, scale_b=scale)

        ((part, options, _),) = traced_graphs(layer, *operands)
        tuned = measure_part(part, options, local[1])
        assert tuned.xla_us is not None
        assert tuned.cudnn_us is not None
        rewrite = ranked(part, local[1])[0].rewrite
        plan = native.plan(to_json(rewrite.graph))
        step = PartDecision(part=part, rewrite=rewrite, plan=plan, target=local[1])

        def first(*xs: jax.Array, step: PartDecision = step) -> Sequence[jax.Array]:
            return run_cudnn(step, xs)

        name = f"({rows}, {_INNER}) x {dtype} ({_INNER}, {_OUTER}), scaled"
        yield f"{name}: XLA", tuned.xla_us
        yield f"{name}: cuDNN, first plan", _program(first, draw_sets(part, device))
        yield f"{name}: cuDNN, best plan", tuned.cudnn_us


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        f"The matmul is bf16 ({_ROWS}, {_SUMS}) x ({_SUMS}, {_COLUMNS}).",
        "",
        *table("what | >µs", ([x["what"], f"{x['us']:.0f}"] for x in data["rows"])),
    ]
    return page(
        data,
        lines,
        title="What belongs into cuDNN's kernels",
        comment="Times of what may be fused into cuDNN's kernels.",
        command=measured_by("where_to_fuse"),
    )


def main() -> None:
    """Measure, print, and write the table."""
    options = parser(__doc__).parse_args()
    rows = [{"what": what, "us": round(us, 2)} for what, us in measure()]
    Table(
        folder=options.out, name="where_to_fuse", markdown=markdown, keeps="nothing"
    ).add(*rows)


if __name__ == "__main__":
    main()
