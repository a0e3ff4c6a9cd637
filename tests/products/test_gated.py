# SPDX-License-Identifier: Apache-2.0
"""Tests that `gated_matmul` is the gate times the product, in two kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

import jax_cudnn
from tests.common.devices import Spec, mesh_of, placed
from tests.conftest import Draw
from tests.products.shared.fused import assert_close, assert_same, graphs, nodes

pytestmark = pytest.mark.sampled

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
    assert_same(gated, plain, operands)
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


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "float8_e4m3fn"])
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


def _of_rank(x: jax.Array) -> jax.Array:
    return x if x.ndim == 2 else 2 * x


def _in_f32(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


_SHAPES = ((3, 4), (4, 2), (4, 2))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtypes", ["fff", "ffd", "fdf", "hhf", "hfd", "cff", "iii"])
@pytest.mark.parametrize("activation", [_in_f32, _of_rank, "relu", None])
def test_operands_of_several_dtypes(activation: Any, dtypes: str) -> None:
    names = {"f": "float32", "d": "float64", "h": "bfloat16", "c": "int8", "i": "int64"}
    a, gate, up = (
        jnp.arange(-n, n).reshape(shape).astype(names[letter])
        for letter, shape, n in zip(dtypes, _SHAPES, (6, 4, 4), strict=True)
    )
    with jax.numpy_dtype_promotion("standard"):
        result = jax_cudnn.gated_matmul(a, gate, up, activation=activation)
        gates, product = jnp.matmul(a, gate), jnp.matmul(a, up)
        if activation is not None:
            function = jax.nn.relu if activation == "relu" else activation
            gates = function(gates)
    wanted = np.asarray(gates, np.float64) * np.asarray(product, np.float64)
    assert result.dtype == product.dtype
    tolerance = 0.02 if "h" in dtypes else 1e-6
    np.testing.assert_allclose(np.asarray(result, np.float64), wanted, rtol=tolerance)


def test_sums_of_integers_are_exact() -> None:
    a, gate = jnp.asarray([[2**25 + 1, 1]]), jnp.asarray([[1], [-(2**25)]])
    result = jax_cudnn.gated_matmul(a, gate, jnp.asarray([[0], [1]]), activation="relu")
    assert result.tolist() == [[1]]
    weak = jax.lax.broadcast(jnp.asarray(3), (2, 2))
    like = jax_cudnn.matmul(weak, weak)
    both = jax_cudnn.gated_matmul(weak, weak, weak, activation="relu")
    assert (both.aval.weak_type, both.dtype) == (like.aval.weak_type, like.dtype)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_an_activation_sees_the_gates_own_axes(dtype: str) -> None:
    a, gate, up = (jnp.ones(shape, dtype) for shape in [(2, 3), (3, 4), (5, 3, 4)])
    for activation in (_of_rank, lambda x: jnp.reshape(x, (2, 4))):
        result = jax_cudnn.gated_matmul(a, gate, up, activation=activation)
        assert_close(result, jnp.full((5, 2, 4), 9, dtype))


def test_complex_gates_stay_complex() -> None:
    a, w = jnp.ones((4, 8), "complex64"), jnp.full((8, 6), 1j, "complex64")
    result = jax_cudnn.gated_matmul(a, w, w, activation=lambda z: z * jnp.exp(0.5j))
    assert_close(result, jnp.full((4, 6), -64 * np.exp(0.5j), "complex64"))
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(TypeError, match="the gate's product is complex64"),
    ):
        jax_cudnn.gated_matmul(a.real, w, w.real)


@pytest.mark.parametrize("gate_spec", [(), (None, "y")])
@pytest.mark.parametrize("up_spec", [(), (None, "y")])
def test_gradients_of_typed_shardings(gate_spec: Spec, up_spec: Spec) -> None:
    mesh = mesh_of(AxisType.Explicit, x=2, y=2)
    shapes, specs = ((4, 8), (8, 6), (8, 6)), [("x",), gate_spec, up_spec]
    operands = placed(mesh, [jnp.ones(shape) for shape in shapes], specs)

    def plain(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ gate) * (x @ up)

    with jax.set_mesh(mesh):
        found, wanted = (
            jax.grad(lambda *x, f=f: jnp.sum(f(*x)), (0, 1, 2))(*operands)
            for f in (jax_cudnn.gated_matmul, plain)
        )
    for x, y in zip(found, wanted, strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


def test_columns_that_differ_are_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"^gated_matmul: gate is f32\[8,16\] and up f32\[8,3\], so that their "
        r"products with a are \[5, 16\] and \[5, 3\]\. The first must broadcast",
    ):
        jax_cudnn.gated_matmul(jnp.ones((5, 8)), jnp.ones((8, 16)), jnp.ones((8, 3)))
