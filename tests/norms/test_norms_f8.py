# SPDX-License-Identifier: Apache-2.0
"""Tests that norms that write f8 round once, and saturate."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import f8
from tests.norms.problems import truth

pytestmark = pytest.mark.once

_KINDS = pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])


def _operands() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((5, 3, 37), (37,), (37,))
    return [
        jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.float32))
        for shape in shapes
    ]


@_KINDS
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("output_scale", [2.0**-5, 0.3, 1e-3])
def test_results_are_numpys_rounded(kind: str, dtype: Any, output_scale: float) -> None:
    x, scale, bias = _operands()
    got = getattr(f8, kind)(
        x,
        scale,
        bias,
        output_scale=output_scale,
        epsilon=1e-3,
        preferred_element_type=dtype,
    )
    want = truth(
        x, scale, bias, axes=(2,), epsilon=1e-3, is_centred=kind == "layer_norm"
    )["output"]
    most = float(ml_dtypes.finfo(dtype).max)
    scaled = np.clip(want / output_scale, -most, most)
    assert got.dtype == dtype
    assert got.shape == x.shape
    # What f32 computes may lie on the other side of the middle between two numbers.
    unit = float(ml_dtypes.finfo(dtype).eps)
    got64 = np.asarray(got, np.float64)
    np.testing.assert_allclose(got64, scaled, rtol=0.51 * unit, atol=1e-2)
    same = got64 == scaled.astype(dtype).astype(np.float64)
    assert np.mean(same) > 0.98


@_KINDS
def test_nan_stays_and_too_large_numbers_saturate(kind: str) -> None:
    x, scale, bias = _operands()
    x = x.at[0, 0, 0].set(jnp.nan)
    run = getattr(f8, kind)
    got = np.asarray(run(x, scale, bias, output_scale=1e-12), np.float32)
    assert np.isnan(got[0, 0]).all()
    assert set(np.unique(np.abs(got[1:]))) == {448.0}
    assert np.isnan(np.asarray(run(x, output_scale=-1.0), np.float32)).all()


@_KINDS
def test_transformations(kind: str) -> None:
    x, scale, bias = _operands()
    run = getattr(f8, kind)
    scales = jnp.asarray([0.1, 0.2, 0.3, 0.4, 0.5])
    got = jax.jit(jax.vmap(lambda x, q: run(x, scale, bias, output_scale=q)))(x, scales)
    for i in range(5):
        want = run(x[i], scale, bias, output_scale=scales[i])
        np.testing.assert_array_equal(
            *(np.asarray(v, np.float32) for v in (got[i], want))
        )
    text = str(jax.make_jaxpr(jax.vmap(lambda x: run(x, output_scale=0.1)))(x))
    assert text.count("cudnn_graph[") == 1


@_KINDS
@pytest.mark.parametrize("name", ["x", "scale", "bias", "output_scale"])
def test_they_are_not_differentiable(kind: str, name: str) -> None:
    x, scale, bias = _operands()
    arrays = {"x": x, "scale": scale, "bias": bias, "output_scale": jnp.float32(0.1)}

    def loss(value: jax.Array) -> jax.Array:
        result = getattr(f8, kind)(**{**arrays, name: value})
        return jnp.sum(result.astype(jnp.float32))

    with pytest.raises(TypeError, match=f"f8.{kind}: .* with respect to {name}"):
        jax.grad(loss)(arrays[name])
    stopped = jax.grad(lambda v: loss(jax.lax.stop_gradient(v)))(arrays[name])
    assert not stopped.any()


@_KINDS
def test_messages(kind: str) -> None:
    x, scale, bias = _operands()
    run = getattr(f8, kind)
    with pytest.raises(
        TypeError, match=rf"f8.{kind}: preferred_element_type=.* is not"
    ):
        run(x, output_scale=1.0, preferred_element_type=jnp.bfloat16)
    with pytest.raises(TypeError, match=rf"f8.{kind}: output_scale is f32\[5\]"):
        run(x, output_scale=jnp.ones(5))
    with pytest.raises(ValueError, match=rf"f8.{kind}: scale is f32\[3\]"):
        run(x, jnp.ones(3), output_scale=1.0)
    with pytest.raises(ValueError, match=rf"f8.{kind}: axis=7, but x has 3 axes"):
        run(x, scale, bias, output_scale=1.0, axis=7)


@_KINDS
def test_symbolic_sizes_are_xlas(kind: str) -> None:
    x, scale, bias = _operands()
    (size,) = jax.export.symbolic_shape("s")

    def run(x: jax.Array) -> jax.Array:
        return getattr(f8, kind)(x, scale, bias, output_scale=0.1)

    shape = jax.ShapeDtypeStruct((size, 3, 37), x.dtype)
    exported = jax.export.export(
        jax.jit(run), disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS
    )(shape)
    got, want = (np.asarray(v, np.float32) for v in (exported.call(x), run(x)))
    assert np.mean(got == want) > 0.98
