# SPDX-License-Identifier: Apache-2.0
"""Tests that `fuse` finds norms that are written out, and no others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn import UnsupportedError, choices, fuse, plans
from jax_cudnn.choices import Choice, Key
from jax_cudnn.lowering import scoped, traced_graphs
from tests.fusing.functions import block, normal

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_B16, _F16 = jnp.bfloat16, jnp.float16
_X, _S, _T = normal(0, 3, 5, 12) + 0.5, normal(1, 12), normal(2, 12)


def _row(v):
    return v[None, None, :]


def _layer(x, s, t):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * _row(s) + _row(t)


def _of_var(x, s, t):
    mean, variance = x.mean(-1), x.var(-1)
    return (x - mean[..., None]) / jnp.sqrt(variance[..., None] + 1e-5) * _row(s)


def _of_sums(x, s, t):
    mean = jnp.sum(x, 2) / 12.0
    centred = x - mean.reshape(3, 5, 1)
    variance = jnp.sum(centred * centred, axis=2, keepdims=True) / 12.0
    return _row(t) + _row(s) * (centred * (variance + 1e-5) ** -0.5)


def _rms(x, s, t):
    wide = x.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (_row(1.0 + s.astype(jnp.float32)) * (wide / rms)).astype(x.dtype)


def _llama(x, s, t):
    """An RMS norm that is rounded before the weights."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return _row(s) * (wide * inverse).astype(x.dtype)


def _flax(layer: Any) -> Callable[..., Any]:
    def run(x, s, t):
        parameters = nnx.state(layer, nnx.Param)
        parameters["scale"] = nnx.Param(s)
        if "bias" in parameters:
            parameters["bias"] = nnx.Param(t)
        # Flax mixes 16 bits with f32.
        with jax.numpy_dtype_promotion("standard"):
            return nnx.merge(nnx.graphdef(layer), parameters)(x)

    return run


def _linen(layer: Any) -> Callable[..., Any]:
    def run(x, s, t):
        with jax.numpy_dtype_promotion("standard"):
            return layer.apply({"params": {"scale": s, "bias": t}}, x)

    return run


class _Case(NamedTuple):
    function: Callable[..., Any]
    kind: str
    x: jax.Array = _X
    scale: jax.Array = _S
    bias: jax.Array = _T
    roles: tuple[str, ...] = ("x", "scale", "bias")


_X16, _S16, _T16 = _X.astype(_B16), _S.astype(_B16), _T.astype(_B16)
_RNGS = nnx.Rngs(0)
_CASES = {
    "two passes": _Case(_layer, "layer_norm"),
    "jnp.var": _Case(_of_var, "layer_norm", roles=("x", "scale")),
    "sums and powers": _Case(_of_sums, "layer_norm"),
    "nnx.LayerNorm": _Case(_flax(nnx.LayerNorm(12, rngs=_RNGS)), "layer_norm"),
    "nnx.LayerNorm of bf16": _Case(
        _flax(nnx.LayerNorm(12, dtype=_B16, use_fast_variance=False, rngs=_RNGS)),
        "layer_norm",
        x=_X16,
    ),
    "linen.LayerNorm of f16": _Case(
        _linen(linen.LayerNorm(dtype=_F16)), "layer_norm", x=_X.astype(_F16)
    ),
    "nnx.RMSNorm": _Case(
        _flax(nnx.RMSNorm(12, rngs=_RNGS)), "rms_norm", roles=("x", "scale")
    ),
    "Gemma": _Case(
        _rms, "rms_norm", x=_X16, scale=_S16, bias=_T16, roles=("x", "scale")
    ),
    "Llama": _Case(_llama, "rms_norm", x=_X16, scale=_S16, roles=("x",)),
    "jax.nn.standardize": _Case(
        lambda x, s, t: jax.nn.standardize(x, epsilon=1e-3) * _row(s) + _row(t),
        "layer_norm",
    ),
    "two axes": _Case(
        lambda x, s, t: (
            (x - x.mean((1, 2), keepdims=True))
            / jnp.sqrt(x.var((1, 2))[:, None, None] + 0.1)
        ),
        "layer_norm",
        roles=("x",),
    ),
}
_NAMES = [pytest.param(case, id=name) for name, case in _CASES.items()]


