# SPDX-License-Identifier: Apache-2.0
"""Tests that fused functions keep their results under each of JAX's transformations."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import fuse, plans
from jax_cudnn.config import Options
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import run_xla, traced_graphs
from tests.fusing.functions import CASES, Case, block, conv_bn_relu, normal

pytestmark = pytest.mark.sampled

_NAMES = [pytest.param(case, id=name) for name, case in CASES.items()]
_B16 = jnp.bfloat16


def close(found: Any, wanted: Any, scale: float = 1.0) -> None:
    """Compare trees: the same sums in f32 may be added up in another order."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert jax.typeof(x).weak_type == jax.typeof(y).weak_type
        size = float(jnp.max(jnp.abs(y), initial=1.0))
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * size * scale)


@pytest.mark.parametrize("case", _NAMES)
def test_value_is_the_function_s(case: Case) -> None:
    close(fuse(case.function)(*case.operands), case.function(*case.operands))


@pytest.mark.parametrize("case", _NAMES)
def test_kernels_are_those_expected(case: Case) -> None:
    explained = fuse(case.function).explain(*case.operands)
    assert tuple(kernel.op for kernel in explained.kernels) == case.kernels


def _loss(function: Any, cotangents: list[Any], *operands: Any) -> jax.Array:
    leaves = jax.tree.leaves(function(*operands))
    terms = [jnp.vdot(x, y) for x, y in zip(leaves, cotangents, strict=True)]
    return functools.reduce(jnp.add, terms)


def _cotangents(case: Case) -> list[jax.Array]:
    shapes = jax.tree.leaves(jax.eval_shape(case.function, *case.operands))
    return [normal(90 + i, *x.shape) for i, x in enumerate(shapes)]


@pytest.mark.parametrize("case", _NAMES)
def test_gradients_are_the_function_s(case: Case) -> None:
    numbers = tuple(range(len(case.operands)))
    found, wanted = (
        jax.grad(functools.partial(_loss, f, _cotangents(case)), numbers)(
            *case.operands
        )
        for f in (fuse(case.function), case.function)
    )
    close(found, wanted)


@pytest.mark.parametrize("case", _NAMES)
def test_tangents_are_the_function_s(case: Case) -> None:
    tangents = tuple(normal(70 + i, *x.shape) for i, x in enumerate(case.operands))
    found, wanted = (
        jax.jvp(f, case.operands, tangents)[1]
        for f in (fuse(case.function), case.function)
    )
    close(found, wanted, scale=10)


@pytest.mark.parametrize("name", ["gated MLP", "conv, batch norm, relu"])
def test_gradients_are_finite_differences(name: str) -> None:
    case = CASES[name]
    check_grads(fuse(case.function), case.operands, order=1, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("case", _NAMES)
def test_vmap_over_some_operands(case: Case) -> None:
    rng = np.random.default_rng(len(case.operands) + len(case.kernels))
    axes = [int(rng.integers(0, x.ndim + 1)) for x in case.operands]
    axes = [a if rng.random() < 0.6 else None for a in axes]
    axes[0] = 0
    examples = tuple(
        x if a is None else jnp.stack([x, -x, x * 0.5], a)
        for x, a in zip(case.operands, axes, strict=True)
    )
    found, wanted = (
        jax.vmap(f, in_axes=tuple(axes))(*examples)
        for f in (fuse(case.function), case.function)
    )
    close(found, wanted)


def test_float64_is_kept() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w, b = (rng.standard_normal(s) for s in ((5, 8), (8, 12), (1, 12)))
        found = fuse(lambda x, w, b: jnp.tanh(x @ w + b))(x, w, b)
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, np.tanh(x @ w + b), rtol=1e-13)


def test_dense_numpy_in_float64() -> None:
    names = ("conv, batch norm, relu", "matmul, bias, gelu, residual, layer norm")
    x, w, g, b, m, v = (np.asarray(a, np.float64) for a in CASES[names[0]].operands)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y = sum(
        padded[:, i : i + 7, j : j + 5] @ w[i, j] for i in range(3) for j in range(3)
    )
    wanted = np.maximum((y - m) * g / np.sqrt(v + 1e-5) + b, 0)
    found = fuse(conv_bn_relu)(*CASES[names[0]].operands)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-4)
    x, w, b, r, s, t = (np.asarray(a, np.float64) for a in CASES[names[1]].operands)
    erf = np.vectorize(math.erf)
    h = x @ w + b
    h = h * (1 + erf(h / np.sqrt(2))) / 2 + r
    n = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5)
    found = fuse(block)(*CASES[names[1]].operands)
    np.testing.assert_allclose(found, n * s + t, rtol=1e-4, atol=1e-5)


