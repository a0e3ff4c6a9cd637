# SPDX-License-Identifier: Apache-2.0
"""Tests the states of layers in f8: scales of former steps, and what joins them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import f8
from tests.products.shared.f8_dense import close, normal, step, truth


@pytest.mark.once
def test_scales_come_from_former_steps() -> None:
    recipe = f8.Delayed(history=2)
    state = f8.dense_state(recipe)
    run = jax.jit(functools.partial(step, recipe=recipe))
    x, w, grad = normal(0, 32, 16), normal(1, 16, 8), normal(2, 32, 8)
    factors = [1.0, 5.0, 0.25, 0.25, 0.25, 0.25]
    amaxes: list[list[float]] = [[], [], []]
    first = 1.0, 2.0**-6, 2.0**-15
    largest = 448, 448, 57344
    for factor in factors:
        operands = x * factor, w * factor, grad * factor
        scales = [
            max(known[-2:]) / most if known else start
            for known, most, start in zip(amaxes, largest, first, strict=True)
        ]
        found, state = run(state, *operands)
        for y, wanted in zip(found, truth(*operands, scales), strict=True):
            close(y, wanted, ulp=0.02)
        for known, each in zip(amaxes, operands, strict=True):
            known.append(float(jnp.abs(each).max()))


@pytest.mark.once
def test_what_says_nothing_is_left_out_of_a_history() -> None:
    """NaN, infinities and zeros neither enter nor erase it."""
    recipe = f8.Delayed(history=3)
    x, w, grad = normal(0, 8, 16), normal(1, 16, 8), normal(2, 8, 8)
    state = f8.dense_state(recipe)
    for value in (1.0, np.nan, np.inf, 0.0):
        (y, *_), state = step(state, x.at[0, 0].set(value), w, grad, recipe)
        assert np.isnan(np.asarray(y[0])).all() == np.isnan(value)
        assert np.isfinite(np.asarray(y[1:])).all()
    scales = [np.asarray(each) for each in state]
    assert all(np.isfinite(each).all() for each in scales)
    assert all(each[1:-1].max() > 0 for each in scales)


@pytest.mark.once
@pytest.mark.parametrize("size", [2.0**-40, 2.0**40])
def test_a_history_finds_any_size(size: float) -> None:
    """Within some steps, whatever the first scale was."""
    recipe = f8.Delayed(history=1)
    x, w, grad = normal(0, 16, 16), normal(1, 16, 8), normal(2, 16, 8)
    state, x = f8.dense_state(recipe), x * size
    for _ in range(5):
        (y, *_), state = step(state, x, w, grad, recipe)
    close(y, truth(x, w, grad)[0], ulp=0.05)


@pytest.mark.once
@pytest.mark.sampled
@pytest.mark.parametrize("count", [2, 8, 64])
def test_states_may_be_added_and_averaged(count: int) -> None:
    """As gradients of a layer that is used several times, or of microbatches."""
    recipe = f8.Delayed(history=4)
    x, w, grad = normal(0, count, 8, 16), normal(1, 16, 8), normal(2, count, 8, 8)
    run = functools.partial(step, recipe=recipe)
    _, state = run(f8.dense_state(recipe), x, w, grad)
    one = jax.jit(jax.vmap(lambda x, grad: run(state, x, w, grad)[1]))(x, grad)
    for joined in (jnp.sum, jnp.mean):
        together = jax.tree.map(functools.partial(joined, axis=0), one)
        _, after = run(together, x, w, grad)
        for role, array in (("x", x), ("w", w), ("grad", grad)):
            largest = float(jnp.abs(array).max())
            found = float(getattr(after, role)[1])
            assert 1 / count**0.125 <= found / largest * 1.0001
            assert found / largest <= count**0.125 * 1.0001
            older = getattr(after, role)[2]
            np.testing.assert_allclose(older, largest, rtol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("factor", [0.75, 0.125, 2.0**-16, 2.0**-30])
def test_states_may_be_multiplied(factor: float) -> None:
    """By loss scaling, and by means over microbatches that leave a layer out."""
    recipe = f8.Delayed(history=4)
    x, w, grad = normal(0, 8, 16), normal(1, 16, 8), normal(2, 8, 8)
    state = f8.dense_state(recipe)
    for _ in range(3):
        _, state = step(state, x, w, grad, recipe)
    wanted = step(state, x, w, grad, recipe)
    scaled = jax.tree.map(lambda s: s * factor, state)
    found = step(scaled, x, w, grad, recipe)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4), found, wanted
    )


@pytest.mark.once
@pytest.mark.sampled
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 1e10])
@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_broken_state_recovers(bad: float, place: int) -> None:
    recipe = f8.Delayed(history=4)
    x, w, grad = normal(0, 8, 16), normal(1, 16, 8), normal(2, 8, 8)
    _, state = step(f8.dense_state(recipe), x, w, grad, recipe)
    state = jax.tree.map(lambda s: s.at[place].set(bad), state)
    for _ in range(16):
        found, state = step(state, x, w, grad, recipe)
    for y, wanted in zip(found, truth(x, w, grad), strict=True):
        close(y, wanted, ulp=0.05)


@pytest.mark.once
def test_many_states_of_large_cotangents_are_added() -> None:
    """Powers of ratios stay finite, and a history finds its scale."""
    recipe = f8.Delayed(history=4)
    x, w = normal(0, 8, 16), normal(1, 16, 8)
    state = f8.dense_state(recipe)

    def loss(w: Any, state: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            y = f8.dense(x, w, recipe=recipe, state=state)
            return total + (y * 2.0**16).sum(), None

        xs = jnp.broadcast_to(x, (256, *x.shape))
        return jax.lax.scan(body, jnp.float32(0), xs)[0]

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    for _ in range(8):
        grad, state = gradient(w, state)
    wanted = truth(x, w, np.full((8, 8), 2.0**16))[2] * 256
    close(grad, wanted, ulp=0.02)


@pytest.mark.once
def test_states_one_after_another_in_a_step() -> None:
    recipe = f8.Delayed(history=4)
    x, w, grad = normal(0, 8, 16), normal(1, 16, 8), normal(2, 8, 8)
    _, state = step(f8.dense_state(recipe), x, w, grad, recipe)

    def loss(w: Any, state: Any) -> Any:
        total = jnp.float32(0)
        for _ in range(2):
            y, state = f8.dense(x, w, recipe=recipe, state=state, return_state=True)
            total += (y * grad).sum()
        return total, state

    (_, by_state), last = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(w, state)
    for each in (*by_state, last.x, last.w):
        assert each[-1] in (1, 2)
        assert (each >= 0).all()


def test_vmap_with_a_state_that_is_shared() -> None:
    recipe = f8.Delayed(history=4)
    x, w, grad = normal(0, 4, 8, 16), normal(1, 16, 8), normal(2, 4, 8, 8)
    _, state = step(f8.dense_state(recipe), x, w, grad, recipe)

    def one(x: Any, w: Any, state: Any) -> Any:
        return f8.dense(x, w, recipe=recipe, state=state)

    def gradients(run: Any) -> Any:
        return jax.jit(lambda *given: jax.vjp(run, *given)[1](grad))(x, w, state)

    found, whole = gradients(jax.vmap(one, (0, None, None))), gradients(one)
    close(found[0], np.asarray(whole[0], np.float64), ulp=1e-6)
    close(found[1], np.asarray(whole[1], np.float64), ulp=1e-5)
    assert float(found[2].x[-1]) == 4
