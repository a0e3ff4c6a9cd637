# SPDX-License-Identifier: Apache-2.0
"""Tests products by cuBLASLt on a GPU: each plan, what runs untuned, special values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import native, plans
from jax_cudnn.graph import Graph, is_anchor, to_json
from jax_cudnn.legalize import legalize, partition
from jax_cudnn.lowering import traced_graphs
from tests.common.gpu.pinned import judge_every_plan
from tests.fusing.functions import normal

pytestmark = pytest.mark.gpu

_BLAS = plans.PlanOptions(engines=(native.CUBLASLT_ENGINE,))


def _gelu_and_argument(x: Any, w: Any, b: Any) -> Any:
    z = x @ w + b
    return jax.nn.gelu(z), z


@jax_cudnn.fuse
def _mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    return jax.nn.gelu(x @ w + b) @ v


def _gradient(grad: Any, *operands: Any) -> Any:
    """Return gradients of an MLP: one kernel is a product times a gelu's gradient."""
    return jax.vjp(_mlp, *operands)[1](grad)


def _relu(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.relu(x @ w + b)


def _residual(x: Any, w: Any, b: Any, r: Any) -> Any:
    return x @ w + b + r


def _transposed(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x.T @ w.T + b)


_PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gelu, saved": (_gelu_and_argument, ((384, 256), (256, 640), (1, 640))),
    "gelu's gradient": (
        _gradient,
        ((384, 256), (384, 256), (256, 640), (1, 640), (640, 256)),
    ),
    "relu": (_relu, ((384, 256), (256, 640), (1, 640))),
    "residual": (_residual, ((384, 256), (256, 640), (1, 640), (384, 640))),
    "transposed": (_transposed, ((256, 384), (640, 256), (1, 640))),
    "odd sizes": (_gelu_and_argument, ((131, 77), (77, 251), (1, 251))),
    "one row": (_gelu_and_argument, ((1, 512), (512, 1024), (1, 1024))),
    "in a batch": (_gelu_and_argument, ((3, 128, 64), (3, 64, 256), (1, 1, 256))),
}


