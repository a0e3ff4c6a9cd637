# SPDX-License-Identifier: Apache-2.0
"""Means and variances that are read once, against NumPy in float64.

Those of columns are functions of their own, and those of rows and of groups are the
statistics of norms.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import jax_cudnn
from jax_cudnn.reference.norms import column_moments
from tests.common.devices import gradient, mesh_of, placed

_ROWS = 1000
_RNG = np.random.default_rng(5)
_NOISE = _RNG.standard_normal(_ROWS)
_SPIKE = np.where(np.arange(_ROWS) == 256, 1e6, 0.0)  # in a row that is sampled
_LARGEST = float(np.finfo(np.float32).max)

# Columns, and how many units in the last place of f32 their variance may be off.
COLUMNS = {
    "noise": (_NOISE, 32),
    "far from 0": (1e4 + _NOISE, 64),
    "very far from 0": (1e6 + np.round(4 * _NOISE), 64),
    "a spike that is sampled": (_NOISE + _SPIKE, 2048),
    "a spike that is not": (_NOISE + np.roll(_SPIKE, 5), 32),
    "two levels": (np.where(np.arange(_ROWS) % 256 == 0, -3e3, 3e3), 2048),
    "small": (1e-12 * _NOISE, 32),
    "large": (1e15 * _NOISE, 32),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_moments_are_those_of_float64(name: str) -> None:
    values, units = COLUMNS[name]
    x = values.astype(np.float32)[:, None]
    mean, var = jax.jit(column_moments)(x)
    want = x.astype(np.float64)
    spread = want.std()
    eps = np.finfo(np.float32).eps
    size = np.sqrt(np.mean(want**2))
    # k may be 16 deviations away, and x - k is rounded.
    allowed = 4 * eps * size + 8 * eps * spread
    assert abs(float(mean[0, 0]) - want.mean()) <= allowed
    # What the digits of x - k allow, too: k is as large as x.
    allowed = units * eps * want.var() + 4 * eps * size * spread
    assert abs(float(var[0, 0]) - want.var()) <= allowed


@pytest.mark.parametrize("kind", ["layer", "adaptive", "group"])
@pytest.mark.parametrize("name", COLUMNS)
def test_statistics_of_rows_are_those_of_float64(name: str, kind: str) -> None:
    values, units = COLUMNS[name]
    # The spike is among the numbers that come first, and are sampled.
    rows = np.stack([values, np.roll(values, -250)]).astype(np.float32)
    options: dict[str, Any] = {"epsilon": 0.0, "return_statistics": True}
    if kind == "layer":
        found = jax_cudnn.layer_norm(rows, **options)
    elif kind == "adaptive":
        factors = np.ones((1, _ROWS), np.float32), np.zeros((1, _ROWS), np.float32)
        found = jax_cudnn.adaptive_layer_norm(rows[None], *factors, **options)
    else:
        found = jax_cudnn.group_norm(rows[:, :, None], groups=1, **options)
    _, mean, rstd = (np.asarray(x, np.float64).reshape(2, -1) for x in found)
    want = rows.astype(np.float64)
    spread = want.std(1, keepdims=True)
    size = np.sqrt(np.mean(want**2, 1, keepdims=True))
    eps = np.finfo(np.float32).eps
    assert (
        abs(mean - want.mean(1, keepdims=True)) <= 4 * eps * (size + 2 * spread)
    ).all()
    allowed = units * eps + 4 * eps * size / spread
    assert (abs(rstd * spread - 1) <= allowed).all()


@pytest.mark.parametrize("first", [0, 100])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_rows_that_are_not_finite_have_no_statistics(bad: float, first: int) -> None:
    rows = np.stack([_NOISE, _NOISE]).astype(np.float32)
    rows[1, first] = bad
    output, mean, rstd = jax_cudnn.layer_norm(rows, return_statistics=True)
    assert np.isfinite(output[0]).all()
    assert np.isnan(output[1]).all()
    np.testing.assert_array_equal(mean[1], bad)
    assert np.isnan(rstd[1])


def test_a_norm_is_the_same_with_statistics_and_without() -> None:
    rows = jnp.asarray(np.asarray(1e3 + np.roll(_NOISE, 5)[None], jnp.float32))
    output, _, _ = jax_cudnn.layer_norm(rows, return_statistics=True)
    np.testing.assert_allclose(output, jax_cudnn.layer_norm(rows), atol=2e-3)
    output, total = jax_cudnn.layer_norm(rows, residual=rows)
    doubled, _, _ = jax_cudnn.layer_norm(total, return_statistics=True)
    np.testing.assert_allclose(output, doubled, atol=2e-3)


@pytest.mark.parametrize("row", [0, 3, 256])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_shows_as_in_numpy(bad: float, row: int) -> None:
    x = _NOISE.astype(np.float32)[:, None].copy()
    x[row] = bad
    mean, var = column_moments(jnp.asarray(x))
    np.testing.assert_array_equal(mean[0, 0], x.mean())
    assert np.isnan(var[0, 0])


@pytest.mark.parametrize("rows", [[_LARGEST, -_LARGEST], [-_LARGEST, _LARGEST, 0.0]])
def test_the_largest_numbers_have_a_mean(rows: list[float]) -> None:
    mean, var = column_moments(jnp.asarray(rows, jnp.float32)[:, None])
    assert (float(mean[0, 0]), float(var[0, 0])) == (0.0, np.inf)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e7, 1e35])
def test_a_constant_has_no_variance(value: float) -> None:
    x = jnp.full((600, 1), value, jnp.float32)
    normal = jax_cudnn.batch_norm(x, jnp.ones(1), jnp.full(1, 0.25))
    np.testing.assert_allclose(normal, 0.25, atol=1e-2)


def test_derivatives_are_those_of_the_definition() -> None:
    x = jnp.asarray(np.asarray(_RNG.standard_normal((520, 3)), jnp.float32))
    # The variance of a constant is where a bound at 0 could have a slope of its own.
    x = x.at[:, 1].set(0.5)

    def plain(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = jnp.mean(x, 0, keepdims=True)
        return mean, jnp.mean(jnp.square(x - mean), 0, keepdims=True)

    check_grads(column_moments, (x,), order=1, modes=["fwd", "rev"], rtol=1e-2)
    direction = jnp.asarray(np.asarray(_RNG.standard_normal(x.shape), jnp.float32))

    def curvature(moments: object, x: jax.Array) -> jax.Array:
        def along(t: jax.Array) -> jax.Array:
            return moments(x + t * direction)[1]  # type: ignore[operator]

        return jax.jacfwd(jax.jacfwd(along))(jnp.float32(0))

    np.testing.assert_allclose(
        curvature(column_moments, x), curvature(plain, x), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_constants_near_the_largest_have_no_variance(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        largest = float(jnp.finfo(dtype).max)
        mean, var = column_moments(jnp.full((3, 1), largest / 8, dtype))
    np.testing.assert_allclose(float(mean[0, 0]), largest / 8, rtol=1e-6)
    assert float(var[0, 0]) == 0


def test_rows_that_types_share_out_are_taken() -> None:
    mesh = mesh_of(AxisType.Explicit, x=4)
    x = jnp.asarray(np.asarray(_RNG.standard_normal((264, 3)), jnp.float32))
    (shared,) = placed(mesh, [x], [("x", None)])

    def norm(x: jax.Array) -> jax.Array:
        return jax_cudnn.batch_norm(x, jnp.ones(3), jnp.zeros(3))

    with jax.set_mesh(mesh):
        results = jax.jit(norm)(shared), gradient(norm)(shared)[0]
    expected = norm(x), gradient(norm)(x)[0]
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
