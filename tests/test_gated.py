# SPDX-License-Identifier: Apache-2.0
"""Is `gated_matmul` the gate times the product, in two kernels?"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_cudnn
from tests.conftest import Draw
from tests.fused import assert_close, graphs, nodes

_SIZES = {"m": 5, "r": 7, "n": 6, "b": 3}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("activation", ["silu", "gelu", "sigmoid"])
def test_it_is_the_gate_times_the_product(draw: Draw, activation: str) -> None:
    a = draw("bmr", jnp.float64, **_SIZES)
    gate, up = draw("rn", jnp.float64, **_SIZES), 2 * draw("rn", jnp.float64, **_SIZES)
    bias = draw("n", jnp.float64, **_SIZES)

    def gated(*args: Any) -> jax.Array:
        a, gate, up, bias = args
        return jax_cudnn.gated_matmul(
            a, gate, up, activation=activation, gate_bias=bias, up_bias=-bias
        )

    def plain(*args: Any) -> jax.Array:
        a, gate, up, b = args
        b = b[None, None]
        return getattr(jax.nn, activation)(a @ gate + b) * (a @ up - b)

    operands = (a, gate, up, bias)
    assert_close(gated(*operands), plain(*operands))
    assert_close(
        jax.grad(lambda *xs: (gated(*xs) ** 2).sum(), (0, 1, 2, 3))(*operands),
        jax.grad(lambda *xs: (plain(*xs) ** 2).sum(), (0, 1, 2, 3))(*operands),
    )
    check_grads(gated, operands, 1)


def test_it_is_two_kernels() -> None:
    x, w = jnp.ones((5, 8)), jnp.ones((8, 16))
    (first, _), (second, _) = graphs(jax_cudnn.gated_matmul, x, w, w)
    assert nodes(first) == {"matmul": 1}
    assert nodes(second) == {"matmul": 1, "silu": 1, "mul": 1}


def test_gradients_need_the_two_products_alone() -> None:
    x, w = jnp.ones((5, 8), jnp.bfloat16), jnp.ones((8, 16), jnp.bfloat16)

    def gradients(*operands: Any) -> Any:
        result, pullback = jax.vjp(jax_cudnn.gated_matmul, *operands)
        return result, pullback(result)

    _, second, *backward = (graph for graph, _ in graphs(gradients, x, w, w))
    assert second.outputs == ("output", "saved_matmul_0")
    of_both = next(each for each in backward if nodes(each)["silu_grad"])
    assert {"scale_out", "saved_matmul_0"} < {*of_both.inputs}
    like = [of_both.tensor(name).dims for name in of_both.inputs]
    assert like.count((1, 5, 16)) == 3  # the cotangent, and the products


def _cut(x: jax.Array) -> jax.Array:
    """No graph has this: what it gives depends on the places of the elements."""
    return jnp.where(jnp.arange(x.shape[-1]) % 2 == 0, x, 0)


@pytest.mark.parametrize("activation", [_cut, lambda x: x * jax.nn.sigmoid(1.7 * x)])
@pytest.mark.parametrize("axes", ["mr,rn", "r,rn", "mr,r", "mr,brn"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_activations_of_ones_own(
    draw: Draw, activation: Any, axes: str, dtype: str
) -> None:
    a, gate = (draw(each, dtype, **_SIZES) for each in axes.split(","))
    gated = jax_cudnn.gated_matmul(a, gate, 2 * gate, activation=activation)
    assert_close(gated, activation(a @ gate) * (a @ (2 * gate)))


def test_a_gate_of_all_batch_entries(draw: Draw) -> None:
    a, gate, up = (draw(each, **_SIZES) for each in ("mr", "rn", "brn"))
    gated = jax_cudnn.gated_matmul(a, gate, up)
    assert_close(gated, jax.nn.silu(a @ gate)[None] * (a @ up))


@pytest.mark.parametrize("dtype", ["int8", "int32", "float8_e4m3fn"])
def test_narrow_products_are_activated_before_they_are_rounded(dtype: str) -> None:
    a = jnp.full((4, 16), 12, dtype)
    gate, up = jnp.full((16, 8), -4, dtype), jnp.full((16, 8), 0.0625, dtype)
    up = jnp.where(jnp.arange(8) < 4, up, jnp.ones((), dtype)).astype(dtype)
    # The gate's product is -768, beyond 8 bits. Its silu is 0.
    for preferred in (None, jnp.float32):
        result = jax_cudnn.gated_matmul(a, gate, up, preferred_element_type=preferred)
        like = jax_cudnn.matmul(a, gate, preferred_element_type=preferred)
        assert result.dtype == like.dtype
        np.testing.assert_allclose(np.asarray(result, np.float64), 0, atol=1e-6)


def test_columns_that_differ_are_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"^gated_matmul: gate is f32\[8,16\] and up f32\[8,3\], so that their "
        r"products with a are \[5, 16\] and \[5, 3\]\. The first must broadcast",
    ):
        jax_cudnn.gated_matmul(jnp.ones((5, 8)), jnp.ones((8, 16)), jnp.ones((8, 3)))
