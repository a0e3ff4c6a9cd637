# SPDX-License-Identifier: Apache-2.0
"""Reductions at the end of a fused function's kernel, against NumPy and JAX."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import subprograms
from jax_cudnn.policy import ranked
from jax_cudnn.reference.interpreter import to_logical, to_stored
from tests.common.devices import mesh_of, placed
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate, evaluate_legal

pytestmark = pytest.mark.sampled

_H200 = Target(name="h200", sm_version=90, sm_count=132, cudnn_version=91900)
_Function = Callable[..., Any]

_REDUCTIONS: dict[str, tuple[_Function, _Function]] = {
    "sum": (jnp.sum, np.sum),
    "max": (jnp.max, np.max),
    "min": (jnp.min, np.min),
    "amax": (
        lambda y, axis: jnp.max(jnp.abs(y), axis),
        lambda y, axis: np.max(abs(y), axis),
    ),
    "squares": (
        lambda y, axis: jnp.sum(jnp.square(y), axis),
        lambda y, axis: np.sum(y * y, axis),
    ),
}
# Over columns, rows, both, and with the batch.
_AXES = ((2,), (1,), (1, 2), (0, 1, 2), (0, 1))


def _operands(*, seed: int = 0, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Return matrices in a batch, others in one, and a bias."""
    numbers = np.random.default_rng(seed)
    shapes = ((3, 16, 8), (3, 8, 24), (24,))
    return [
        jnp.asarray(np.asarray(numbers.standard_normal(shape), dtype))
        for shape in shapes
    ]


def _function(name: str, axis: tuple[int, ...]) -> _Function:
    reduce, _ = _REDUCTIONS[name]

    def run(a: Any, b: Any, bias: Any) -> Any:
        return reduce(jnp.matmul(a, b) + bias[None, None], axis)

    return run


def _truth(name: str, axis: tuple[int, ...], operands: Sequence[Any]) -> np.ndarray:
    a, b, bias = (np.asarray(x, np.float64) for x in operands)
    return _REDUCTIONS[name][1](a @ b + bias, axis)


@pytest.mark.parametrize("name", _REDUCTIONS)
@pytest.mark.parametrize("axis", _AXES)
def test_a_reduction_ends_a_kernel(name: str, axis: tuple[int, ...]) -> None:
    function, operands = _function(name, axis), _operands()
    fused = jax_cudnn.fuse(function)
    explained = fused.explain(*operands)
    assert not explained.left, str(explained)
    assert len(explained.kernels) == 1
    for run in (fused, jax.jit(fused)):
        np.testing.assert_allclose(
            run(*operands), _truth(name, axis, operands), rtol=1e-5, atol=1e-4
        )
    strict = jax_cudnn.fuse(function, strict=True)
    np.testing.assert_allclose(strict(*operands), fused(*operands), rtol=1e-6)


@pytest.mark.parametrize("name", _REDUCTIONS)
@pytest.mark.parametrize("axis", _AXES)
def test_derivatives(name: str, axis: tuple[int, ...]) -> None:
    function = _function(name, axis)
    with jax.enable_x64(True):
        operands = _operands(dtype=jnp.float64)
        fused = jax_cudnn.fuse(function)
        check_grads(fused, operands, order=2, modes=("fwd", "rev"), eps=1e-4)
        results = jax.tree.leaves(jax.jacrev(fused, (0, 1, 2))(*operands))
        wanted = jax.tree.leaves(jax.jacrev(function, (0, 1, 2))(*operands))
        for one, two in zip(results, wanted, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-10)


def test_equal_maxima_share_the_gradient_and_nan_spoils_it() -> None:
    a = jnp.asarray([[1.0, 1.0], [2.0, 0.0], [jnp.nan, 1.0]])
    b = jnp.asarray([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])

    def run(a: Any, b: Any) -> Any:
        return jnp.max(a @ b, axis=1)

    cotangent = jnp.asarray([1.0, 2.0, 3.0])
    for function in (jax_cudnn.fuse(run), run):
        result, pull = jax.vjp(function, a, b)
        np.testing.assert_array_equal(result, [1.0, 2.0, np.nan])
        (grad, _) = pull(cotangent)
        np.testing.assert_allclose(grad[0], [2 / 3, 1 / 3], rtol=1e-6)
        np.testing.assert_allclose(grad[1], [2.0, 0.0], rtol=1e-6)
        assert np.isnan(grad[2]).all()


_SUBSETS = [s for s in itertools.product((False, True), repeat=4) if any(s)]


