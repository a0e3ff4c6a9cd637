# SPDX-License-Identifier: Apache-2.0
"""Is `gated_matmul` the gate times the product, in two kernels?"""

from typing import Any

import jax
import jax.numpy as jnp
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
    assert nodes(first) == {"matmul": 1, "silu": 1}
    assert nodes(second) == {"matmul": 1, "mul": 1}


def test_columns_that_differ_are_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"^gated_matmul: gate is f32\[8,16\] and up f32\[8,3\], so that their "
        r"products with a are \[5, 16\] and \[5, 3\]\. The first must broadcast",
    ):
        jax_cudnn.gated_matmul(jnp.ones((5, 8)), jnp.ones((8, 16)), jnp.ones((8, 3)))