# --- rounding -------------------------------------------------------------------------


def _eagerly(function: Any, *operands: Any) -> Any:
    """Run each operation by itself: XLA would drop roundings between them."""
    with jax.disable_jit():
        return function(*operands)


def test_a_cast_is_rounding_in_the_graph() -> None:
    def function(x, w):
        return (x @ w).astype(_B16).astype(jnp.float32) * 3.0

    x, w = normal(0, 5, 8), normal(1, 8, 12)
    (kernel,) = fuse(function).explain(x, w).kernels
    dtypes = [
        kernel.graph.tensor(name).dtype
        for node in kernel.graph.nodes
        for _, name in node.outputs
        if node.kind != "constant"
    ]
    assert dtypes == ["f32", "bf16", "f32", "f32"]
    np.testing.assert_array_equal(
        _eagerly(fuse(function), x, w), _eagerly(function, x, w)
    )


def test_each_operation_of_bf16_is_rounded_in_the_graph() -> None:
    def function(x, w, b):
        return jnp.tanh(x @ w + b) * 0.3

    operands = [normal(i, *s, dtype=_B16) for i, s in enumerate(((5, 8), (8, 12)))]
    operands.append(normal(2, 1, 12, dtype=_B16))
    (kernel,) = fuse(function).explain(*operands).kernels
    made = [t for t in kernel.graph.tensors if t.name not in kernel.graph.inputs]
    assert {t.dtype for t in made if t.dims != (1, 1, 1)} == {"bf16"}
    found, wanted = (_eagerly(f, *operands) for f in (fuse(function), function))
    # A sum of 8 products may be rounded to the neighbouring number, as sums are added
    # up in f32 in another order.
    np.testing.assert_allclose(
        found.astype(np.float32), wanted.astype(np.float32), atol=2**-8
    )


def test_wide_sums_are_not_rounded() -> None:
    def function(x, w, b):
        wide = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return jnp.sin(wide + b)

    x, w = normal(0, 5, 8, dtype=_B16), normal(1, 8, 12, dtype=_B16)
    b = normal(2, 1, 12)
    (kernel,) = fuse(function).explain(x, w, b).kernels
    made = [t for t in kernel.graph.tensors if t.name not in kernel.graph.inputs]
    assert {t.dtype for t in made} == {"f32"}
    close(fuse(function)(x, w, b), function(x, w, b))


def test_weights_of_8_bits_are_converted_in_the_kernel() -> None:
    def function(x, w, scale):
        return x @ w.astype(_B16) * scale

    x = normal(0, 5, 8, dtype=_B16)
    w = jnp.asarray(np.asarray(np.arange(-48, 48).reshape(8, 12), jnp.int8))
    scale = normal(2, 1, 12, dtype=_B16)
    explained = fuse(function).explain(x, w, scale)
    (kernel,) = explained.kernels
    assert [t.dtype for t in kernel.graph.input_tensors] == ["bf16", "i8", "bf16"]
    assert not explained.left
    found, wanted = (f(x, w, scale) for f in (fuse(function), function))
    np.testing.assert_allclose(
        found.astype(np.float32), wanted.astype(np.float32), rtol=2**-7
    )


def test_sums_of_8_bit_integers_are_exact() -> None:
    def function(x, w, scale):
        sums = jax.lax.dot(x, w, preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32) * scale

    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(np.asarray(rng.integers(-128, 128, s), jnp.int8))
        for s in ((5, 8), (8, 12))
    )
    scale = normal(2, 1, 12)
    assert [k.op for k in fuse(function).explain(x, w, scale).kernels] == ["matmul+mul"]
    np.testing.assert_array_equal(fuse(function)(x, w, scale), function(x, w, scale))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, -0.0])