@pytest.mark.parametrize("name", ["sum", "max", "squares"])
@pytest.mark.parametrize("axis", [(2,), (1,), (0, 1, 2)])
def test_vmap_of_any_operands_and_cotangents(name: str, axis: tuple[int, ...]) -> None:
    fused = jax_cudnn.fuse(_function(name, axis))
    operands = _operands()
    like = jax.eval_shape(fused, *operands)
    full = [*operands, jnp.ones(like.shape) * 0.5]

    @jax.jit
    def run(a: Any, b: Any, bias: Any, cotangent: Any) -> Any:
        result, pull = jax.vjp(fused, a, b, bias)
        return result, pull(cotangent)

    for subset in _SUBSETS:
        axes = [0 if is_in else None for is_in in subset]
        examples = [
            jnp.stack([x, x * 2, 1 - x]) if is_in else x
            for x, is_in in zip(full, subset, strict=True)
        ]
        got = jax.tree.leaves(jax.jit(jax.vmap(run, in_axes=axes))(*examples))
        for i in range(3):
            one = [x[i] if s else x for x, s in zip(examples, subset, strict=True)]
            for found, want in zip(got, jax.tree.leaves(run(*one)), strict=True):
                size = float(jnp.max(jnp.abs(want)))
                np.testing.assert_allclose(found[i], want, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_are_rounded_as_the_function_says(dtype: Any) -> None:
    operands = _operands(dtype=dtype)
    for name in _REDUCTIONS:
        function = _function(name, (2,))
        found, want = jax_cudnn.fuse(function)(*operands), function(*operands)
        assert found.dtype == want.dtype
        assert not jax_cudnn.fuse(function).explain(*operands).left
        np.testing.assert_allclose(
            np.asarray(found, np.float32),
            np.asarray(want, np.float32),
            rtol=2 * float(jnp.finfo(dtype).eps),
        )


def test_a_sum_may_be_rounded_to_several_dtypes() -> None:
    def run(a: Any, b: Any) -> Any:
        total = jnp.sum(jnp.matmul(a, b).astype(jnp.float32), 2)
        return total.astype(jnp.bfloat16), total

    a, b, _ = _operands(dtype=jnp.bfloat16)
    narrow, wide = jax_cudnn.fuse(run, strict=True)(a, b)
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(wide, run(a, b)[1], rtol=1e-5)
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "casts",
    [
        (jnp.bfloat16,),
        (jnp.float16,),
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("name", ["sum", "max", "squares"])
def test_casts_of_a_reduction_are_those_of_the_function(name: str, casts: Any) -> None:
    """One after another, and side by side; the gradient knows them."""
    a, b, bias = _operands()
    reduce = _function(name, (2,))

    def chain(a: Any, b: Any) -> Any:
        value = reduce(a, b, bias) * 1
        for dtype in casts:
            value = value.astype(dtype)
        return value

    def each(a: Any, b: Any) -> Any:
        value = reduce(a, b, bias)
        return [value.astype(dtype) for dtype in casts]

    def at_once(a: Any, b: Any) -> Any:
        value = reduce(a, b, bias)
        for dtype in casts:
            value = value.astype(dtype)
        return value

    for function in (chain, each, at_once):
        found, pull = jax.vjp(jax_cudnn.fuse(function), 60 * a, 60 * b)
        want, pull_of_jax = jax.vjp(function, 60 * a, 60 * b)
        cotangents = jax.tree.map(jnp.ones_like, want)
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            assert one.dtype == two.dtype
            rtol = 2 * float(jnp.finfo(one.dtype).eps)
            np.testing.assert_allclose(
                np.asarray(one, np.float32), np.asarray(two, np.float32), rtol=rtol
            )
        for one, two in zip(pull(cotangents), pull_of_jax(cotangents), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: jnp.max(jnp.matmul(a, b), 0),
        lambda a, b: jnp.sum(jnp.matmul(a, b), 0),
        lambda a, b: jnp.max(jnp.matmul(a, b), ()),
        lambda a, b: jnp.max(jnp.matmul(a[:, :1], b), 1),
        lambda a, b: jnp.min(jnp.matmul(a, b[..., :1]), (0, 2)),
    ],
)
def test_what_is_along_neither_rows_nor_columns_is_xlas(function: Any) -> None:
    a, b, _ = _operands()
    fused = jax_cudnn.fuse(function)
    assert any("reduce" in each.name for each in fused.explain(a, b).left) or (
        "reduce" not in str(jax.make_jaxpr(function)(a, b))
    )
    a = a.at[0, 0, 0].set(jnp.nan)
    np.testing.assert_allclose(fused(a, b), function(a, b), rtol=1e-5, atol=1e-5)


def test_max_and_min_of_nothing() -> None:
    def run(a: Any, b: Any) -> Any:
        return jnp.max(jnp.matmul(a, b), 0, initial=-1.0)

    operands = (jnp.zeros((0, 8)), jnp.ones((8, 16)))
    np.testing.assert_array_equal(jax_cudnn.fuse(run)(*operands), run(*operands))


def test_results_of_one_element_axes_are_rounded_by_themselves() -> None:
    def run(a: Any, b: Any) -> Any:
        product = jnp.matmul(a, b)
        return jnp.max(product, 0), jnp.min(product, 0).astype(jnp.float16)

    a, b, _ = _operands()
    operands = (1e3 * a[0, :1], 1e3 * b[0])
    for one, two in zip(jax_cudnn.fuse(run)(*operands), run(*operands), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3)


def test_what_is_written_anyway_is_reduced_by_xla() -> None:
    def both(a: Any, b: Any) -> Any:
        product = a @ b
        return product, jnp.max(product, 2)

    a, b, _ = _operands()
    explained = jax_cudnn.fuse(both).explain(a, b)
    assert [left.name for left in explained.left] == ["reduce_max"]
    strict = jax_cudnn.fuse(both, strict=True)
    for found, want in zip(strict(a, b), both(a, b), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a, b: jnp.max(a @ b, 2) * 2, "nothing follows a reduction"),
        (lambda a, b: jnp.prod(a @ b, 2), "XLA fuses reductions"),
        (
            lambda a, b: jnp.sum(jnp.reshape(a @ b, (3, 4, 4, 24)), 1),
            "it leaves a part of the rows, columns or batch",
        ),
    ],
)
def test_strict_says_what_no_kernel_ends_with(function: Any, reason: str) -> None:
    a, b, _ = _operands()
    with pytest.raises(jax_cudnn.UnsupportedError, match=reason):
        jax_cudnn.fuse(function, strict=True)(a, b)
    np.testing.assert_allclose(
        jax_cudnn.fuse(function)(a, b), function(a, b), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["sum", "max"])
