# SPDX-License-Identifier: Apache-2.0
"""Group norms of images of so many positions that they are summed in blocks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from tests.norms.problems import gradients, truth

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _of_many(x: Any, scale: Any, bias: Any, groups: int, is_first: bool) -> Any:
    axis = 1 if is_first else -1
    return jax_cudnn.group_norm(x, scale, bias, groups=groups, channel_axis=axis)


@pytest.mark.parametrize("positions", [(32, 32), (8, 256), (33, 32)])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("groups", [2, 6])
def test_many_positions_match_float64(
    positions: tuple[int, int], is_first: bool, groups: int
) -> None:
    rng = np.random.default_rng(sum(positions))
    n, c = 3, 6
    x, cotangent = 1.5 * rng.standard_normal((2, n, c, *positions)).astype("f4") + 20
    cotangent -= 20
    scale, bias = rng.standard_normal((2, c)).astype("f4")
    split = (n, groups, c // groups, np.prod(positions))

    def shaped(x: Any) -> Any:
        return x if is_first else jnp.moveaxis(x, 1, -1)

    @jax.jit
    def run(x: Any, scale: Any, bias: Any) -> Any:
        return _of_many(x, scale, bias, groups, is_first)

    factors = [v.reshape(1, groups, c // groups, 1) for v in (scale, bias)]
    options: Any = {"axes": (2, 3), "epsilon": 1e-6}
    want = truth(x.reshape(split), *factors, **options)["output"]
    got, pull = jax.vjp(run, shaped(x), scale, bias)
    np.testing.assert_allclose(got, shaped(want.reshape(x.shape)), rtol=1e-4, atol=1e-4)
    grads = gradients(
        x.reshape(split), cotangent.reshape(split), factors[0], along=(1, 2), **options
    )
    grad_x, grad_scale, grad_bias = pull(shaped(jnp.asarray(cotangent)))
    wanted = shaped(grads["x"].reshape(x.shape))
    np.testing.assert_allclose(grad_x, wanted, rtol=1e-3, atol=1e-3)
    for got, name in ((grad_scale, "scale"), (grad_bias, "bias")):
        np.testing.assert_allclose(got, grads[name].ravel(), rtol=1e-3, atol=1e-2)
    # One image by itself, whatever is in the others.
    spoilt = jnp.asarray(x).at[0].set(jnp.nan)
    np.testing.assert_array_equal(
        run(shaped(spoilt), scale, bias)[1:], run(shaped(x), scale, bias)[1:]
    )


def test_many_positions_have_both_modes_vmap_and_second_derivatives() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        x, along = rng.standard_normal((2, 2, 32, 32, 4))
        scale, bias = rng.standard_normal((2, 4))

        @jax.jit
        def loss(x: Any, scale: Any) -> Any:
            return jnp.sum(_of_many(x, scale, bias, 2, is_first=False) ** 3)

        step = 1e-5
        _, slope = jax.jvp(loss, (x, scale), (along, scale))
        wide = loss(x + step * along, scale * (1 + step))
        narrow = loss(x - step * along, scale * (1 - step))
        np.testing.assert_allclose(slope, (wide - narrow) / (2 * step), rtol=1e-6)
        grads = jax.grad(loss, (0, 1))(x, scale)
        total = jnp.vdot(grads[0], along) + jnp.vdot(grads[1], scale)
        np.testing.assert_allclose(slope, total, rtol=1e-9)
        grad = jax.jit(jax.grad(loss))
        _, curved = jax.jvp(grad, (x, scale), (along, scale))
        change = grad(x + step * along, scale * (1 + step))
        change -= grad(x - step * along, scale * (1 - step))
        np.testing.assert_allclose(curved, change / (2 * step), rtol=1e-4, atol=1e-6)
        many = jax.vmap(grad, (0, None))(jnp.stack([x, along]), scale)
        np.testing.assert_allclose(many[1], grad(along, scale), rtol=1e-9, atol=1e-12)


def test_groups_of_more_elements_than_i32_has_numbers() -> None:
    x = jax.ShapeDtypeStruct((1, 1, 2**10, 2**22), jnp.bfloat16)

    def run(x: Any) -> Any:
        y = _of_many(x, None, None, 1, is_first=True)
        return jnp.sum(y, dtype=jnp.float32)

    for function in (run, jax.grad(run)):
        jax.jit(function).lower(x)


@pytest.mark.parametrize("shape", ["2, s, 32, 4", "2, s, s, 4", "s, 32, 32, 4"])
def test_positions_may_be_symbolic(shape: str) -> None:
    x = jnp.asarray(
        np.asarray(np.random.default_rng(0).standard_normal((2, 32, 32, 4)), "f4")
    )
    if shape.startswith("s"):
        x = jnp.concatenate([x] * 16)

    @jax.jit
    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(_of_many(x, None, None, 2, False) ** 3))(x)

    given = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), x.dtype)
    exported = jax.export.export(gradient)(given)
    np.testing.assert_allclose(exported.call(x), gradient(x), rtol=1e-4, atol=1e-4)
