# SPDX-License-Identifier: Apache-2.0
"""Tests that arrays enter and leave the primitives with all their axes.

Merging axes before the primitive would gather one that is sharded over devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn.graph import Tensor
from jax_cudnn.lowering.primitives import graph_p, run_graph
from jax_cudnn.lowering.sharding.subaxes import subaxes_of

pytestmark = pytest.mark.once


def _tensor(*dims: int, order: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(
        name="x", dtype="f32", dims=dims, order=order or tuple(range(len(dims)))
    )


@pytest.mark.parametrize(
    ("tensor", "shape", "subaxes"),
    [
        (_tensor(1, 15, 8), (5, 3, 8), ((1,), (5, 3), (8,))),
        (_tensor(1, 15, 8), (1, 5, 1, 3, 8, 1), ((1,), (5, 3), (8,))),
        (_tensor(1, 15, 8), (15, 8), ((1,), (15,), (8,))),
        (_tensor(15, 1, 8, order=(2, 0, 1)), (2, 4, 5, 3), ((2, 4), (5, 3), (1,))),
        (_tensor(4, 6), (2, 12), None),
        (_tensor(4, 6), (4, 6, 2), None),
        (_tensor(4, 6), (4, 2), None),
        (_tensor(0, 6), (0, 2, 3), ((0,), (6,))),
        (_tensor(1, 1), (), ((1,), (1,))),
    ],
)
def test_subaxes_are_read_from_the_shape(
    tensor: Tensor, shape: tuple[int, ...], subaxes: Any
) -> None:
    assert subaxes_of(tensor, shape) == subaxes


def _shapes(function: Any, *arrays: jax.Array) -> list[Any]:
    """Return the shapes of the operands and the result of each graph."""
    jaxpr = jax.jit(function).trace(*arrays).jaxpr
    return [
        ([x.aval.shape for x in eqn.invars], eqn.outvars[0].aval.shape)
        for eqn in jaxpr.eqns
        if eqn.primitive is graph_p
    ]


def _normal(*shape: int) -> jax.Array:
    rng = np.random.default_rng(len(shape))
    return jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.float32))


def test_rows_of_several_axes_are_not_merged() -> None:
    x, w, bias = _normal(5, 3, 8), _normal(8, 6), _normal(6)

    def run(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(x, w, bias=bias, activation="silu")

    assert _shapes(run, x, w, bias) == [
        ([(1, 5, 3, 8), (1, 8, 6), (1, 1, 6)], (1, 5, 3, 6))
    ]
    want = jax.nn.silu(x @ w + bias[None, None])
    np.testing.assert_allclose(run(x, w, bias), want, rtol=2e-5, atol=1e-5)


def test_gradients_keep_the_axes_too() -> None:
    x, w = _normal(5, 3, 8), _normal(8, 6)
    cotangent = _normal(5, 3, 6)

    def gradients(*operands: jax.Array) -> Any:
        return jax.vjp(jax_cudnn.matmul, *operands)[1](cotangent)

    backward = _shapes(gradients, x, w)[-1]
    assert set(backward[0]) == {(1, 5, 3, 8), (1, 8, 6), (1, 5, 3, 6)}
    for got, want in zip(
        gradients(x, w), jax.vjp(jnp.matmul, x, w)[1](cotangent), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_examples_of_vmaps_are_members_of_the_batch() -> None:
    q, k = _normal(2, 3, 4, 5, 6, 7), _normal(3, 4, 8, 2, 7)

    def run(q: jax.Array, k: jax.Array) -> jax.Array:
        def one(q: jax.Array, k: jax.Array) -> jax.Array:
            return jax_cudnn.sdpa(q, k, k)

        return jax.vmap(jax.vmap(one), in_axes=(0, None))(q, k)

    # The second vmap broadcasts what it shares: attention's batch is one size.
    ((operands, result),) = _shapes(run, q, k)
    assert operands == [(2, 3, 4, 5, 6, 7), *[(2, 3, 4, 8, 2, 7)] * 2]
    assert result == (2, 3, 4, 5, 6, 7)
    flat_k = k.reshape(12, 8, 2, 7)
    want = [jax_cudnn.sdpa(each.reshape(12, 5, 6, 7), flat_k, flat_k) for each in q]
    want = jnp.stack(want)
    np.testing.assert_allclose(run(q, k), want.reshape(result), rtol=2e-5, atol=1e-5)


def test_operands_that_disagree_are_merged() -> None:
    x, w, residual = _normal(2, 6, 8), _normal(8, 6), _normal(2, 6, 6)

    def run(*operands: jax.Array) -> jax.Array:
        return jax_cudnn.matmul(*operands[:2], residual=operands[2])

    jaxpr = jax.jit(run).trace(x, w, residual).jaxpr
    (params,) = (eqn.params for eqn in jaxpr.eqns if eqn.primitive is graph_p)
    flat = residual.reshape(12, 6)
    (result,) = run_graph(params["graph"], [x, w, flat], params["options"])
    want = (x @ w + residual).reshape(1, 12, 6)
    np.testing.assert_allclose(result, want, rtol=2e-5, atol=1e-5)