@pytest.mark.parametrize("axis", [(2,), (1,), (0, 1, 2)])
@pytest.mark.parametrize(
    "specs",
    [
        (("x",), ("x",), ()),
        (("x", "y"), ("x",), ()),
        ((None, "y"), (None, None, "x"), ("x",)),
        ((None, None, "y"), (None, "y"), ()),
    ],
)
def test_sharded_operands(name: str, axis: tuple[int, ...], specs: Any) -> None:
    numbers = np.random.default_rng(0)
    shapes = ((4, 16, 8), (4, 8, 24), (24,))
    operands = [
        jnp.asarray(np.asarray(numbers.standard_normal(x), jnp.float32)) for x in shapes
    ]
    fused = jax_cudnn.fuse(_function(name, axis))

    def loss(*operands: Any) -> Any:
        return jnp.sum(jnp.tanh(fused(*operands)))

    sharded = placed(mesh_of(x=4, y=2), operands, specs)
    for function in (fused, jax.grad(loss, (0, 1, 2))):
        results = jax.tree.leaves(jax.jit(function)(*sharded))
        for found, want in zip(
            results, jax.tree.leaves(function(*operands)), strict=True
        ):
            np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


# --- what is emitted ------------------------------------------------------------------


def _graphs(function: _Function, operands: Sequence[Any]) -> list[Graph]:
    closed = jax.make_jaxpr(jax_cudnn.fuse(function))(*operands)
    return [found.graph for found in subprograms(closed.jaxpr)]