def test_odd_numbers_are_kept(number: float) -> None:
    def function(x, w, b):
        h = x @ w + b
        return jnp.where(h > 0.0, h, jnp.maximum(h, -1.0) * b), jnp.sqrt(h)

    x, w, b = normal(0, 5, 8), normal(1, 8, 12), normal(2, 1, 12)
    x, b = x.at[1, 2].set(number), b.at[0, 3].set(number)
    for found, wanted in zip(fuse(function)(x, w, b), function(x, w, b), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


# --- how it is called -----------------------------------------------------------------


def test_trees_static_arguments_and_keywords() -> None:
    @fuse(static_argnames=("how", "scale"))
    def layer(parameters, x, *, how, scale=2.0):
        h = getattr(jnp, how)(x @ parameters["w"] + parameters["b"]) * scale
        return {"h": h, "x": x}, 3

    w, b, x = normal(0, 8, 12), normal(1, 1, 12), normal(2, 5, 8)
    found, three = layer({"w": w, "b": b}, x, how="tanh", scale=0.5)
    close(found, {"h": jnp.tanh(x @ w + b) * 0.5, "x": x})
    assert three == 3
    assert layer.__name__ == "layer"
    explained = layer.explain({"w": w, "b": b}, x, how="sin")
    assert [kernel.op for kernel in explained.kernels] == ["matmul+add+sin+mul"]


def test_static_argument_by_number() -> None:
    layer = fuse(lambda n, x, w: (x @ w) ** n, static_argnums=0)
    x, w = normal(0, 5, 8), normal(1, 8, 12)
    close(layer(3, x, w), (x @ w) ** 3)


def test_captured_arrays_and_tracers_have_gradients() -> None:
    x, w, b = normal(0, 5, 8), normal(1, 8, 12), normal(2, 1, 12)

    def loss(b, how):
        return how(lambda x: jnp.tanh(x @ w + b))(x).sum()

    found, wanted = (jax.grad(loss)(b, how) for how in (fuse, lambda f: f))
    close(found, wanted)


def test_methods() -> None:
    class Layer:
        def __init__(self) -> None:
            self.w = normal(1, 8, 12)

        @fuse(static_argnums=0)
        def __call__(self, x):
            return jnp.tanh(x @ self.w)

        @fuse(static_argnums=0)
        def other(self, x):
            return jnp.sin(x @ self.w)

    layer, x = Layer(), normal(0, 5, 8)
    close(layer(x), jnp.tanh(x @ layer.w))
    close(layer.other(x), jnp.sin(x @ layer.w))
    (kernel,) = layer.other.explain(layer, x).kernels
    assert kernel.op == "matmul+sin"
    assert len(plans.inspect(layer.other, x).calls) == 1


def test_random_keys_and_captured_constants() -> None:
    table = np.arange(12.0, dtype=np.float32)[None]
    key = jax.random.key(3)

    def layer(key, x, w):
        kept = jax.random.bernoulli(key, 0.8, (5, 12))
        return jnp.where(kept, jnp.tanh(x @ w * table), 0.0)

    x, w = normal(0, 5, 8), normal(1, 8, 12)
    close(fuse(layer)(key, x, w), layer(key, x, w))
    (kernel,) = fuse(layer).explain(key, x, w).kernels
    assert kernel.op == "matmul+mul+tanh"
    with jax.disable_jit():
        close(fuse(layer)(key, np.asarray(x), np.asarray(w)), layer(key, x, w))


def test_a_transposed_value_is_the_next_operand() -> None:
    def function(x, w, v):
        h = jnp.tanh(x @ w)
        return h.T @ v

    x, w, v = normal(0, 5, 8), normal(1, 8, 12), normal(2, 5, 7)
    close(fuse(function)(x, w, v), function(x, w, v))
    first, second = fuse(function).explain(x, w, v).kernels
    assert (first.op, second.op) == ("matmul+tanh", "matmul")
    assert len(first.graph.outputs) == 1
    assert second.graph.input_tensors[0].order == (0, 2, 1)


def test_composes_with_jit_scan_and_remat() -> None:
    w = normal(1, 8, 8) / 3
    step = fuse(lambda c, w: jnp.tanh(c @ w))

    def run(step, x, w):
        def body(c, _):
            return jax.checkpoint(step)(c, w), None

        return jax.lax.scan(body, x, None, length=3)[0].sum()

    x = normal(0, 5, 8)
    plain = functools.partial(run, lambda c, w: jnp.tanh(c @ w))
    fused = functools.partial(run, step)
    for how in (jax.jit, lambda f: jax.jit(jax.grad(f, (0, 1))), jax.hessian):
        close(how(fused)(x, w), how(plain)(x, w), scale=10)


def test_calls_are_traced_once() -> None:
    count = 0

    @fuse
    def layer(x, w):
        nonlocal count
        count += 1
        return x @ w

    for _ in range(3):
        layer(normal(0, 5, 8), normal(1, 8, 12))
    assert count == 1


def test_sharded_over_devices() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x, w, b = normal(0, 8, 8), normal(1, 8, 12), normal(2, 1, 12)
    layer = fuse(lambda x, w, b: jnp.tanh(x @ w + b))
    found = layer(jax.device_put(x, rows), w, b)
    close(found, jnp.tanh(x @ w + b))
    assert found.sharding.is_equivalent_to(rows, 2)


def test_explicit_shardings_and_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("x", None)
    x, w, b = normal(0, 8, 8), normal(1, 8, 12), normal(2, 1, 12)

    def layer(x, w, b):
        return jnp.tanh(x @ w + b)

    with jax.set_mesh(mesh):
        found = fuse(layer)(jax.sharding.reshard(x, spec), w, b)
        assert jax.typeof(found).sharding.spec == spec
        np.testing.assert_allclose(found, np.tanh(x @ w + b), rtol=1e-5, atol=1e-5)
    every = jax.sharding.PartitionSpec()
    auto = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        fuse(layer), mesh=auto, in_specs=(spec, every, every), out_specs=spec
    )
    np.testing.assert_allclose(mapped(x, w, b), layer(x, w, b), rtol=1e-5, atol=1e-5)