def _operands(case: _Case) -> tuple[jax.Array, ...]:
    return case.x, case.scale, case.bias


def _cudnn(function: Callable[..., Any], **how: Any) -> Any:
    return fuse(function, implementation="cudnn", **how)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def _close(found: Any, wanted: Any, dtype: Any) -> None:
    """Compare with a last digit of the dtype between them, of the largest number."""
    step = 1e-5 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        size = max(1.0, float(np.max(np.abs(_wide(y)), initial=0)))
        np.testing.assert_allclose(_wide(x), _wide(y), rtol=step, atol=step * size)


@pytest.mark.parametrize("case", _NAMES)
def test_written_norms_are_graphs_of_the_same_meaning(case: _Case) -> None:
    fused = _cudnn(case.function)
    explained = fused.explain(*_operands(case))
    (kernel,) = explained.kernels
    assert kernel.op == case.kind
    roles = dict(kernel.graph.nodes[0].inputs)
    assert roles.keys() == set(case.roles)
    assert (
        kernel.graph.tensor(roles["x"]).dtype
        == {
            "bfloat16": "bf16",
            "float16": "f16",
            "float32": "f32",
        }[str(case.x.dtype)]
    )
    _close(fused(*_operands(case)), case.function(*_operands(case)), case.x.dtype)
    cotangent = normal(9, *case.x.shape).astype(
        jax.eval_shape(case.function, *_operands(case)).dtype
    )
    found, wanted = (
        jax.vjp(f, *_operands(case))[1](cotangent) for f in (fused, case.function)
    )
    _close(found, wanted, case.x.dtype)


@pytest.mark.parametrize("name", ["two passes", "nnx.LayerNorm", "Gemma"])
def test_by_default_the_function_is_as_it_was(name: str) -> None:
    case = _CASES[name]
    explained = fuse(case.function).explain(*_operands(case))
    assert not explained.kernels
    assert "until cuDNN was measured to be faster" in explained.left[-1].reason
    jaxpr = jax.make_jaxpr(fuse(case.function))(*_operands(case))
    assert "cudnn_graph" not in str(jaxpr)
    found, wanted = (
        jax.jit(f)(*_operands(case)) for f in (fuse(case.function), case.function)
    )
    np.testing.assert_array_equal(_wide(found), _wide(wanted))
    assert (
        not fuse(case.function, implementation="xla").explain(*_operands(case)).kernels
    )