@pytest.mark.parametrize("name", _REDUCTIONS)
@pytest.mark.parametrize("axis", _AXES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_way_to_run_it_means_the_same(
    name: str, axis: tuple[int, ...], dtype: Any
) -> None:
    (graph,) = _graphs(_function(name, axis), _operands(dtype=dtype))
    for poison in (None, np.nan, np.inf, -np.inf, "all"):
        arrays = draw_arrays(graph)
        if poison == "all":
            # Rows of nothing but -inf.
            arrays[0] = jnp.full_like(arrays[0], -jnp.inf)
            arrays[1] = jnp.ones_like(arrays[1])
        elif poison is not None:
            arrays[0] = arrays[0].at[(0,) * arrays[0].ndim].set(poison)
        expected = evaluate(graph, arrays)
        ways = legalize(graph, _H200).candidates
        assert len(ways) > 1
        assert any(node.kind == "reduction" for node in ways[0].graph.nodes)
        for rewrite in ways:

            def kernel(xs: Any, graph: Graph = rewrite.graph) -> Any:
                return _as_in_cudnn(graph, xs)

            for one, two in zip(
                evaluate_legal(rewrite, arrays, kernel),
                expected,
                strict=True,
            ):
                assert one.dtype == two.dtype
                np.testing.assert_allclose(
                    np.asarray(one, np.float64),
                    np.asarray(two, np.float64),
                    rtol=1e-5 if dtype == jnp.float32 else 2e-2,
                    atol=1e-4,
                )


def _as_in_cudnn(graph: Graph, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Compute a graph as cuDNN does.

    Its extremes are those of what is no NaN and of the largest finite numbers.
    """
    largest = float(np.finfo(np.float32).max)
    nodes: list[Any] = []
    more: list[Any] = []
    for node in graph.nodes:
        mode = getattr(node.attributes, "mode", "")
        if node.kind == "reduction" and mode in ("max", "min"):
            more.append(
                (dict(node.inputs)["input"], dict(node.outputs)["output"], mode)
            )
        else:
            nodes.append(node)
    read = [name for name, _, _ in more]
    made = {name for _, name, _ in more}
    kept = [name for name in graph.outputs if name not in made]
    inner = replace(
        graph,
        nodes=tuple(nodes),
        tensors=tuple(t for t in graph.tensors if t.name not in made),
        outputs=tuple(dict.fromkeys((*kept, *read))),
    )
    found = dict(zip(inner.outputs, evaluate(inner, arrays), strict=True))
    for name, result, mode in more:
        tensor, source = graph.tensor(result), graph.tensor(name)
        x = to_logical(source, found[name]).astype(jnp.float32)
        fill = -largest if mode == "max" else largest
        axes = tuple(i for i, size in enumerate(tensor.dims) if size == 1)
        reduce = jnp.nanmax if mode == "max" else jnp.nanmin
        value = reduce(x, axis=axes, keepdims=True, initial=fill)
        clipped = (
            jnp.maximum(value, fill) if mode == "max" else jnp.minimum(value, fill)
        )
        found[result] = to_stored(tensor, clipped)
    return [found[name] for name in graph.outputs]


def test_auto_waits_for_a_measurement_and_what_is_padded_is_reduced_by_xla() -> None:
    def run(a: Any, b: Any) -> Any:
        return jnp.max(a @ b, 1)

    like = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 64), (64, 4096))]
    (graph,) = _graphs(run, like)
    way, *_ = ranked(graph, _H200)
    assert "until cuDNN was measured" in way.slower
    first, *others = legalize(graph, _H200).candidates
    assert any(node.kind == "reduction" for node in first.graph.nodes)
    assert all("computed by XLA" in way.notes[-1] for way in others)

    def squares(a: Any, b: Any) -> Any:
        return jnp.sum(jnp.square((a @ b).astype(jnp.float32)), 1)

    # The product is written as it is, and what follows computed while it is read.
    (graph,) = _graphs(squares, like)
    _, *others = legalize(graph, _H200).candidates
    for way in others:
        assert len(way.graph.nodes) == 1
        assert way.graph.output_tensors[0].dtype == "bf16"
    like = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 64), (64, 4097))]
    (graph,) = _graphs(run, like)
    for rewrite in legalize(graph, _H200).candidates:
        assert all(node.kind != "reduction" for node in rewrite.graph.nodes)


@pytest.mark.parametrize("axis", [(2,), (1,), (0, 1, 2)])
def test_operands_whose_types_are_sharded(axis: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(0)
    shapes = ((4, 16, 8), (4, 8, 24), (24,))
    operands = [
        jnp.asarray(np.asarray(numbers.standard_normal(x), jnp.float32)) for x in shapes
    ]
    mesh = mesh_of(AxisType.Explicit, x=4, y=2)
    for specs in ((("x",), ("x",), ()), (("x", "y"), ("x",), ())):
        sharded = placed(mesh, operands, specs)
        for name in ("sum", "max"):
            function = _function(name, axis)
            fused = jax_cudnn.fuse(function)
            with jax.set_mesh(mesh):
                found, want = jax.jit(fused)(*sharded), jax.jit(function)(*sharded)
            assert jax.typeof(found).sharding.spec == jax.typeof(want).sharding.spec
            np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
