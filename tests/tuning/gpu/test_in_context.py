# SPDX-License-Identifier: Apache-2.0
"""Tests that tuning leaves a program no slower than untuned or by XLA alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import choices, plans
from jax_cudnn.choices import ChoiceTable

pytestmark = pytest.mark.gpu


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ChoiceTable:
    """An empty table of choices, which no file is read into or written from."""
    empty = ChoiceTable()
    monkeypatch.setattr(choices, "table", lambda: empty)
    monkeypatch.setattr(choices, "remember", lambda _: None)
    return empty


def _block(params: Any, x: jax.Array) -> jax.Array:
    filters, scale, bias, weights = params
    y = jax_cudnn.conv(
        x,
        filters,
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        activation="silu",
    )
    y = jax_cudnn.layer_norm(y, scale, bias, residual=x)[0]
    return jax_cudnn.matmul(y, weights, activation="gelu")


def _step(params: Any, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(_block(params, x).astype(jnp.float32)))

    value, gradients = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def test_the_program_is_as_fast_as_the_fastest_contender(table: ChoiceTable) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    c = 128
    x = jax.random.normal(keys[0], (8, 32, 32, c), jnp.bfloat16)
    params = (
        0.03 * jax.random.normal(keys[1], (3, 3, c, c), jnp.bfloat16),
        jnp.ones(c, jnp.bfloat16),
        jnp.zeros(c, jnp.bfloat16),
        0.1 * jax.random.normal(keys[2], (c, 4 * c), jnp.bfloat16),
    )
    want = jax.jit(lambda *args: _step(*args))(params, x)
    step = jax.jit(lambda *args: _step(*args), donate_argnums=0)
    tuning = plans.autotune(step, params, x, progress=False)
    times = tuning.program
    assert isinstance(times, plans.ProgramTimes)
    others = (times.untuned_us, times.xla_us, times.cudnn_us, times.kernels_us)
    measured = [us for us in others if us is not None]
    assert len(measured) >= 2
    assert times.chosen_us <= min(measured) * 1.01
    assert table.all() == tuning.choices
    assert not any(leaf.is_deleted() for leaf in params)
    got = jax.jit(lambda *args: _step(*args))(params, x)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(each, np.float64) for each in (one, two))
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)
