# SPDX-License-Identifier: Apache-2.0
"""Tests norms through cuDNN, with every plan that it lists for them.

Judged against float64 on the CPU: by the error that XLA makes in the same dtypes.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import native
from jax_cudnn.graph import Graph, forward_graph, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering.cuda import run_cudnn
from jax_cudnn.lowering.decision import PartDecision
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.dtypes import jax_dtype
from tests.common.drawn_operands import draw_arrays
from tests.common.gpu.numerics import judge
from tests.common.gpu.pinned import pinned
from tests.norms.calls import CALLS, Call, operands
from tests.norms.problems import KINDS, OF_ROWS, Problem, backward_of

pytestmark = pytest.mark.gpu

_EACH = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
_DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
# Sizes of x by kind, from one element to more than a block holds.
_DIMS: dict[str, list[tuple[int, ...]]] = {
    "adaptive_layer_norm": [(3, 17, 1001), (4, 128, 512), (2, 5, 16384), (1, 1, 3)],
    "batch_norm": [(4096, 64), (77, 13), (2, 8), (20000, 24)],
    "group_norm": [
        (4, 64, 1, 900),
        (3, 7, 1, 121),
        (2, 3, 5, 77),
        (2, 32, 8, 1024),
        (3, 5, 1, 3),
    ],
    "layer_norm": [(77, 1001), (512, 1024), (3, 65536), (9, 200001), (1, 5), (999, 3)],
    "rms_norm": [(77, 1001), (512, 1024), (3, 65536), (9, 200001), (1, 5), (999, 3)],
}


def _loss(call: Call, implementation: str) -> Any:
    """Return what computes output, statistics and gradients."""

    def run(x: Any, scale: Any, bias: Any, cotangent: Any) -> Any:
        def norm(*arrays: Any) -> Any:
            return call.run(
                *arrays, return_statistics=True, implementation=implementation
            )

        (output, *more), pull = jax.vjp(norm, x, scale, bias)
        moved = [jnp.sin(each) for each in more]
        return (output, *more, *pull((cotangent.astype(output.dtype), *moved)))

    return jax.jit(run)


@_EACH
@_DTYPES
def test_output_statistics_and_gradients(call: Call, dtype: str) -> None:
    arrays = operands(call, dtype=dtype)
    arrays.append(operands(call, 5, dtype)[0] - 3)
    found = _loss(call, "cudnn")(*arrays)
    reference = _loss(call, "xla")(*arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        truth = [np.asarray(x) for x in _loss(call, "xla")(*wide)]
    names = ["output", "mean", "rstd"] if call.is_centred else ["output", "rstd"]
    names += ["grad_x", "grad_scale", "grad_bias"]
    judge(names, found, reference, truth)


def _graphs(kind: str, dtype: Any) -> Iterator[Graph]:
    layouts: Any = [None, (0, 3, 1, 2)] if kind == "group_norm" else [None]
    for dims, order in itertools.product(_DIMS[kind], layouts):
        for scale in {dtype, "f32"}:
            problem = Problem(
                kind=kind, dtype=dtype, scale=scale, bias=scale, dims=dims, order=order
            )
            yield problem.graph
            training = replace(problem, with_statistics=True).graph
            yield training
            count = len(training.outputs)
            yield backward_of(training, nonzero=[i == 0 for i in range(count)])


def _residual_graphs(kind: str, dtype: Any) -> Iterator[Graph]:
    """Yield norms whose residual a kernel adds."""
    for dims in ((512, 1024), (9, 4096), (1000, 768), (3, 8192)):
        problem = Problem(
            kind=kind,
            dtype=dtype,
            scale=dtype,
            bias=dtype,
            dims=dims,
            has_residual=True,
        )
        yield problem.graph
        yield replace(problem, with_statistics=True).graph


def _operands(graph: Graph, seed: int) -> list[jax.Array]:
    """Return random operands; those of a gradient with the statistics of its x."""
    arrays = dict(zip(graph.inputs, draw_arrays(graph, seed), strict=True))
    forward = forward_graph(graph)
    if forward is not None:
        results = evaluate(forward, [arrays[name] for name in forward.inputs])
        arrays |= dict(zip(forward.outputs, results, strict=True))
    return [arrays[name] for name in graph.inputs]


def _in_f64(graph: Graph, arrays: list[jax.Array]) -> list[np.ndarray]:
    """Return the graph's results on a CPU, with operands in f64 and results too."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        doubled = replace(
            graph, tensors=tuple(replace(t, dtype="f64") for t in graph.tensors)
        )
        return [np.asarray(x) for x in evaluate(doubled, wide)]


def _noise(graph: Graph, name: str, truth: np.ndarray) -> Any:
    """Return what a sum of n numbers in f32, one after another, may be off by.

    Some plans add up the gradients of scale and bias so; XLA adds them pairwise.
    """
    if name not in ("grad_scale", "grad_bias"):
        return 0.0
    x = graph.tensor("x")
    count = int(np.prod(x.dims)) // truth.size
    size = float(np.sqrt(np.mean(truth**2) / count))
    return np.full(truth.shape, count * float(jnp.finfo(jnp.float32).eps) * size)


