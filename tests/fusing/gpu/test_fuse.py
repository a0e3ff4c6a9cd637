# SPDX-License-Identifier: Apache-2.0
"""Tests fused functions on a GPU against the functions, roundings included."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import plans
from jax_cudnn.graph import label
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import traced_graphs
from tests.common.gpu.numerics import judge, to_f32
from tests.common.gpu.pinned import judge_every_plan
from tests.fusing.functions import block, conv_bn_relu, gated_mlp, normal, normed

pytestmark = pytest.mark.gpu


def _mlp_of(activation: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    def mlp(x: jax.Array, w: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
        return activation(x @ w + b[None, None]) @ v

    return mlp


_MLP_SHAPES = ((3, 40, 64), (64, 96), (96,), (96, 64))


_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "conv, batch norm, relu": (
        conv_bn_relu,
        ((4, 14, 18, 64), (3, 3, 64, 96), *((96,),) * 4),
    ),
    "matmul, bias, gelu, residual, layer norm": (
        block,
        ((3, 40, 64), (64, 96), (96,), (3, 40, 96), (96,), (96,)),
    ),
    "gated MLP": (gated_mlp, ((3, 40, 64), (64, 96), (64, 96), (96, 64))),
    "RMS norm": (normed, ((3, 40, 64), (64, 96), (96,))),
    "MLP": (_mlp_of(jax.nn.gelu), _MLP_SHAPES),
    "MLP of silu": (_mlp_of(jax.nn.silu), _MLP_SHAPES),
    "MLP of sigmoid": (_mlp_of(jax.nn.sigmoid), _MLP_SHAPES),
    "MLP of softplus": (_mlp_of(jax.nn.softplus), _MLP_SHAPES),
    "MLP of a reciprocal": (_mlp_of(lambda x: 1 / (2 + x * x)), _MLP_SHAPES),
}
# Those whose activation's gradient is within a product.
_WITHIN = ("gated MLP", "MLP", "MLP of silu", "MLP of sigmoid", "MLP of softplus")


def _operands(shapes: Any, dtype: Any) -> list[jax.Array]:
    # The last vector of a batch norm is a variance.
    drawn = [normal(i, *shape) for i, shape in enumerate(shapes)]
    drawn = [x / np.sqrt(x.shape[-2]) if x.ndim in (2, 4) else x for x in drawn]
    return [x.astype(dtype) for x in (*drawn[:-1], jnp.abs(drawn[-1]) + 0.5)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", list(_FUNCTIONS))
def test_values_and_gradients(name: str, dtype: Any) -> None:
    function, shapes = _FUNCTIONS[name]
    operands = _operands(shapes, dtype)
    fused = jax_cudnn.fuse(function, implementation="cudnn")
    cotangent = normal(50, *jax.eval_shape(function, *operands).shape).astype(dtype)
    numbers = tuple(range(len(operands)))

    def both(f: Any, operands: Any, cotangent: Any) -> list[jax.Array]:
        result, pull = jax.vjp(f, *operands)
        return [result, *pull(cotangent)]

    found, plain = (
        jax.jit(lambda *x, f=f: both(f, x, cotangent))(*operands)
        for f in (fused, function)
    )
    with jax.default_matmul_precision("highest"):
        exact = [to_f32(x) for x in operands]
        truth = both(function, exact, to_f32(cotangent))
    names = ["result", *(f"gradient {i}" for i in numbers)]
    judge(names, found, plain, truth)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", _WITHIN)
def test_every_plan_of_a_gradient_within_a_product_is_right(
    name: str, dtype: Any
) -> None:
    function, _ = _FUNCTIONS[name]
    beside = (256, 512) if name == "gated MLP" else (512,)
    operands = _operands(((2, 384, 256), (256, 512), beside, (512, 256)), dtype)
    fused = jax_cudnn.fuse(function)

    def loss(*operands: jax.Array) -> jax.Array:
        return fused(*operands).astype(jnp.float32).sum()

    (part,) = (
        part
        for graph, _, _ in traced_graphs(jax.grad(loss, (0, 1, 2, 3)), *operands)
        for part in partition(graph)
        if "_grad" in label(part) and "matmul" in label(part)
    )
    judge_every_plan(part)


@pytest.mark.parametrize("name", [n for n in _FUNCTIONS if "MLP of" not in n])
def test_all_kernels_run_in_cudnn(name: str) -> None:
    function, shapes = _FUNCTIONS[name]
    fused = jax_cudnn.fuse(function)
    report = plans.inspect(fused, *_operands(shapes, jnp.bfloat16))
    assert {call.implementation for call in report.calls} == {"cudnn"}


def test_a_norm_runs_in_cudnn_where_it_is_asked_for() -> None:
    function, shapes = _FUNCTIONS["RMS norm"]
    operands = _operands(shapes, jnp.bfloat16)
    fused = jax_cudnn.fuse(function, implementation="cudnn")

    def loss(*operands: jax.Array) -> jax.Array:
        return fused(*operands).astype(jnp.float32).sum()

    calls = plans.inspect(jax.grad(loss, (0, 1, 2)), *operands).calls
    found = {call.op for call in calls if call.implementation == "cudnn"}
    assert {"rms_norm", "rms_norm_backward"} <= found


def test_a_cast_to_16_bits_is_rounding_within_the_kernel() -> None:
    """The difference to the unrounded sums would be 0 without, by cancellation."""

    def function(x, w, exact):
        sums = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return sums.astype(jnp.bfloat16).astype(jnp.float32) - exact

    x, w = normal(0, 64, 64, dtype=jnp.bfloat16), normal(1, 64, 96, dtype=jnp.bfloat16)
    exact = jnp.matmul(to_f32(x), to_f32(w), precision="highest")
    fused = jax_cudnn.fuse(function, implementation="cudnn")
    assert [k.op for k in fused.explain(x, w, exact).kernels] == ["matmul+sub"]
    lost = np.asarray(exact.astype(jnp.bfloat16).astype(jnp.float32) - exact)
    found = np.asarray(fused(x, w, exact))
    # Sums near a boundary of rounding may fall on its other side.
    assert np.mean(np.abs(found - lost) < 1e-3) > 0.98
    assert np.std(found) > 0.5 * np.std(lost) > 0


def test_results_of_16_bits_are_rounded_before_what_follows() -> None:
    def function(x, w, exact):
        return (x @ w).astype(jnp.float32) - exact

    x, w = normal(0, 64, 64, dtype=jnp.bfloat16), normal(1, 64, 96, dtype=jnp.bfloat16)
    exact = jnp.matmul(to_f32(x), to_f32(w), precision="highest")
    fused = jax_cudnn.fuse(function, implementation="cudnn")
    lost = np.asarray(exact.astype(jnp.bfloat16).astype(jnp.float32) - exact)
    found = np.asarray(fused(x, w, exact))
    assert np.mean(np.abs(found - lost) < 1e-3) > 0.98


def test_wide_sums_keep_their_digits() -> None:
    def function(x, w, exact):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32) - exact

    x, w = normal(0, 64, 64, dtype=jnp.bfloat16), normal(1, 64, 96, dtype=jnp.bfloat16)
    exact = jnp.matmul(to_f32(x), to_f32(w), precision="highest")
    for implementation in ("cudnn", "xla"):
        fused = jax_cudnn.fuse(function, implementation=implementation)
        assert np.max(np.abs(fused(x, w, exact))) < 1e-3, implementation


def test_several_results_and_other_orders() -> None:
    def function(x, w, b):
        h = x @ w + b[None, :]
        return h, jax.nn.relu(h).T, jnp.sum(h * h)

    x, w, b = normal(0, 48, 64), normal(1, 64, 96), normal(2, 96)
    operands = [x.astype(jnp.bfloat16), (w / 8).astype(jnp.bfloat16)]
    operands.append(b.astype(jnp.bfloat16))
    found = jax_cudnn.fuse(function, implementation="cudnn")(*operands)
    plain = jax.jit(function)(*operands)
    with jax.default_matmul_precision("highest"):
        truth = function(*map(to_f32, operands))
    judge(("h", "relu", "sum"), found, plain, truth)


@pytest.mark.parametrize("note", ["required_notes", "refused_notes"])
def test_engines_of_both_kinds(note: str) -> None:
    options = plans.PlanOptions(**{note: ("RUNTIME_COMPILATION",)})

    @jax_cudnn.fuse(strict=True, plan=options, implementation="cudnn")
    def product(a, b):
        return jnp.einsum("bmk,bkn->bmn", a, b)

    a = normal(0, 4, 64, 128, dtype=jnp.float16)
    b = normal(1, 4, 128, 64, dtype=jnp.float16)
    truth = jnp.matmul(to_f32(a), to_f32(b), precision="highest")
    judge(("product",), (product(a, b),), (jnp.matmul(a, b),), (truth,))
    (call,) = plans.inspect(product, a, b).calls
    has_note = "RUNTIME_COMPILATION" in call.behavior_notes
    assert has_note == (note == "required_notes")


def test_vmap_and_shared_weights() -> None:
    fused = jax_cudnn.fuse(
        lambda x, w: jax.nn.silu(x @ w), implementation="cudnn", strict=True
    )
    x, w = normal(0, 3, 16, 64), normal(1, 64, 96) / 8
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    found = jax.vmap(fused, (0, None))(x, w)
    plain = jax.nn.silu(x @ w)
    truth = jax.nn.silu(jnp.matmul(to_f32(x), to_f32(w), precision="highest"))
    judge(("result",), (found,), (plain,), (truth,))