def test_inspect_sees_the_kernels() -> None:
    case = CASES["gated MLP"]
    report = plans.inspect(fuse(case.function), *case.operands)
    # They are one graph: see tests/fusing/test_fuse_chains.py.
    assert [call.op for call in report.calls] == ["+".join(case.kernels)]
    gradient = jax.grad(lambda *a: fuse(case.function)(*a).sum(), (0, 1, 2, 3))
    ops = [call.op for call in plans.inspect(gradient, *case.operands).calls]
    assert sum(op.count("matmul") for op in ops) == 9, ops


def test_implementation_reaches_the_kernels() -> None:
    case = CASES["tanh gelu"]
    fused = fuse(case.function, implementation="xla")
    (graph,) = traced_graphs(fused, *case.operands)
    assert graph.options.implementation == "xla"
    denied = plans.PlanOptions(denied_engines=(3,))
    (graph,) = traced_graphs(fuse(case.function, plan=denied), *case.operands)
    assert graph.options.plan == denied


def test_precision_is_the_function_s() -> None:
    def function(x, w):
        return jnp.matmul(x, w, precision="highest") + x @ w

    x, w = normal(0, 5, 8), normal(1, 8, 12)
    jaxpr = jax.make_jaxpr(fuse(function))(x, w)
    assert "matmul_precision='highest'" in str(jaxpr)
    with jax.default_matmul_precision("high"):
        jaxpr = jax.make_jaxpr(fuse(lambda x, w: x @ w))(x, w)
    assert "matmul_precision='high'" in str(jaxpr)


def test_effects_stay_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x, w):
        h = x @ w
        jax.debug.print("first {}", h.sum() * 0.0, ordered=True)
        h = jnp.tanh(h)
        jax.debug.print("second {}", x.sum() * 0.0, ordered=True)
        return h * 2.0

    fused = fuse(function)
    x, w = normal(0, 5, 8), normal(1, 8, 12)
    close(fused(x, w), jnp.tanh(x @ w) * 2.0)
    jax.effects_barrier()
    told = capsys.readouterr().out
    assert told.index("first") < told.index("second")
    assert [kernel.op for kernel in fused.explain(x, w).kernels] == ["matmul"]


def test_public_name() -> None:
    assert jax_cudnn.fuse is fuse


def _wide_epilogue(x, w, b):
    """Sums in f32 that almost cancel, and are rounded at the end."""
    wide = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return (wide - b).astype(_B16)


def test_wide_sums_are_not_rounded_where_xla_runs_them_on_a_gpu() -> None:
    x, w = normal(0, 5, 8, dtype=_B16), normal(1, 8, 12, dtype=_B16)
    b = jnp.matmul(x, w, preferred_element_type=jnp.float32) * 1.001
    wanted = _wide_epilogue(x, w, b).astype(np.float32)
    (graph,) = traced_graphs(fuse(_wide_epilogue), x, w, b)
    assert graph.options.exact_dtypes
    (found,) = run_xla(graph.graph, (x[None], w[None], b[None]), graph.options)
    np.testing.assert_allclose(found[0].astype(np.float32), wanted, atol=1e-5)
    (rounded,) = run_xla(graph.graph, (x[None], w[None], b[None]), Options())
    assert np.max(np.abs(rounded[0].astype(np.float32) - wanted)) > 1e-4


def test_ways_that_round_wide_sums_are_not_taken() -> None:
    x, w = normal(0, 16, 8, dtype=_B16), normal(1, 8, 24, dtype=_B16)
    (traced,) = traced_graphs(fuse(_wide_epilogue), x, w, normal(2, 16, 24))
    ways = legalize(traced.graph, None).candidates
    assert [way.rounds_sums for way in ways] == [False, True]

    def plain(x, w, b):
        return x @ w - b

    (traced,) = traced_graphs(fuse(plain), x, w, normal(2, 16, 24, dtype=_B16))
    ways = legalize(traced.graph, None).candidates
    assert [way.rounds_sums for way in ways] == [False, False]
