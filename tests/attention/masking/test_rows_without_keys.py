# SPDX-License-Identifier: Apache-2.0
"""Tests that queries that see no key, and padding, give zero and no gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import sdpa
from tests.attention.shared.oracle import shape_of
from tests.conftest import Draw

pytestmark = [pytest.mark.once, pytest.mark.sampled]


_CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def _qkv(draw: Draw, dtype: Any = jnp.float64, **sizes: int) -> tuple[jax.Array, ...]:
    return tuple(draw(axes, dtype, **sizes) for axes in ("bshd", "btkd", "btke"))


def _hide_by_mask(dead: np.ndarray) -> dict[str, Any]:
    return {"mask": jnp.broadcast_to(~dead, shape_of("bhst"))}


def _hide_by_bias(dead: np.ndarray) -> dict[str, Any]:
    bias = np.zeros(shape_of("bhst"), np.float32)
    return {"bias": jnp.asarray(np.where(dead, -np.inf, bias))}


@pytest.mark.parametrize("hide", [_hide_by_mask, _hide_by_bias])
@pytest.mark.parametrize("mode", ["rev", "fwd"])
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(
    hide: Callable[[np.ndarray], dict[str, Any]], mode: str, draw: Draw
) -> None:
    dead = np.zeros(shape_of("bhs1"), bool)
    dead[0, 3, 2] = dead[1, :, 4] = True
    operands = _qkv(draw, jnp.float32)
    hidden = hide(dead)

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return sdpa(q, k, v, **hidden, return_residual=True)

    out, stats = function(*operands)
    is_dead = np.swapaxes(dead[..., 0], 1, 2)
    np.testing.assert_array_equal(np.isneginf(stats), is_dead)
    np.testing.assert_array_equal(np.all(out == 0, axis=-1), is_dead)

    if mode == "rev":
        _, pullback = jax.vjp(function, *operands)
        gradients = pullback((draw("bshe"), draw("bsh")))
        assert all(np.isfinite(x).all() for x in gradients)
        np.testing.assert_array_equal(np.all(gradients[0] == 0, axis=-1), is_dead)
    else:
        tangents = tuple(jax.tree.map(jnp.ones_like, operands))
        tangent, stats_tangent = jax.jvp(function, operands, tangents)[1]
        assert np.isfinite(tangent).all()
        np.testing.assert_array_equal(tangent[is_dead], 0)
        assert np.isfinite(stats_tangent[~is_dead]).all()


@pytest.mark.usefixtures("x64")
def test_minus_infinity_in_a_bias_hides_a_key_as_a_mask_does(draw: Draw) -> None:
    q, k, v = _qkv(draw)
    mask = (draw("bhst") > 0).at[1, 2, 3].set(False)
    bias = draw("bhst", jnp.float64)
    weight = draw("bshe", jnp.float64)

    def loss(q: jax.Array, bias: jax.Array, mask: jax.Array | None) -> jax.Array:
        return jnp.sum(weight * sdpa(q, k, v, bias, mask))

    hidden = jnp.where(mask, bias, -jnp.inf)
    by_bias = jax.value_and_grad(loss, argnums=(0, 1))(q, hidden, None)
    by_mask = jax.value_and_grad(loss, argnums=(0, 1))(q, bias, mask)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **_CLOSE), by_bias, by_mask
    )
    assert np.all(by_bias[1][1][~mask] == 0)


@pytest.mark.parametrize(
    "lengths",
    [{"query_seq_lengths": [0, 3]}, {"key_value_seq_lengths": [7, 0]}],
    ids=lambda lengths: next(iter(lengths)),
)
def test_padding_gets_no_gradient(lengths: dict[str, list[int]], draw: Draw) -> None:
    operands = _qkv(draw, jnp.float32)
    options = {name: jnp.asarray(x) for name, x in lengths.items()}

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sdpa(q, k, v, **options)

    out, pullback = jax.vjp(function, *operands)
    q, k, v = pullback(draw("bshe"))
    if "query_seq_lengths" in lengths:
        assert not out[0].any()
        assert not out[1, 3:].any()
        assert not q[0].any()
        assert not q[1, 3:].any()
        assert not k[0].any()
        assert k[1].any()
    else:
        assert not out[1].any()
        assert not any(x[1].any() for x in (q, k, v))
        assert all(x[0].any() for x in (q, k, v))
