# SPDX-License-Identifier: Apache-2.0
"""Tests norms in the places that blocks have them, against Flax and plain formulas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from tests.common import drawn

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_ROWS, _WIDTH, _HIDDEN = 10, 24, 40


def _drawn() -> dict[str, jax.Array]:
    shapes = {
        "x": (_ROWS, _WIDTH),
        "hidden": (_ROWS, _HIDDEN),
        "matrix": (_HIDDEN, _WIDTH),
        "first": (_WIDTH,),
        "second": (_WIDTH,),
        "gate": (_WIDTH,),
    }
    return {
        name: drawn.normal(i, shape) for i, (name, shape) in enumerate(shapes.items())
    }


def _rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    rstd = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x * rstd * scale[None]


def _layer(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    norm = nnx.LayerNorm(_WIDTH, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = scale, bias
    return norm(x)


def _ours_after(
    x: Any, hidden: Any, matrix: Any, first: Any, second: Any, gate: Any
) -> Any:
    total = jax_cudnn.matmul(hidden, matrix, branch_scale=gate, residual=x)
    return jax_cudnn.layer_norm(total, first, second)


def _flax_after(
    x: Any, hidden: Any, matrix: Any, first: Any, second: Any, gate: Any
) -> Any:
    return _layer(x + gate[None] * (hidden @ matrix), first, second)


def _ours_around(
    x: Any, hidden: Any, matrix: Any, first: Any, second: Any, gate: Any
) -> Any:
    inner = jax_cudnn.rms_norm(jax_cudnn.matmul(hidden, matrix), first)
    return jax_cudnn.rms_norm(inner, 1 + second, residual=x, activation=None)


def _plain_around(
    x: Any, hidden: Any, matrix: Any, first: Any, second: Any, gate: Any
) -> Any:
    total = x + _rms(hidden @ matrix, first)
    return _rms(total, 1 + second), total


@pytest.mark.parametrize(
    ("ours", "plain"),
    [(_ours_after, _flax_after), (_ours_around, _plain_around)],
    ids=["post-norm", "sandwich norm"],
)
def test_blocks_are_what_flax_and_formulas_compute(
    ours: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    operands = _drawn()
    found, wanted = (
        jax.tree.leaves(jax.jit(each)(**operands)) for each in (ours, plain)
    )
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)

    def loss(function: Callable[..., Any], operands: dict[str, jax.Array]) -> jax.Array:
        leaves = jax.tree.leaves(function(**operands))
        return sum((jnp.sum(jnp.sin(x)) for x in leaves), jnp.zeros(()))

    gradients = [jax.grad(lambda x, f=f: loss(f, x))(operands) for f in (ours, plain)]
    for name in operands:
        got, want = (each[name] for each in gradients)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4, err_msg=name)


def test_one_plus_w_is_what_gemma_computes() -> None:
    """In bf16, 1 + w would round a small w away."""
    drawn = _drawn()
    x = drawn["x"].astype(jnp.bfloat16)
    w = (drawn["gate"] * 2.0**-9).astype(jnp.bfloat16)
    wide, scale = x.astype(jnp.float32), 1 + w.astype(jnp.float32)
    found = jax_cudnn.rms_norm(x, scale, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(found, _rms(wide, scale), rtol=1e-5, atol=1e-5)
    rounded = _rms(wide, (1 + w).astype(jnp.float32))
    assert float(jnp.max(jnp.abs(found - rounded))) > 1e-3
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    norm = nnx.RMSNorm(_WIDTH, rngs=nnx.Rngs(0))
    norm.scale[...] = scale
    np.testing.assert_allclose(found, norm(wide), rtol=1e-5, atol=1e-5)

    def loss(w: jax.Array, norm: Callable[..., jax.Array]) -> jax.Array:
        return jnp.sum(jnp.sin(norm(wide, 1 + w.astype(jnp.float32))))

    small = w.astype(jnp.float32)
    ours, plain = (jax.grad(loss)(small, each) for each in (jax_cudnn.rms_norm, _rms))
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)
