# SPDX-License-Identifier: Apache-2.0
"""Tests that matmuls with an activation between them share gradient kernels.

The gradient of the second product's operand, the activation's and the sum for the bias
are to be one kernel.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_cudnn import fuse
from jax_cudnn.graph import Graph
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.reference.dtypes import jax_dtype
from tests.common import drawn
from tests.common.evaluating import evaluate, evaluate_legal
from tests.common.planner import H200
from tests.fusing.functions import normal

pytestmark = pytest.mark.once


def _mlp(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
    b, c = (jnp.expand_dims(each, range(x.ndim - 1)) for each in (b, c))
    return x + jax.nn.gelu(x @ w + b) @ v + c


def _gated(x: Any, w: Any, u: Any, v: Any) -> Any:
    return (jax.nn.silu(x @ w) * (x @ u)) @ v


def _deep(x: Any, w: Any, u: Any, v: Any) -> Any:
    hidden = jnp.tanh(jax.nn.relu(x @ w) @ u.T)
    return hidden @ v, hidden


_SHAPES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mlp": (_mlp, ((3, 5, 8), (8, 12), (12,), (12, 8), (8,))),
    "gated": (_gated, ((5, 8), (8, 12), (8, 12), (12, 7))),
    "deep": (_deep, ((5, 8), (8, 12), (16, 12), (16, 7))),
}
_EACH = pytest.mark.parametrize("name", _SHAPES)


def _operands(name: str) -> list[jax.Array]:
    return [normal(i, *shape) for i, shape in enumerate(_SHAPES[name][1])]


def _close(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        size = float(jnp.max(jnp.abs(y), initial=1.0))
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * size)


def _pulled(function: Any) -> Callable[..., Any]:
    """Return results and gradients, with cotangents that differ."""

    def run(*operands: Any) -> Any:
        results, pull = jax.vjp(function, *operands)
        return results, pull(jax.tree.map(jnp.cos, results))

    return jax.jit(run)


def _kernels(graph: Graph) -> list[str]:
    """Return the operations of each part with a contraction, in words."""
    found: list[str] = []
    for part in partition(graph):
        nodes = part.nodes
        words = [getattr(n.attributes, "mode", "") or n.kind for n in nodes]
        if "matmul" in words:
            found.append(" ".join(w for w in words if w not in ("identity", "reshape")))
    return found


def _graphs(function: Any, *operands: Any) -> list[Graph]:
    return [graph for graph, _, _ in traced_graphs(function, *operands)]


def test_an_mlp_is_one_graph_whose_gradient_has_five_kernels() -> None:
    forward, backward = _graphs(_pulled(fuse(_mlp)), *_operands("mlp"))
    assert _kernels(forward) == ["matmul add gelu_tanh", "matmul add add"]
    assert sorted(_kernels(backward)) == [
        *("matmul", "matmul", "matmul", "matmul gelu_tanh_grad add"),
    ]


def test_a_gated_mlp_computes_its_activations_within_the_gradient() -> None:
    forward, backward = _graphs(_pulled(fuse(_gated)), *_operands("gated"))
    assert _kernels(forward) == ["matmul silu", "matmul mul", "matmul"]
    assert "matmul silu mul mul silu_grad" in _kernels(backward)
    assert all(
        part.nodes[-1].kind == "matmul" or "matmul" in _kernels(part)[0]
        for part in partition(backward)
    )


@_EACH
def test_results_and_gradients_are_the_functions(name: str) -> None:
    function, operands = _SHAPES[name][0], _operands(name)
    _close(_pulled(fuse(function))(*operands), _pulled(function)(*operands))
    _close(jax.jit(fuse(function))(*operands), function(*operands))
    remat = jax.checkpoint(fuse(function))
    _close(_pulled(remat)(*operands), _pulled(function)(*operands))


@_EACH
def test_forward_mode_agrees_with_reverse_mode_and_differences(name: str) -> None:
    check_grads(
        fuse(_SHAPES[name][0]), _operands(name), order=1, modes=["fwd", "rev"],
        atol=0.05, rtol=0.05,
    )  # fmt: skip


def test_the_second_derivative_is_the_functions() -> None:
    def loss(function: Any) -> Callable[..., Any]:
        return lambda *x: jnp.sum(jnp.sin(function(*x)))

    operands = _operands("gated")
    found, wanted = (
        jax.jvp(jax.grad(loss(f), (0, 1)), operands, [jnp.cos(x) for x in operands])[1]
        for f in (fuse(_gated), _gated)
    )
    _close(found, wanted)


@_EACH
@pytest.mark.parametrize("seed", range(3))
def test_some_operands_and_cotangents_are_examples(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    function, operands = _SHAPES[name][0], _operands(name)
    axes = [0 if rng.random() < 0.5 else None for _ in operands]
    if not any(axis == 0 for axis in axes):
        axes[seed] = 0
    given = [
        jnp.stack([x, jnp.sin(x), -x]) if axis == 0 else x
        for x, axis in zip(operands, axes, strict=True)
    ]
    shapes = jax.tree.leaves(jax.eval_shape(function, *operands))
    is_batched = [rng.random() < 0.5 for _ in shapes]
    cotangents = [
        normal(50 + i, *(3,) * b, *x.shape)
        for i, (x, b) in enumerate(zip(shapes, is_batched, strict=True))
    ]

    def pulled(function: Any) -> Callable[..., Any]:
        def run(cotangents: Any, *operands: Any) -> Any:
            results, pull = jax.vjp(function, *operands)
            tree = jax.tree.structure(results)
            return results, pull(jax.tree.unflatten(tree, cotangents))

        axes_of = ([0 if b else None for b in is_batched], *axes)
        return jax.jit(jax.vmap(run, in_axes=axes_of))

    found, wanted = (pulled(f)(cotangents, *given) for f in (fuse(function), function))
    _close(found, wanted)


@pytest.mark.parametrize("specs", [("x",), (None, "y"), ("x", "y")])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_and_hidden_units_are_shared_out(kind: str, specs: Any) -> None:
    types = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    rows, hidden = (*specs, None)[:2]
    spec = jax.sharding.PartitionSpec
    placing = [
        spec(rows), spec(None, hidden), spec(None, hidden), spec(hidden, None)
    ]  # fmt: skip
    operands = [
        normal(i, *s) for i, s in enumerate([(8, 8), (8, 12), (8, 12), (12, 7)])
    ]
    wanted = _pulled(_gated)(*operands)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.sharding.NamedSharding(mesh, p))
            for x, p in zip(operands, placing, strict=True)
        ]
        if kind == "Explicit" and hidden:
            with pytest.raises(Exception, match="contract"):
                jax.jit(_gated)(*placed)
            return
        found = jax.jit(_pulled(fuse(_gated)))(*placed)
    _close(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, wanted))


def test_a_product_may_read_two_others() -> None:
    def function(x: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ u) @ jax.nn.silu(v @ u)

    shapes = ((9, 16), (16, 16), (16, 16))
    operands = [drawn.normal(i, s) for i, s in enumerate(shapes)]
    results = _pulled(fuse(function))(*operands)
    expected = _pulled(function)(*operands)
    for got, want in zip(
        jax.tree.leaves(results), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_what_is_read_between_two_products_keeps_them_apart() -> None:
    def peeked(x: Any, w: Any, v: Any) -> Any:
        hidden = jax.nn.relu(x @ w)
        scale = jnp.sum(hidden, axis=0, keepdims=True)
        return (hidden * scale) @ v, hidden

    def bare(x: Any, w: Any, v: Any) -> Any:
        return (x @ w) @ v

    def transposed(x: Any, w: Any, v: Any) -> Any:
        return jax.nn.relu(x @ w).T @ v

    x, w = normal(0, 5, 8), normal(1, 8, 12)
    plain, other = normal(2, 12, 7), normal(2, 5, 7)
    for function, v in ((peeked, plain), (bare, plain), (transposed, other)):
        assert len(_graphs(fuse(function), x, w, v)) == 2
        _close(_pulled(fuse(function))(x, w, v), _pulled(function)(x, w, v))


@pytest.mark.parametrize("sizes", [(32, 16, 24), (30, 16, 24), (32, 13, 20)])
@pytest.mark.parametrize("name", ["mlp", "gated"])
def test_the_ways_of_a_kernel_with_its_sum_mean_the_same(
    name: str, sizes: tuple[int, int, int]
) -> None:
    m, k, n = sizes
    shapes = {"mlp": ((m, k), (k, n), (n,), (n, k), (k,))}
    shapes["gated"] = ((m, k), (k, n), (k, n), (n, k))
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes[name]]
    _, backward = _graphs(_pulled(fuse(_SHAPES[name][0])), *types)
    (part,) = (p for p in partition(backward) if "_grad" in str(_kernels(p)))
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(np.asarray(rng.normal(size=t.stored_shape), jax_dtype(t.dtype)))
        for t in part.input_tensors
    ]
    wanted = evaluate(part, operands)
    candidates = legalize(part, H200).candidates
    for rewrite in candidates:
        found = evaluate_legal(rewrite, operands)
        for x, y in zip(found, wanted, strict=True):
            x, y = (np.asarray(each, np.float32) for each in (x, y))
            np.testing.assert_allclose(x, y, rtol=0.02, atol=0.02 * np.abs(y).max())
    in_kernel = [
        any(node.kind == "reduction" for node in rewrite.graph.nodes)
        for rewrite in candidates
    ]
    assert not in_kernel[0]
    # Of padded matrices, what is in the padding would be added.
    assert any(in_kernel) == (name == "mlp" and sizes != (32, 13, 20))
