# SPDX-License-Identifier: Apache-2.0
"""Tests residual branches: act(branch_scale * (product + bias) + residual)."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import conv, matmul, plans
from tests.common import drawn

pytestmark = pytest.mark.sampled

_CONV: dict[str, Any] = {"padding": "SAME", "dimension_numbers": "NHWC"}
# Of a matmul (2, 5, 7) and a convolution (2, 5, 4, 7): one for all, per feature, per
# example, per example and feature, and per element.
_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "matmul": [(), (7,), (2, 1, 1), (2, 1, 7), (2, 5, 7)],
    "conv": [(), (7,), (2, 1, 1, 1), (2, 1, 1, 7), (2, 5, 4, 7)],
}


def _normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return drawn.normal(seed, shape).astype(dtype)


def _operands(op: str, scale: tuple[int, ...], dtype: Any) -> dict[str, jax.Array]:
    if op == "matmul":
        shapes = {"a": (2, 5, 3), "b": (3, 7), "residual": (2, 5, 7)}
    else:
        shapes = {"a": (2, 5, 4, 3), "b": (3, 3, 3, 7), "residual": (2, 5, 4, 7)}
    shapes |= {"bias": (7,), "branch_scale": scale}
    every = enumerate(sorted(shapes.items()))
    return {name: _normal(i, *shape, dtype=dtype) for i, (name, shape) in every}


def _ours(op: str, operands: dict[str, Any], **options: Any) -> jax.Array:
    rest = {k: v for k, v in operands.items() if k not in ("a", "b")} | options
    if op == "matmul":
        return matmul(operands["a"], operands["b"], **rest)
    return conv(operands["a"], operands["b"], **_CONV, **rest)


def _plain(op: str, operands: dict[str, Any], act: Any = None) -> jax.Array:
    a, b = operands["a"], operands["b"]
    if op == "matmul":
        y = a @ b
    else:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            a, b, (1, 1), "SAME", dimension_numbers=numbers
        )
    bias, scale, residual = (
        jnp.broadcast_to(jnp.asarray(operands[name], y.dtype), y.shape)
        for name in ("bias", "branch_scale", "residual")
    )
    y = scale * (y + bias) + residual
    return y if act is None else act(y)


_CASES = [(op, shape) for op, shapes in _SHAPES.items() for shape in shapes]
_by_case = pytest.mark.parametrize(("op", "shape"), _CASES, ids=str)


@_by_case
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_and_gradients(
    op: str, shape: tuple[int, ...], activation: Any, dtype: str
) -> None:
    act = jax.nn.silu if activation else None
    tolerance = 1e-12 if dtype == "float64" else 2e-5
    with jax.enable_x64(dtype == "float64"):
        operands = _operands(op, shape, dtype)
        grad = _normal(9, *operands["residual"].shape, dtype=dtype)
        run = functools.partial(_ours, op, activation=activation)
        y, back = jax.vjp(run, operands)
        wanted, plain_back = jax.vjp(lambda x: _plain(op, x, act), operands)
        found, others = (y, *back(grad)), (wanted, *plain_back(grad))
        for x, other in zip(
            jax.tree.leaves(found), jax.tree.leaves(others), strict=True
        ):
            assert (x.shape, x.dtype) == (other.shape, other.dtype)
            scale = np.abs(other).max()
            np.testing.assert_allclose(x, other, atol=tolerance * scale)
        # Forward mode agrees with reverse mode.
        tangents = {k: _normal(20 + i, *v.shape, dtype=dtype)
                    for i, (k, v) in enumerate(operands.items())}  # fmt: skip
        moved = jax.jvp(run, (operands,), (tangents,))[1]
        (by,) = back(grad)
        total = sum(jnp.vdot(by[k], tangents[k]) for k in operands)
        np.testing.assert_allclose(jnp.vdot(moved, grad), total, rtol=300 * tolerance)


@_by_case
@pytest.mark.parametrize(
    "mapped", [("branch_scale",), ("a", "residual"), ("bias", "b")]
)
def test_under_vmap(op: str, shape: tuple[int, ...], mapped: tuple[str, ...]) -> None:
    operands = _operands(op, shape, jnp.float32)
    axes = {name: 0 if name in mapped else None for name in operands}
    for name in mapped:
        operands[name] = jnp.stack([operands[name], -2 * operands[name]])

    def gradients(operands: Any) -> Any:
        y, back = jax.vjp(functools.partial(_ours, op, activation="gelu"), operands)
        return y, back(y)

    found = jax.jit(jax.vmap(gradients, (axes,)))(operands)
    for i in range(2):
        one = {k: v[i] if k in mapped else v for k, v in operands.items()}
        for x, y in zip(
            jax.tree.leaves(found), jax.tree.leaves(gradients(one)), strict=True
        ):
            np.testing.assert_allclose(x[i], y, atol=3e-5 * np.abs(y).max())


@pytest.mark.parametrize("op", _SHAPES)
def test_a_number_and_what_is_left_out(op: str) -> None:
    operands = _operands(op, (), jnp.float32)
    wanted = _plain(op, operands | {"branch_scale": 0.25})
    found = _ours(op, operands | {"branch_scale": 0.25})
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    without = {k: v for k, v in operands.items() if k not in ("bias", "residual")}
    other = _plain(op, operands | {"bias": 0.0, "residual": 0.0})
    np.testing.assert_allclose(_ours(op, without), other, rtol=1e-4, atol=1e-5)


def test_all_factors_together() -> None:
    operands = _operands("matmul", (7,), jnp.float32)
    found = _ours("matmul", operands, scale_a=2.0, scale_out=-3.0, activation="tanh")
    doubled = _plain("matmul", operands | {"b": 2.0 * operands["b"]}, jnp.tanh)
    np.testing.assert_allclose(found, -3.0 * doubled, rtol=1e-4, atol=1e-5)
    images = _operands("conv", (7,), jnp.float32)
    whole = _ours("conv", images, scale=0.5)
    halved = _plain("conv", images | {"b": images["b"] / 2})
    np.testing.assert_allclose(whole, halved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", _SHAPES)
def test_integers_and_complex_numbers(op: str) -> None:
    """They have no graph, and the same meaning."""
    for dtype in (jnp.int32, jnp.complex64):
        operands = _operands(op, (7,), jnp.float32)
        operands = {k: (4 * v).astype(dtype) for k, v in operands.items()}
        found = _ours(op, operands)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, _plain(op, operands), rtol=1e-5)


@pytest.mark.parametrize("op", _SHAPES)
def test_it_is_one_kernel(op: str) -> None:
    operands = _operands(op, (7,), jnp.bfloat16)
    (call,) = plans.inspect(functools.partial(_ours, op), operands).calls
    assert call.op.endswith("+add+mul+add")


def test_stochastic_depth_drops_whole_examples() -> None:
    operands = _operands("matmul", (2, 1, 1), jnp.float32)
    operands["branch_scale"] = jnp.array([0.0, 2.0]).reshape(2, 1, 1)
    found = _ours("matmul", operands)
    np.testing.assert_array_equal(found[0], operands["residual"][0])


_BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shape": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((3, 7)), branch_scale=jnp.ones(5)),
        ValueError,
        "matmul: branch_scale is f32[5]",
    ),
    "shape of images": (
        lambda: conv(
            *(jnp.ones((2, 5, 4, 3)), jnp.ones((3, 3, 3, 7))),
            **_CONV,
            branch_scale=jnp.ones(5),
        ),
        ValueError,
        "conv: branch_scale is f32[5]",
    ),
    "number": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((3, 7)), branch_scale=np.inf),
        ValueError,
        "branch_scale",
    ),
    "text": (
        lambda: matmul(jnp.ones((2, 3)), jnp.ones((3, 7)), branch_scale="gate"),  # type: ignore[arg-type]
        TypeError,
        "matmul: branch_scale",
    ),
    "complex": (
        lambda: matmul(
            jnp.ones((2, 3)), jnp.ones((3, 7)), branch_scale=jnp.ones(7, complex)
        ),
        TypeError,
        "branch_scale is",
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_messages(name: str) -> None:
    call, kind, message = _BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()
