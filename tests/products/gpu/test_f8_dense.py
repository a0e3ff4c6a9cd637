# SPDX-License-Identifier: Apache-2.0
"""Tests layers in f8 on a GPU: beside float64 of the rounded, and who multiplies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import checkpoint_policies, f8, plans
from tests.products.shared.f8_dense import ULP, close, normal, truth

pytestmark = pytest.mark.gpu

_SIZES = [(256, 512, 384), (77, 131, 251), (1024, 64, 4096), (16, 16, 16), (1, 48, 7)]
# Sums of f8 kernels are not kept in f32 to the last bit (Hopper adds in fewer).
_SUMS = 3e-3


@pytest.mark.parametrize("dtype", list(ULP))
@pytest.mark.parametrize("sizes", _SIZES, ids=str)
@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_products_are_those_of_the_rounded(
    dtype: str, sizes: tuple[int, int, int], implementation: Any
) -> None:
    m, k, n = sizes
    x = normal(0, m, k).astype(dtype)
    w = (normal(1, k, n) / np.sqrt(k)).astype(dtype)
    grad = (normal(2, m, n) * 1e-2).astype(dtype)

    @jax.jit
    def run(x: Any, w: Any, grad: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return f8.dense(x, w, implementation=implementation)

        y, back = jax.vjp(layer, x, w)
        return y, *back(grad)

    for found, wanted in zip(run(x, w, grad), truth(x, w, grad), strict=True):
        assert found.dtype == dtype
        close(found, wanted, ulp=ULP[dtype] + _SUMS)


def test_delayed_scaling_in_a_scan_with_remat() -> None:
    recipe = f8.Delayed(history=4)
    count = 3
    w, x = normal(0, count, 128, 128) / 16, normal(1, 256, 128)
    states = jax.tree.map(lambda s: jnp.stack([s] * count), f8.dense_state(recipe))
    policy = checkpoint_policies.f8_saveable

    def layer(x: Any, w: Any, state: Any) -> Any:
        return jnp.tanh(f8.dense(x, w, recipe=recipe, state=state))

    def loss(w: Any, states: Any) -> Any:
        def body(x: Any, given: Any) -> Any:
            return jax.checkpoint(layer, policy=policy)(x, *given), None

        return jax.lax.scan(body, x, (w, states))[0].sum()

    def plain(w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    step = jax.jit(jax.grad(loss, (0, 1)))
    for _ in range(3):
        grad, states = step(w, states)
    close(grad, np.asarray(jax.grad(plain)(w), np.float64), ulp=0.15)
    assert all(bool(jnp.isfinite(each).all()) for each in jax.tree.leaves(states))


def test_gelu_and_bias_of_a_batch() -> None:
    """A layer with bias and activation, mapped over some of what enters."""
    x, w = normal(0, 3, 64, 128), normal(1, 128, 256) / 12
    bias = normal(2, 256)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        return f8.dense(x, w, bias=bias, activation="gelu")

    def gradients(x: Any, w: Any, bias: Any) -> Any:
        y, back = jax.vjp(layer, x, w, bias)
        return y, *back(y)

    found = jax.jit(jax.vmap(gradients, (0, None, None)))(x, w, bias)
    for i in range(3):
        one = jax.jit(gradients)(x[i], w, bias)
        for y, other in zip(found, one, strict=True):
            close(y[i], np.asarray(other, np.float64), ulp=_SUMS)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, w = normal(0, 64, 128), normal(1, 128, 256) / 12
    recipe = f8.Delayed()
    state = f8.dense_state(recipe)
    for value, is_finite in ((np.nan, False), (np.inf, True), (-np.inf, True)):
        y = jax.jit(lambda x: f8.dense(x, w, recipe=recipe, state=state))(
            x.at[3, 5].set(value)
        )
        finite = np.isfinite(np.asarray(y))
        assert np.delete(finite, 3, 0).all()
        assert finite[3].all() == is_finite


def test_no_product_is_in_16_bits() -> None:
    x, w = normal(0, 512, 256).astype("bfloat16"), normal(1, 256, 512)

    def loss(x: Any, w: Any) -> Any:
        return f8.dense(x, w, activation="gelu").astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, w).compile().as_text()
    assert text is not None
    calls = plans.inspect(jax.grad(loss, (0, 1)), x, w).calls
    assert [call.implementation for call in calls] == ["cudnn"] * 3
    # XLA has no product of its own beside them.
    assert " dot(" not in text
    assert "__cublas$" not in text


@pytest.mark.parametrize("recipe", [f8.Current(), f8.Delayed(history=4)], ids=repr)
def test_layers_on_all_gpus(recipe: f8.Current | f8.Delayed) -> None:
    """Rows and weights divided among all GPUs that the process has, as FSDP does it."""
    mesh = jax.make_mesh(
        (jax.device_count(),), ("n",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    divided, whole = (jax.NamedSharding(mesh, jax.P(axis)) for axis in ("n", None))
    x, grad = normal(0, 256, 128).astype("bfloat16"), normal(2, 256, 384)
    # The largest number of all lies on the last device alone.
    x = x.at[-1, 3].set(90.0)
    w = normal(1, 128, 384) / 11
    state = f8.dense_state(recipe)

    def gradients(where: Any, x: Any, w: Any, state: Any, grad: Any) -> Any:
        def layer(x: Any, w: Any, state: Any) -> Any:
            return f8.dense(x, w, recipe=recipe, state=state, w_sharding=where)

        y, back = jax.vjp(layer, x, w, state)
        return y, *back(grad.astype(y.dtype))

    alone = jax.jit(lambda *given: gradients(None, *given))
    run = jax.jit(lambda *given: gradients(whole, *given))
    for _ in range(2):
        wanted = alone(x, w, state, grad)
        placed = (jax.device_put(each, divided) for each in (x, w))
        found = run(*placed, state, jax.device_put(grad, divided))
        leaves = (jax.tree.leaves(each) for each in (found, wanted))
        for y, other in zip(*leaves, strict=True):
            close(y, np.asarray(other, np.float64), ulp=_SUMS + ULP["bfloat16"])
        state = wanted[-1]