def test_numpy_in_float64() -> None:
    x, s, t = (np.asarray(v, np.float64) for v in (_X, _S, _T))
    centred = x - x.mean(-1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * s + t
    np.testing.assert_allclose(
        _cudnn(_of_sums)(_X, _S, _T), wanted, rtol=1e-5, atol=1e-5
    )


def test_finite_differences_tangents_and_examples() -> None:
    fused = _cudnn(_rms)
    check_grads(lambda x, s: fused(x, s, _T), (_X, _S), order=1, atol=0.02, rtol=0.02)
    tangents = normal(3, *_X.shape), normal(4, 12), normal(5, 12)
    cotangent = normal(6, *_X.shape)
    _, moved = jax.jvp(fused, (_X, _S, _T), tangents)
    pulled = jax.vjp(fused, _X, _S, _T)[1](cotangent)
    along = sum(jnp.vdot(g, v) for g, v in zip(pulled, tangents, strict=True))
    np.testing.assert_allclose(jnp.vdot(moved, cotangent), along, rtol=1e-4)
    for axes in ((1, None, None), (0, 1, None)):
        examples = [
            v if a is None else jnp.stack([v, -2.0 * v, v + 1.0], a)
            for v, a in zip((_X, _S, _T), axes, strict=True)
        ]
        found, wanted = (jax.jit(jax.vmap(f, axes))(*examples) for f in (fused, _rms))
        _close(found, wanted, jnp.float32)


@pytest.mark.parametrize("number", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ["sums and powers", "nnx.LayerNorm", "nnx.RMSNorm"])
def test_odd_numbers(name: str, number: float) -> None:
    case = _CASES[name]
    operands = (_X.at[1, 2, 3].set(number).at[2, 1].set(0.0), _S, _T)
    found, wanted = (f(*operands) for f in (_cudnn(case.function), case.function))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# --- what is no norm of cuDNN's -------------------------------------------------------


def _unequal_axes(x, s, t):
    mean, variance = x.mean(-1, keepdims=True), x.var((1, 2), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


def _columns_of_a_square(x, s, t):
    """The statistics of rows, which are subtracted from columns."""
    x = x[0] @ x[1].T
    mean = x.mean(1)
    variance = ((x - mean[:, None]) ** 2).mean(1)
    return (x - mean[:, None]) * jax.lax.rsqrt(variance + 1e-5)[None, :]


def _read_elsewhere(x, s, t):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5), mean


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x, s, t: _layer(x.astype(_B16), s.astype(_B16), t.astype(_B16)),
            "bf16",
        ),
        (
            lambda x, s, t: (
                (x - x.mean(1, keepdims=True))
                / jnp.sqrt(x.var(1, keepdims=True) + 1e-5)
            ),
            "other axes than the last",
        ),
        (_read_elsewhere, "other operations read"),
        (_unequal_axes, ""),
        (_columns_of_a_square, ""),
        (
            lambda x, s, t: (
                (x - x.mean(-1, keepdims=True))
                / jnp.sqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5)
            ),
            "",
        ),
        (
            lambda x, s, t: (
                (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
            ),
            "",
        ),
        (
            lambda x, s, t: (
                (x - 2.0 * x.mean(-1, keepdims=True))
                / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            ),
            "",
        ),
        (
            lambda x, s, t: (
                (x * 2.0) / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
            ),
            "",
        ),
        (lambda x, s, t: x / jnp.sqrt((x * x).mean(-1, keepdims=True) - 1e-5), ""),
        (
            lambda x, s, t: (
                x / jnp.sqrt((x * x).mean(-1, keepdims=True) + _row(t)[..., :1] ** 2)
            ),
            "",
        ),
        (lambda x, s, t: x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-5), ""),
        (lambda x, s, t: x * ((x * x).mean(-1, keepdims=True) + 1e-5) ** -1.0, ""),
    ],
)
def test_others_are_left_alone(function: Callable[..., Any], reason: str) -> None:
    explained = _cudnn(function).explain(_X, _S, _T)
    assert all("norm" not in kernel.op for kernel in explained.kernels)
    if reason:
        assert any(reason in each.reason for each in explained.left), explained
    found, wanted = (f(_X, _S, _T) for f in (_cudnn(function), function))
    _close(found, wanted, jnp.float32)


def test_a_scale_that_is_read_twice_ends_the_norm() -> None:
    def function(x, s, t):
        normed = jax.nn.standardize(x)
        return normed * _row(s), normed * _row(t)

    explained = _cudnn(function).explain(_X, _S, _T)
    assert [kernel.op for kernel in explained.kernels] == ["layer_norm"]
    assert [each.name for each in explained.left].count("mul") == 2
    found, wanted = (f(_X, _S, _T) for f in (_cudnn(function), function))
    _close(found, wanted, jnp.float32)


def test_a_norm_between_two_products() -> None:
    def function(x, w, s, t, v):
        return jax.nn.gelu(_layer(x @ w, s, t) @ v)

    operands = _X, normal(3, 12, 12), _S, _T, normal(4, 12, 8)
    fused = _cudnn(function)
    explained = fused.explain(*operands)
    ops = ["matmul", "layer_norm", "matmul+gelu_tanh"]
    assert [kernel.op for kernel in explained.kernels] == ops
    assert sum("subgraph" in line for line in explained.mermaid().splitlines()) == 3
    assert "kernel 2: layer_norm(f32[15,12], f32[1,12], f32[1,12])" in str(explained)
    _close(fused(*operands), function(*operands), jnp.float32)
    numbers = tuple(range(5))
    ops = [
        call.op
        for call in plans.inspect(
            jax.grad(lambda *a: fused(*a).sum(), numbers), *operands
        ).calls
    ]
    assert "layer_norm_backward" in ops


# --- who decides ----------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> choices.ChoiceTable:
    made = choices.ChoiceTable()
    monkeypatch.setattr(choices, "table", lambda: made)
    return made


def _graphs(function: Any, *operands: Any) -> list[str]:
    return [traced.op for traced in traced_graphs(function, *operands)]


