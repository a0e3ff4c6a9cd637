# SPDX-License-Identifier: Apache-2.0
"""Which graphs derivatives and vmap of `jax_cudnn.conv` are.

Their values are compared with JAX's in test_product_transformations.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import conv
from jax_cudnn.legalize import partition
from tests.conftest import Draw
from tests.products.shared.fused import (
    assert_close,
    contractions,
    gradients,
    graphs,
    nodes,
    stacked,
)
from tests.products.shared.operations import CONV

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def test_the_gradient_of_a_scale_reads_the_sums_before_it(draw: Draw) -> None:
    x, w, _, scale, _ = CONV.draw(draw, jnp.bfloat16)

    def run(scale: jax.Array) -> jax.Array:
        return CONV.run(x, w, scale=scale)

    (forward, _), (backward, _) = graphs(gradients(run, (0,)), scale)
    assert forward.outputs == ("output", "saved_conv_fprop_0")
    assert set(backward.inputs) == {"grad_output", "saved_conv_fprop_0"}
    assert contractions(backward) == []


def test_an_8_bit_result_saves_in_16_bits(draw: Draw) -> None:
    x, w = (1000 * jnp.ones_like(each) for each in CONV.draw(draw, jnp.bfloat16)[:2])

    def run(x: jax.Array) -> jax.Array:
        result = conv(
            x,
            w,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            activation=lambda x: jnp.tanh(1e-8 * x),
            preferred_element_type=jnp.float8_e4m3fn,
        )
        return jnp.sum(result.astype(jnp.float32))

    assert np.isfinite(np.asarray(jax.grad(run)(x), np.float32)).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=str)
def test_vmap_with_sizes_of_1_and_a_shared_cotangent(dtype: Any, draw: Draw) -> None:
    # One image, one channel out, and a cotangent that is rounded before it is used.
    x, w = draw("bstd", dtype, b=1, t=4, d=3), draw("nkkde", dtype, n=3, k=2, d=3, e=1)
    ct = draw("bste", jnp.float64, b=1, s=5, t=4, e=1)

    def pull(x: Any, w: Any, ct: Any) -> Any:
        run = functools.partial(CONV.run, preferred_element_type=jnp.float64)
        return jax.vjp(run, x, w)[1](ct)

    for axes, args in (
        ((None, 0, None), (x, w, ct)),
        ((0, None, None), (jnp.stack([x, -x]), w[0], ct)),
        ((None, None, 0), (x, w[0], jnp.stack([ct, -ct]))),
    ):
        got = jax.jit(jax.vmap(pull, in_axes=axes))(*args)
        assert_close(got, stacked(jax.jit(pull), args, axes), 1e-5)


def test_vmap_over_images_shares_the_filters(draw: Draw) -> None:
    x, w, bias, *_ = CONV.draw(draw, jnp.float32)
    xs = jnp.stack([x] * 3)
    run = functools.partial(CONV.run, activation="relu")
    ((graph, _),) = graphs(jax.vmap(run, in_axes=(0, None, None)), xs, w, bias)
    assert graph.tensor("x").dims == (6, 3, 5, 4)
    assert graph.tensor("w").dims == (7, 3, 2, 2)
    assert graph.tensor("bias").dims == (1, 7, 1, 1)
    # The gradient of the images alone still shares them.
    gradient = jax.vmap(gradients(run, (0,)), in_axes=(0, None, None))
    _, (graph, _) = graphs(gradient, xs, w, bias)
    assert graph.tensor("grad_x").dims == (6, 3, 5, 4)
    assert graph.tensor("w").dims == (7, 3, 2, 2)
    # Each example's gradient of the filters is a group.
    gradient = jax.vmap(gradients(run, (1,)), in_axes=(0, None, None))
    _, (graph, _) = graphs(gradient, xs, w, bias)
    assert graph.tensor("grad_w").dims == (21, 3, 2, 2)
    assert graph.tensor("x").dims == (2, 9, 5, 4)


def test_vmap_over_the_bias_of_one_image_convolves_it_once(draw: Draw) -> None:
    x, w, bias, *_ = CONV.draw(draw, jnp.float32)
    x, biases = x[:1], jnp.stack([bias, -bias, 2 * bias])
    run = functools.partial(CONV.run, activation="gelu")
    mapped = jax.vmap(run, in_axes=(None, None, 0))
    ((graph, _),) = graphs(mapped, x, w, biases)
    product, rest = partition(graph)
    assert nodes(product) == {"conv_fprop": 1}
    assert product.tensor("x").dims == (1, 3, 5, 4)
    assert nodes(rest) == {"add": 1, "gelu_tanh": 1}
    want = stacked(run, (x, w, biases), (None, None, 0))
    assert_close(mapped(x, w, biases), want, 1e-5)


def test_vmap_over_filters_makes_groups(draw: Draw) -> None:
    x, w, bias, *_ = CONV.draw(draw, jnp.float32)
    ws, biases = jnp.stack([w] * 3), jnp.stack([bias] * 3)
    run = functools.partial(CONV.run, activation="relu")
    for axes, args in (
        ((None, 0, 0), (x, ws, biases)),
        ((None, 0, None), (x, ws, bias)),
    ):
        ((graph, _),) = graphs(jax.vmap(run, in_axes=axes), *args)
        assert graph.tensor("x").dims == (2, 9, 5, 4)
        assert graph.tensor("w").dims == (21, 3, 2, 2)
        assert graph.tensor("bias").dims == (1, 21, 1, 1)
    gradient = jax.vmap(gradients(run, (0, 1, 2)), in_axes=(None, 0, 0))
    found = [contractions(graph) for graph, _ in graphs(gradient, x, ws, biases)]
    assert found == [["conv_fprop"], ["conv_dgrad", "conv_wgrad"]]
