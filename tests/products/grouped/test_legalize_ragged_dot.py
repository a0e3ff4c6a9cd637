# SPDX-License-Identifier: Apache-2.0
"""Tests on the CPU that a grouped matmul, rewritten for cuDNN, keeps its results."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_cudnn
from jax_cudnn import ragged_dot
from jax_cudnn.graph import (
    DTypeName,
    Graph,
    Target,
    Tensor,
    derivative_of,
    grouped_matmul_graph,
)
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_program
from jax_cudnn.policy import ranked
from jax_cudnn.reference.products.grouped_matmul import gradient_of_b
from jax_cudnn.tuning.stopwatch import draw_sets
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate, evaluate_legal

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_M, _K, _N, _G = 13, 7, 5, 4


def _graph(
    dtype: DTypeName, groups: int = _G, result: DTypeName | None = None
) -> Graph:
    def of(name: str, dtype: DTypeName, *dims: int) -> Tensor:
        order = tuple(range(len(dims)))
        return Tensor(name=name, dtype=dtype, dims=dims, order=order)

    inputs = {
        "a": of("a", dtype, 1, _M, _K),
        "b": of("b", dtype, groups, _K, _N),
        "group_sizes": of("group_sizes", "i32", 1, groups),
    }
    return grouped_matmul_graph(inputs, result or dtype)


def _graphs(dtype: DTypeName, groups: int, result: DTypeName) -> list[Graph]:
    graph = _graph(dtype, groups, result)
    derivative = derivative_of(graph)
    assert derivative is not None
    found = [graph]
    for wanted in ((True, True, False), (True, False, False), (False, True, False)):
        backward = derivative.backward(graph, wanted, (True,))
        assert backward is not None
        found.append(backward.graph)
    return found


_H200 = Target(name="H200", sm_version=90, sm_count=132, cudnn_version=91900)
_TARGETS = [None, _H200]
_NEWER = replace(_H200, cudnn_version=92801)


@pytest.mark.parametrize(
    ("rows", "groups", "dtype", "sm_version", "cudnns"),
    [
        (16384, 8, "bf16", 90, ["by cuBLASLt", "by group"]),
        (16384, 64, "f16", 90, ["by cuBLASLt", "by group", "one kernel"]),
        (16384, 65, "bf16", 90, ["by cuBLASLt", "one kernel"]),
        (512, 8, "bf16", 90, ["by cuBLASLt"]),
        (256, 8, "bf16", 90, []),
        (512, 4, "bf16", 90, []),
        (16384, 32, "f32", 90, []),
        # The nearest table decides.
        (16384, 32, "bf16", 80, ["by cuBLASLt", "by group", "one kernel"]),
    ],
)
def test_large_products_are_cudnns(
    rows: int, groups: int, dtype: Any, sm_version: int, cudnns: list[str]
) -> None:
    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_dot(lhs, rhs, sizes)

    wide = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}[dtype]
    lhs = jax.ShapeDtypeStruct((rows, 2048), wide)
    rhs = jax.ShapeDtypeStruct((groups, 2048, 1024), wide)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    (traced,) = traced_program(product, lhs, rhs, sizes).graphs
    target = replace(_H200, sm_version=sm_version)
    ways = ranked(traced.graph, target)
    # The fastest comes first.
    found = dict.fromkeys(each.rewrite.names[-1] for each in ways if not each.slower)
    assert [*found] == cudnns
    assert [each.rewrite.waits for each in ways] == [
        each.rewrite.names[-1] == "by group" for each in ways
    ]


@pytest.mark.parametrize("target", _TARGETS)
@pytest.mark.parametrize("groups", [1, _G, 20])
@pytest.mark.parametrize("result", ["f32", "bf16"])
def test_the_rewritten_graph_gives_the_same(
    target: Target | None, groups: int, result: DTypeName
) -> None:
    for graph in _graphs("bf16", groups, result):
        legalization = legalize(graph, target)
        assert legalization.candidates
        assert all("XLA's until" in way.slower for way in ranked(graph, target))
        for rewrite in legalization.candidates:
            tensors = rewrite.graph.tensors
            named = {t.name for t in tensors if t.dtype == "i32"}
            way = rewrite.names[-1] if groups > 1 else "a matmul"
            assert (
                named
                == {
                    "one kernel": {"starts"},
                    "by group": {"group_sizes"},
                    "by cuBLASLt": {"group_sizes", "starts"},
                    "a matmul": set(),
                }[way]
            )
            assert all(
                t.dims[t.order[-1]] % 8 == 0 for t in tensors if t.dtype == "bf16"
            )
            for seed in range(3):
                operands = draw_arrays(graph, seed)
                got = evaluate_legal(rewrite, operands)
                for x, y in zip(got, evaluate(graph, operands), strict=True):
                    assert x.dtype == y.dtype
                    np.testing.assert_allclose(
                        np.asarray(x, "f4"), np.asarray(y, "f4"), rtol=2**-7, atol=2e-2
                    )


def test_what_the_kernel_reads_in_no_group_does_not_leak() -> None:
    (graph, backward, *_) = _graphs("bf16", _G, "f32")
    sizes = jnp.array([[2, 0, 5, 1]], jnp.int32)
    for each in (graph, backward):
        for rewrite in legalize(each, _H200).candidates:
            operands = dict(zip(each.inputs, draw_arrays(each), strict=True))
            operands["group_sizes"] = sizes
            want = evaluate(each, list(operands.values()))
            for name in ("a", "grad_output"):
                if name in operands:
                    operands[name] = operands[name].at[:, 8:].set(jnp.nan)
            got = evaluate_legal(rewrite, [*operands.values()])
            for x, y in zip(got, want, strict=True):
                np.testing.assert_allclose(
                    np.asarray(x, "f4"), np.asarray(y, "f4"), rtol=2**-7, atol=1e-5
                )


@pytest.mark.parametrize("target", [None, _H200, _NEWER])
@pytest.mark.parametrize("size", [0, 5, _M, 2**30, -3])
def test_a_single_group_is_a_plain_product(target: Target | None, size: int) -> None:
    """Rows beyond it are 0, whatever they are, and count for no gradient."""
    rng = np.random.default_rng(size % 7)
    kept = min(max(size, 0), _M)
    a, b, grad = (
        rng.standard_normal(shape) for shape in ((_M, _K), (1, _K, _N), (_M, _N))
    )
    a[kept:], grad[kept:] = np.nan, np.inf
    inside, below = np.nan_to_num(a, nan=0.0), np.where(np.isinf(grad), 0.0, grad)
    want = {
        "output": inside @ b[0],
        "grad_a": below @ b[0].T,
        "grad_b": (inside.T @ below)[None],
    }
    given = {
        "a": jnp.asarray(a[None], jnp.float32),
        "b": jnp.asarray(b, jnp.float32),
        "grad_output": jnp.asarray(grad[None], jnp.float32),
        "group_sizes": jnp.array([[size]], jnp.int32),
    }
    seen = set[str]()
    for graph in _graphs("f32", 1, "f32"):
        (node,) = graph.nodes
        roles = {name: role for role, name in (*node.inputs, *node.outputs)}
        for rewrite in legalize(graph, target).candidates:
            assert not any(x.kind.startswith("grouped") for x in rewrite.graph.nodes)
            kernel = functools.partial(evaluate, rewrite.graph)
            got = rewrite.run(kernel, [given[roles[name]] for name in graph.inputs])
            for name, x in zip(graph.outputs, got, strict=True):
                seen.add(roles[name])
                np.testing.assert_allclose(
                    x.reshape(want[roles[name]].shape),
                    want[roles[name]],
                    rtol=1e-5,
                    atol=1e-5,
                )
    assert seen == {*want}


def test_many_groups_are_moved_apart_for_the_gradient_of_the_matrices() -> None:
    """Zeros are between them, whatever is in other rows, and sizes that go too far."""
    graph, backward, no_b, _ = _graphs("f32", 20, "f32")
    (way,) = (x for x in legalize(backward, None).candidates if x.waits)
    operands = dict(zip(backward.inputs, draw_arrays(backward), strict=True))
    sizes = [2, 0, 2**30, *[5] * 17]
    operands["group_sizes"] = jnp.array([sizes], jnp.int32)
    spoilt = operands["a"].at[:, 2:].set(jnp.nan)
    made = way.before([*(operands | {"a": spoilt}).values()])
    given = dict(zip(way.graph.inputs, made, strict=True))
    assert given["group_sizes"].tolist() == [[64, 0, 64, *[0] * 17]]
    rows = given["a"]
    assert rows.shape[1] >= 64 * 20 + _M
    np.testing.assert_array_equal(rows[0, :2, :_K], operands["a"][0, :2])
    assert not rows[0, 2:64].any()
    assert jnp.isnan(rows[0, 64 : 64 + _M - 2, :_K]).all()
    assert not rows[0, 64 + _M - 2 :].any()
    for each in (graph, no_b):
        (way,) = (x for x in legalize(each, None).candidates if x.waits)
        assert way.graph.tensors[0].dims[1] == _M


def test_notes_and_refusals() -> None:
    graph, backward, *_ = _graphs("bf16", _G, "bf16")
    h200 = _TARGETS[1]
    plain, transposed, by_group, by_cublaslt = legalize(graph, h200).candidates
    assert plain.notes == (
        "rows beyond the last group are set to 0 after the kernel",
        "matrices are padded to multiples of 8 elements",
    )
    assert "b is transposed" in transposed.notes[1]
    assert "the host waits for the sizes" in by_group.notes[0]
    assert by_cublaslt.notes == (
        "all groups are one launch of cuBLASLt's",
        "matrices are padded to multiples of 8 elements",
    )
    # Where the GPU is not known, the way that all take comes first.
    assert [x.graph for x in legalize(graph, None).candidates] == [
        transposed.graph,
        plain.graph,
        by_group.graph,
    ]
    way, *others = legalize(backward, h200).candidates
    assert "the gradient of b is computed by XLA" in way.notes[-1]
    assert len(others) == 2
    assert not any("gradient of b" in note for each in others for note in each.notes)
    single = legalize(_graph("bf16", 1), h200).candidates[0]
    assert "a single group is a matmul" in single.notes
    assert single.graph.nodes[0].kind == "matmul"
    assert legalize(_graph("f64"), None).reasons == (
        "f64: cuDNN's grouped matmul takes bf16, f16 and f32",
    )
    old = Target(name="V100", sm_version=70, sm_count=80, cudnn_version=90800)
    assert [r.split(":")[0] for r in legalize(graph, old).reasons] == [
        "sm_70 (V100)",
        "cuDNN 9.8.0 is older than 9.15",
    ]


def test_tuning_draws_groups_that_fill_the_rows() -> None:
    (first, *_) = draw_sets(_graph("bf16"), jax.devices("cpu")[0])
    assert first[2].tolist() == [[_M // _G] * _G]


def test_the_lowered_text_asks_cudnn_when_told_to() -> None:
    def run(implementation: Any, *xs: jax.Array) -> Any:
        def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            y = ragged_dot(lhs, rhs, xs[2], implementation=implementation)
            return y.astype(jnp.float32).sum()

        return jax.value_and_grad(loss, (0, 1))(*xs[:2])

    shapes = (((16, 8), "bfloat16"), ((3, 8, 24), "bfloat16"), ((3,), "int32"))
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    for implementation, count in (("cudnn", 2), ("auto", 0), ("xla", 0)):
        traced = jax.jit(run, static_argnums=0).trace(implementation, *operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @jax_cudnn") == count
        # What XLA has an operation for is that operation, once for each product.
        assert len(re.findall(r'= "?chlo.ragged_dot', text)) == (1 if count else 3)


@pytest.mark.parametrize("shapes", [(16, 8, 1), (16, 1, 24), (1, 8, 24)])
def test_what_xla_computes_wrongly_is_not_its_operation(
    shapes: tuple[int, int, int],
) -> None:
    m, k, n = shapes

    def loss(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_dot(lhs, rhs, sizes).astype(jnp.float32).sum()

    given = (((m, k), "bfloat16"), ((3, k, n), "bfloat16"), ((3,), "int32"))
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given]
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*operands)
    assert "chlo.ragged_dot" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", [(16, 8, 1), (16, 1, 24), (1, 8, 24), (7, 1, 1)])
@pytest.mark.parametrize("sizes", [(5, 0, 7), (0, 1, 0), (0, 0, 0)])
def test_what_takes_its_place_is_right(
    shape: tuple[int, int, int], sizes: tuple[int, ...]
) -> None:
    m, k, n = shape
    rng = np.random.default_rng(3)
    a, b, grad = (
        jnp.asarray(np.asarray(rng.standard_normal(s), jnp.float32))
        for s in ((1, m, k), (3, k, n), (1, m, n))
    )
    # A NaN in a row of no group, and in a matrix, stays where it is.
    total = min(sum(sizes), m)
    a, grad = (x.at[:, total:].set(jnp.nan) for x in (a, grad))
    given = jnp.asarray([sizes], jnp.int32)
    graph = grouped_matmul_graph(
        {
            "a": Tensor(name="a", dtype="f32", dims=(1, m, k), order=(0, 1, 2)),
            "b": Tensor(name="b", dtype="f32", dims=(3, k, n), order=(0, 1, 2)),
            "group_sizes": Tensor(
                name="group_sizes", dtype="i32", dims=(1, 3), order=(0, 1)
            ),
        },
        "f32",
    )
    (got,) = evaluate(graph, [a, b, given], narrow_sums=True)
    row, want = 0, np.zeros((m, n))
    matrices = np.zeros((3, k, n))
    for group, size in enumerate(sizes):
        mine = slice(row, min(row + size, m))
        want[mine] = np.asarray(a[0, mine], np.float64) @ np.asarray(b[group])
        matrices[group] = np.asarray(a[0, mine], np.float64).T @ np.asarray(
            grad[0, mine], np.float64
        )
        row += size
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
    found = gradient_of_b(a, grad, given, by_lax=True)
    np.testing.assert_allclose(found, matrices, rtol=1e-5, atol=1e-6)


def test_sizes_that_go_too_far_or_are_negative_are_cut() -> None:
    graph = _graph("bf16")
    for rewrite in legalize(graph, _H200).candidates:
        operands = draw_arrays(graph)
        operands[2] = jnp.array([[2, 2**30, 2**30, 5]], jnp.int32)
        made = dict(zip(rewrite.graph.inputs, rewrite.before(operands), strict=True))
        if not rewrite.waits:  # The handler cuts the sizes that it reads.
            assert made["starts"].min() >= 0
            assert made["starts"].max() <= _M
        if rewrite.names[-1] == "by cuBLASLt":
            assert made["starts"].tolist() == [[0, 2, _M, _M]]
            assert made["group_sizes"].tolist() == [[2, _M - 2, 0, 0]]


def test_a_program_for_a_gpu_is_exported_and_read() -> None:
    lhs, rhs = jnp.ones((_M, _K)), jnp.ones((_G, _K, _N))
    sizes = jnp.array([3, 1, 7, 2])

    def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.sum(ragged_dot(lhs, rhs, sizes, implementation="cudnn") ** 2)

    program = export.export(
        jax.jit(jax.grad(loss, (0, 1))),
        platforms=["cuda"],
        disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
    )(lhs, rhs)
    text = export.deserialize(program.serialize()).mlir_module()
    assert text.count("custom_call @jax_cudnn") == 2