def _part(function: Callable[..., Any], operands: list[jax.Array]) -> Graph:
    found = [
        part
        for graph, *_ in traced_graphs(_fused(function), *operands)
        for part in partition(graph)
        if any(map(is_anchor, part.nodes))
    ]
    if function is not _gradient:
        (part,) = found
        return part
    (part,) = (
        part
        for part in found
        if "gelu_tanh_grad" in {getattr(x.attributes, "mode", "") for x in part.nodes}
    )
    return part


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Fuse a function, unless it is a gradient of one that is."""
    return function if function is _gradient else jax_cudnn.fuse(function)


# XLA multiplies a single row of f32 in f32, and the plans do in TF32.
_CASES = [
    (name, dtype)
    for name in _PRODUCTS
    for dtype in ("bfloat16", "float16", "float32")
    if (name, dtype) != ("one row", "float32")
]


@pytest.mark.parametrize(("name", "dtype"), _CASES)
def test_every_plan_is_right(name: str, dtype: str) -> None:
    function, shapes = _PRODUCTS[name]
    operands = [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    part = _part(function, operands)
    ways = legalize(part, native.device_target(0)).candidates
    listed = [c for way in ways for c in native.candidates(to_json(way.graph))]
    if dtype != "float32":
        assert any(each.engine == native.CUBLASLT_ENGINE for each in listed)
    judge_every_plan(part)


@pytest.mark.parametrize("name", ["gelu, saved", "gelu's gradient"])
def test_auto_takes_it(name: str) -> None:
    function, shapes = _PRODUCTS[name]
    operands = [normal(i, *shape).astype("bfloat16") for i, shape in enumerate(shapes)]
    calls = plans.inspect(_fused(function), *operands).calls
    found = [each.engine for each in calls if "gelu" in each.op]
    assert found
    assert set(found) == {native.CUBLASLT_ENGINE}


_SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38, 40.0, -40.0, 3e-39]


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", None])
def test_special_values(activation: Any) -> None:
    """A bias meets them: the product is 0, or one value alone."""
    n = 16
    bias = jnp.asarray([*_SPECIAL, *range(n - len(_SPECIAL))], jnp.bfloat16)
    x, w = jnp.zeros((64, 32), jnp.bfloat16), jnp.ones((32, n), jnp.bfloat16)

    def run(implementation: Any, plan: Any) -> np.ndarray:
        options = {"implementation": implementation, "plan": plan}
        call = jax.jit(
            lambda x, w, b: jax_cudnn.matmul(
                x, w, bias=b, activation=activation, **options
            )
        )
        return np.asarray(call(x, w, bias), np.float32)

    found, wanted = run("cudnn", _BLAS), run("xla", None)
    np.testing.assert_allclose(found, wanted, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("dtypes", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")])
@pytest.mark.parametrize("layout", ["mk,nk", "mk,kn", "km,nk", "km,kn"])
def test_f8_in_every_layout(layout: str, dtypes: tuple[str, str]) -> None:
    m, k, n = 528, 256, 640
    x, w = (
        normal(i, *shape).astype(f"float8_{dtype}")
        for i, (shape, dtype) in enumerate(zip(((m, k), (k, n)), dtypes, strict=True))
    )
    wide = [np.asarray(each, np.float64) for each in (x, w)]
    truth = (wide[0] * 0.5) @ (wide[1] * 3.0)

    @jax.jit
    def run(x: Any, w: Any, s: Any, t: Any) -> Any:
        x = x.T if layout.startswith("km") else x
        w = w.T if layout.endswith("nk") else w
        return jax_cudnn.matmul(
            x, w, scale_a=s, scale_b=t, preferred_element_type=jnp.bfloat16
        )

    stored = [
        x.T if layout.startswith("km") else x,
        w.T if layout.endswith("nk") else w,
    ]
    scales = jnp.float32(0.5), jnp.float32(3.0)
    found = np.asarray(run(*stored, *scales), np.float64)
    assert np.linalg.norm(found - truth) <= 3e-3 * np.linalg.norm(truth)
    (call,) = plans.inspect(run, *stored, *scales).calls
    assert call.engine == native.CUBLASLT_ENGINE


def test_a_plan_is_kept(tmp_path: Any) -> None:
    """The algorithm is written, and read again, as other plans are."""
    function, shapes = _PRODUCTS["gelu, saved"]
    operands = [normal(i, *shape).astype("bfloat16") for i, shape in enumerate(shapes)]
    call = jax.jit(jax_cudnn.fuse(function))
    wanted = call(*operands)
    assert plans.save(tmp_path / "plans", call, *operands).plans == 1
    native.clear_cache()
    jax.clear_caches()
    plans.load(tmp_path / "plans")
    before = native.cache_stats().builds
    for x, y in zip(jax.jit(jax_cudnn.fuse(function))(*operands), wanted, strict=True):
        np.testing.assert_array_equal(x, y)
    assert native.cache_stats().builds == before


def test_gradients_of_an_mlp() -> None:
    """Under vmap, scan and remat, beside float64."""
    shapes = ((4, 96, 64), (64, 256), (1, 256), (256, 64))
    arrays = [normal(i, *shape) for i, shape in enumerate(shapes)]

    def mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
        return jax.nn.gelu(x @ w + b) @ v

    def loss(layer: Any, x: Any, w: Any, b: Any, v: Any) -> Any:
        one = jax.vmap(layer, (0, None, None, None))
        (total, _) = jax.lax.scan(
            lambda c, _: (jax.checkpoint(one)(c, w, b, v) * 0.1, None),
            x,
            None,
            length=2,
        )
        return (total.astype(jnp.float32) ** 2).sum()

    def gradients(layer: Any, dtype: Any) -> Any:
        given = [jnp.asarray(x, dtype) for x in arrays]
        every = jax.jit(jax.grad(lambda *x: loss(layer, *x), (0, 1, 2, 3)))(*given)
        return [np.asarray(x, np.float64) for x in every]

    found = gradients(jax_cudnn.fuse(mlp), jnp.bfloat16)
    beside = gradients(mlp, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        truths = gradients(mlp, jnp.float32)
    for x, y, truth in zip(found, beside, truths, strict=True):
        size = np.linalg.norm(truth)
        error, allowed = np.linalg.norm(x - truth), np.linalg.norm(y - truth)
        assert error <= 2 * allowed + 1e-3 * size


@jax_cudnn.fuse
def _gelu_mlp(x: Any, w: Any, b: Any, v: Any) -> Any:
    return jax.nn.gelu(x @ w + b) @ v


def _mlp_operands() -> list[jax.Array]:
    shapes = ((256, 128), (128, 512), (1, 512), (512, 128))
    return [
        (normal(i, *shape) * shape[0] ** -0.5).astype("bfloat16")
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("batched", ["cotangent", "x", "w", "both"])
def test_batches_of_some_operands(batched: str) -> None:
    """Gradients of an MLP where a batch has some of what enters, and XLA's."""
    x, w, *others = _mlp_operands()
    grad = normal(9, *x.shape).astype("bfloat16")
    given = {"x": x, "w": w, "cotangent": grad}
    names = ("x", "cotangent") if batched == "both" else (batched,)
    axes = [0 if name in names else None for name in given]
    for name in names:
        given[name] = jnp.stack([given[name], given[name][::-1], -given[name]])

    def gradients(mlp: Any, x: Any, w: Any, grad: Any) -> Any:
        return jax.vjp(lambda x, w: mlp(x, w, *others), x, w)[1](grad)

    def run(mlp: Any) -> list[np.ndarray]:
        call = jax.vmap(lambda *operands: gradients(mlp, *operands), axes)
        return [np.asarray(y, np.float32) for y in jax.jit(call)(*given.values())]

    plain = run(_gelu_mlp.__wrapped__)
    for found, wanted in zip(run(_gelu_mlp), plain, strict=True):
        error = np.linalg.norm(found - wanted)
        assert error <= 8e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("axes", [("n", None), (None, "n")])
def test_sharded_operands(axes: tuple[str | None, str | None]) -> None:
    """Rows or features divided among all GPUs that the process has."""
    mesh = jax.make_mesh(
        (jax.device_count(),), ("n",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    rows, features = axes
    specs = (
        jax.P(rows, None),
        jax.P(None, features),
        jax.P(None, features),
        jax.P(features, None),
    )
    operands = _mlp_operands()
    sharded = [
        jax.device_put(x, jax.NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]

    def gradients(mlp: Any, *given: jax.Array) -> Any:
        value, back = jax.vjp(mlp, *given)
        return value, *back(value)

    found = jax.jit(lambda *given: gradients(_gelu_mlp, *given))(*sharded)
    plain = jax.jit(lambda *given: gradients(_gelu_mlp.__wrapped__, *given))(*operands)
    for x, y in zip(found, plain, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float32) - np.asarray(y, np.float32))
        assert error <= 8e-3 * np.linalg.norm(np.asarray(y, np.float32))
