# SPDX-License-Identifier: Apache-2.0
"""Tests what docs/reductions.md says: few plans for sums, and none for softmax.

Where this fails since cuDNN plans more, the reasons on that page for leaving softmax to
XLA have to be looked at again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.graph import Graph, GraphWriter, Tensor, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import subprograms
from tests.common.gpuless import harness

_GPUS = pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
_LAST = (0, 2, 3, 1)
_LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "matrix": ((1024, 512), (0, 1)),
    "batch of matrices": ((4, 256, 512), (0, 1, 2)),
    "rows as an image": ((1024, 512, 1, 1), _LAST),
    "channels last": ((8, 64, 32, 16), _LAST),
    "channels first": ((8, 64, 32, 16), (0, 1, 2, 3)),
}
# The axes over which each has a plan for its sum, of those that are tried.
_PLANNED = {
    "matrix": {(1,), (0, 1)},
    "batch of matrices": set[tuple[int, ...]](),
    "rows as an image": {(0,), (1,), (0, 1)},
    "channels last": {(1,), (0, 2, 3), (0, 1, 2, 3)},
    "channels first": set[tuple[int, ...]](),
}
_TRIED = [(0,), (1,), (2,), (0, 1), (1, 2), (2, 3), (0, 2, 3), (0, 1, 2, 3)]


def _without(dims: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if axis in axes else size for axis, size in enumerate(dims))


def _begun(layout: str) -> tuple[GraphWriter, str]:
    dims, order = _LAYOUTS[layout]
    writer = GraphWriter("f32")
    return writer, writer.input(Tensor(name="x", dtype="bf16", dims=dims, order=order))


def _finished(writer: GraphWriter, value: str) -> Graph:
    made = writer[value]
    final = Tensor(name="output", dtype="f32", dims=made.dims, order=made.order)
    return writer.finish([writer.result(value, final)])


def _planned(graphs: dict[object, Graph], gpu: str) -> set[object]:
    texts = [to_json(graph) for graph in graphs.values()]
    answers = harness.plan_all(texts, gpu, build=False)
    return {
        key
        for key, answer in zip(graphs, answers, strict=True)
        if any(not each["refusal"] for each in answer.get("candidates", ()))
    }


@_GPUS
def test_nothing_follows_a_sum(gpu: str) -> None:
    """A softmax without its maximum, and its logarithm, which would be easier."""
    graphs: dict[object, Graph] = {}
    for layout, (dims, _) in _LAYOUTS.items():
        for axis in (each for each, size in enumerate(dims) if size > 1):
            for form in ("softmax", "logsumexp", "sum of exp"):
                writer, x = _begun(layout)
                exp = writer.pointwise("exp", x)
                value = total = writer.reduce_to(exp, _without(dims, (axis,)))
                if form == "softmax":
                    value = writer.pointwise("div", exp, total)
                elif form == "logsumexp":
                    value = writer.pointwise("log", total)
                graphs[form, layout, axis] = _finished(writer, value)
    planned = _planned(graphs, gpu)
    assert {form for form, *_ in planned} == {"sum of exp"}  # type: ignore[misc]


@_GPUS
def test_sums_alone_are_planned_over_channels_or_all_else(gpu: str) -> None:
    graphs: dict[object, Graph] = {}
    for layout, (dims, _) in _LAYOUTS.items():
        for axes in _TRIED:
            if max(axes) < len(dims) and all(dims[axis] > 1 for axis in axes):
                writer, x = _begun(layout)
                total = writer.reduce_to(x, _without(dims, axes))
                graphs[layout, axes] = _finished(writer, total)
    wanted = {(layout, axes) for layout, found in _PLANNED.items() for axes in found}
    assert _planned(graphs, gpu) == wanted


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda y, axis: jnp.sum(jax.nn.gelu(y), axis),
    "max": jnp.max,
    "smallest magnitude": lambda y, axis: jnp.min(jnp.abs(y), axis),
    "two": lambda y, axis: (jnp.max(y, axis), jnp.sum(jnp.square(y), axis)),
    "with the product": lambda y, axis: (y, jnp.max(y, axis)),
}


@_GPUS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("batch", [1, 3])
def test_reductions_end_a_matmul(gpu: str, dtype: str, batch: int) -> None:
    graphs: dict[object, Graph] = {}
    shapes = ((batch, 512, 256), (batch, 256, 128), (1, 1, 128))
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    for name, reduce in _FUNCTIONS.items():
        for axis in ((2,), (1,), (1, 2), (0, 1, 2)):

            def run(
                a: Any, b: Any, bias: Any, reduce: Any = reduce, axis: Any = axis
            ) -> Any:
                return reduce(jnp.matmul(a, b) + bias, axis)

            closed = jax.make_jaxpr(jax_cudnn.fuse(run, strict=True))(*operands)
            (found,) = subprograms(closed.jaxpr)
            ways = legalize(found.graph, harness.target(gpu)).candidates
            within = [way.graph for way in ways if _has_reduction(way.graph)]
            if batch == 1 or axis != (1, 2):
                graphs[name, axis] = within[0]
    assert _planned(graphs, gpu) == set(graphs)


def _has_reduction(graph: Graph) -> bool:
    return any(node.kind == "reduction" for node in graph.nodes)