def _launched(graphs: Iterable[Graph]) -> int:
    """Launch every plan of the first way to run each graph, and return how many."""
    target = native.device_target(0)
    failures: list[str] = []
    launched = 0
    for seed, graph in enumerate(graphs):
        arrays = _operands(graph, seed)
        truth = _in_f64(graph, arrays)
        reference = evaluate(graph, arrays)
        names = [f"{graph.nodes[0].kind} {name}" for name in graph.outputs]
        noises = [
            _noise(graph, name, x) for name, x in zip(graph.outputs, truth, strict=True)
        ]
        if not (ways := legalize(graph, target).candidates):
            continue  # A limit refuses it.
        rewrite = ways[0]
        for candidate in native.candidates(to_json(rewrite.graph)):
            if candidate.refusal:
                continue
            try:
                found = pinned(graph, rewrite, target, candidate.request)(*arrays)
                judge(names, found, reference, truth, noises)
            except Exception as error:  # All plans are to be heard of.
                dims = graph.tensor("x").dims
                where = f"{candidate.name} {dims}"
                failures.append(f"{where}: {type(error).__name__}: {error}"[:400])
            launched += 1
    assert not failures, "\n".join(failures)
    return launched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_plan_is_launched_and_right(kind: str, dtype: str) -> None:
    assert _launched(_graphs(kind, dtype))


@pytest.mark.parametrize("kind", OF_ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_plan_that_adds_a_residual(kind: str, dtype: str) -> None:
    for graph in _residual_graphs(kind, dtype):
        emitted = legalize(graph, native.device_target(0)).candidates[0].graph
        assert "residual" in dict(emitted.nodes[0].inputs)
    assert _launched(_residual_graphs(kind, dtype))


@pytest.mark.parametrize("name", ["layer", "layer_first", "rms"])
@pytest.mark.parametrize("size", [7, 1024])
@_DTYPES
def test_gradients_with_a_residual(name: str, size: int, dtype: str) -> None:
    """Of the output and the sum, where a kernel adds the residual and where not."""
    call = CALLS[name]
    axis = call.normalised[0]
    shape = tuple(size if i == axis else n for i, n in enumerate(call.shape))
    numbers = np.random.default_rng(0)
    sizes = [shape, shape, (size,), (size,), shape, shape]
    arrays = [jnp.asarray(numbers.standard_normal(x), dtype) for x in sizes]

    def loss(implementation: str) -> Any:
        def run(x: Any, other: Any, scale: Any, bias: Any, *cotangents: Any) -> Any:
            def norm(x: Any, other: Any, scale: Any, bias: Any) -> Any:
                return call.run(
                    x, scale, bias, residual=other, implementation=implementation
                )

            results, pull = jax.vjp(norm, x, other, scale, bias)
            return (*results, *pull(cotangents))

        return jax.jit(run)

    found, reference = loss("cudnn")(*arrays), loss("xla")(*arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        truth = [np.asarray(x) for x in loss("xla")(*wide)]
    names = ["output", "sum", "grad_x", "grad_residual", "grad_scale", "grad_bias"]
    judge(names, found, reference, truth)


@_EACH
def test_results_are_the_same_bits_again(call: Call) -> None:
    arrays = operands(call, dtype=jnp.bfloat16)
    arrays.append(arrays[0] - 3)
    run = _loss(call, "cudnn")
    first = [np.asarray(x, np.float32) for x in run(*arrays)]
    for _ in range(5):
        again = [np.asarray(x, np.float32) for x in run(*arrays)]
        for one, two in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, two)


@_EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_with_its_statistics(call: Call, bad: float) -> None:
    x, scale, bias = operands(call)
    x = x.at[(0,) * x.ndim].set(bad)
    found, want = (
        np.asarray(jax.jit(lambda *a, i=i: call.run(*a, implementation=i))(*arrays))
        for i, arrays in (("cudnn", (x, scale, bias)), ("xla", (x, scale, bias)))
    )
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@_EACH
def test_constant_rows_and_a_large_mean(call: Call) -> None:
    x, scale, bias = operands(call)
    run = jax.jit(lambda *a: call.run(*a, implementation="cudnn"))
    want = call.truth(jnp.full_like(x, 5.25), scale, bias)["output"]
    np.testing.assert_allclose(
        run(jnp.full_like(x, 5.25), scale, bias), want, atol=1e-4
    )
    # cuDNN must not compute E x^2 - (E x)^2, which has no digit left of the variance.
    moved = x + 4096
    want = call.truth(moved, scale, bias)["output"]
    scale = float(np.max(np.abs(want)))
    np.testing.assert_allclose(run(moved, *operands(call)[1:]), want, atol=5e-3 * scale)


def test_vmap_and_remat() -> None:
    call = CALLS["layer"]
    x, scale, bias = operands(call, dtype=jnp.bfloat16)
    examples = jnp.stack([x, x * 2, x - 1])

    def run(x: Any, implementation: str) -> Any:
        def norm(x: Any) -> Any:
            return call.run(x, scale, bias, implementation=implementation)

        kept = jax.checkpoint(norm)
        return jax.vmap(jax.grad(lambda x: jnp.sum(jnp.sin(kept(x)))))(x)

    found, want = (
        np.asarray(jax.jit(run, static_argnums=1)(examples, i), np.float32)
        for i in ("cudnn", "xla")
    )
    np.testing.assert_allclose(found, want, atol=2e-2 * np.max(np.abs(want)))


def test_auto_runs_xla_until_cudnn_was_measured() -> None:
    call = CALLS["layer"]
    text = jax.jit(lambda *a: call.run(*a)).lower(*operands(call)).as_text()
    assert "custom_call @jax_cudnn" not in text


def test_results_have_the_dtypes_of_the_graph() -> None:
    graph = Problem(kind="batch_norm", dtype="bf16", output="f32").graph
    target = native.device_target(0)
    (rewrite,) = legalize(graph, target).candidates
    plan = native.plan(to_json(rewrite.graph))
    step = PartDecision(part=graph, rewrite=rewrite, plan=plan, target=target)
    arrays = draw_arrays(graph)
    found = jax.jit(lambda *xs: run_cudnn(step, *xs))(*arrays)
    judge(["output"], found, evaluate(graph, arrays), _in_f64(graph, arrays))
    assert found[0].dtype == jax_dtype("f32")