def test_a_measured_norm_is_a_graph(table: choices.ChoiceTable) -> None:
    fused = fuse(_layer)
    assert not _graphs(lambda *a: fuse(_layer)(*a), _X, _S, _T)
    slow = Choice(op="layer_norm", operands="f32[64,12]", implementation="xla")
    table.add({Key("H200", 91900, "0"): slow})
    assert not fuse(_layer).explain(_X, _S, _T).kernels
    fast = Choice(
        op="layer_norm_backward", operands="f32[64,12], f32", implementation="cudnn"
    )
    table.add({Key("H200", 91900, "1"): fast})
    assert _graphs(lambda *a: fuse(_layer)(*a), _X, _S, _T) == ["layer_norm"]
    assert not fuse(_rms).explain(_X, _S, _T).kernels
    assert fused.explain(_X, _S, _T).kernels


def test_norms_are_offered_while_plans_are_measured() -> None:
    fused = fuse(_layer)
    fused(_X, _S, _T)
    with scoped(tuner=lambda graph, options: None):
        assert _graphs(fused, _X, _S, _T) == ["layer_norm"]
    assert not _graphs(fused, _X, _S, _T)
    with plans.using(implementation="cudnn"):
        assert _graphs(fused, _X, _S, _T) == ["layer_norm"]


def test_autotune_measures_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    class Tuner:
        def __init__(self, **_: Any) -> None:
            self.tuning = plans.Tuning(device="none")

        def tune_program(self, traced: Any) -> None:
            taken.extend(
                part.nodes[0].kind for each in traced.graphs for part in each.parts
            )

        def finish(self) -> None:
            pass

    monkeypatch.setattr("jax_cudnn.plans.tuning._Tuner", Tuner)
    plans.autotune(jax.grad(lambda x: fuse(_layer)(x, _S, _T).sum()), _X)
    assert taken == ["layer_norm", "layer_norm_backward"]


def test_strict_takes_one_norm() -> None:
    fused = fuse(_layer, strict=True)
    _close(fused(_X, _S, _T), _layer(_X, _S, _T), jnp.float32)
    (kernel,) = fused.explain(_X, _S, _T).kernels
    assert kernel.op == "layer_norm"
    twice = fuse(lambda x, s, t: _layer(_layer(x, s, t), s, t), strict=True)
    told = r"layer_norm\(f32\[3,5,12\], .* begins another one: .* or one norm"
    with pytest.raises(UnsupportedError, match=told):
        twice(_X, _S, _T)
    with pytest.raises(UnsupportedError, match="rounded to bf16 on the way"):
        fuse(_layer, strict=True)(_X16, _S16, _T16)


# --- calls of this package's ----------------------------------------------------------


def test_calls_of_this_package_are_kernels_as_they_are() -> None:
    def function(x, w, s):
        h = jax_cudnn.rms_norm(jnp.tanh(x @ w), s, implementation="cudnn")
        return jax_cudnn.matmul(h, w) + 1.0

    operands = _X, normal(3, 12, 12), _S
    explained = fuse(function).explain(*operands)
    ops = ["matmul+tanh", "rms_norm", "matmul"]
    assert [kernel.op for kernel in explained.kernels] == ops
    _close(fuse(function)(*operands), function(*operands), jnp.float32)
    implementations = [
        traced.options.implementation
        for traced in traced_graphs(fuse(function), *operands)
    ]
    assert implementations == ["auto", "cudnn", "auto"]
    strict = fuse(lambda x, s: jax_cudnn.layer_norm(x, s), strict=True)
    _close(strict(_X, _S), jax_cudnn.layer_norm(_X, _S), jnp.float32)


def test_a_block_is_two_kernels() -> None:
    shapes = (2, 5, 8), (8, 12), (12,), (2, 5, 12), (12,), (12,)
    operands = [normal(i, *shape) for i, shape in enumerate(shapes)]
    ops = [kernel.op for kernel in _cudnn(block).explain(*operands).kernels]
    assert ops == ["matmul+add+gelu_erf+add", "layer_norm"]
    explained = _cudnn(lambda *a: jnp.tanh(block(*a))).explain(*operands)
    assert "take nothing of what follows" in explained.left[-1].reason
