# SPDX-License-Identifier: Apache-2.0
"""Tests products in groups and experts in f8 against float64 of rounded operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_cudnn import f8, moe, ragged_dot
from jax_cudnn.flax import linen
from jax_cudnn.flax.nnx import MixtureOfExperts
from tests.common.devices import mesh_of
from tests.products.moe import truth
from tests.products.moe.truth import mixture
from tests.products.shared.f8_dense import ROUNDS_TWICE
from tests.products.shared.grouped import grouped

pytestmark = [pytest.mark.once]

_SIZES = jnp.array([10, 0, 25, 1])
_ROWS, _K, _N, _READ = 40, 32, 48, 36


def _problem(dtype: Any) -> tuple[jax.Array, ...]:
    """Return x, w, a bias and a cotangent; rows in no group are NaN."""
    rng = np.random.default_rng(0)
    shapes = ((_ROWS, _K), (4, _K, _N), (4, _N), (_ROWS, _N))
    x, w, bias, grad = [jnp.asarray(rng.normal(size=s), "f4") for s in shapes]
    x, grad = x.at[_READ:].set(jnp.nan), 1e-3 * grad.at[_READ:].set(jnp.nan)
    return x.astype(dtype), w, bias, grad.astype(dtype)


def _rounded(x: jax.Array, dtype: Any) -> np.ndarray:
    """Return what the f8 copy of an array stands for, in float64."""
    x = x.at[_READ:].set(0) if len(x) == _ROWS else x
    copy = f8.quantize_current(x, dtype)
    return np.asarray(copy.values, np.float64) * float(copy.scale)


def _assert_close(got: jax.Array, want: np.ndarray, eps: float) -> None:
    """Judge by the norm, and by the largest entry where nothing rounds twice."""
    got = np.asarray(got, np.float64)
    if ROUNDS_TWICE:
        assert np.linalg.norm(got - want) <= (eps + 0.02) * np.linalg.norm(want)
    else:
        np.testing.assert_allclose(got, want, rtol=0, atol=eps * np.abs(want).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_product_and_its_gradients_are_those_of_rounded_operands(
    dtype: Any,
) -> None:
    x, w, bias, grad = _problem(dtype)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, bias: jax.Array) -> Any:
        y, back = jax.vjp(
            lambda *given: f8.ragged_dot(given[0], given[1], _SIZES, bias=given[2]),
            *(x, w, bias),
        )
        return y, *back(grad)

    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    rounded = _rounded(x, e4m3), _rounded(w, e4m3)
    forward = grouped(*rounded, _SIZES, bias)
    narrow = grouped(*rounded, _SIZES, cotangent=_rounded(grad, e5m2))
    wide = grouped(*rounded, _SIZES, cotangent=grad)
    got = run(x, w, bias)
    assert [each.dtype for each in got] == [dtype, dtype, jnp.float32, jnp.float32]
    want = forward.output, narrow.rows, wide.matrices, wide.bias
    for each, exact, eps in zip(got, want, (2**-7, 2**-7, 2**-7, 1e-2), strict=True):
        _assert_close(each, exact, eps)
    # Rows in no group are 0, and reach neither scales nor gradients.
    assert np.all(np.asarray(got[0][_READ:]) == 0)
    assert np.all(np.asarray(got[1][_READ:]) == 0)


def test_tangents_and_second_derivatives_are_those_of_rounded_operands() -> None:
    x, w, _, _ = _problem(jnp.float32)
    x = x.at[_READ:].set(0)
    rng = np.random.default_rng(1)
    dx, dw, grad = (
        jnp.asarray(rng.standard_normal(shape), "f4")
        for shape in (x.shape, w.shape, (_ROWS, _N))
    )
    run = functools.partial(f8.ragged_dot, group_sizes=_SIZES)
    _, along = jax.jit(lambda: jax.jvp(run, (x, w), (dx, dw)))()
    xs, ws = _rounded(x, jnp.float8_e4m3fn), _rounded(w, jnp.float8_e4m3fn)
    want = grouped(dx, ws, _SIZES).output + grouped(xs, dw, _SIZES).output
    _assert_close(along, want, 1e-5)

    def gradient(w: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: run(x, w), x)[1](grad)[0]

    # The gradient by x is linear in w, and so is its tangent in that of w.
    _, along = jax.jit(lambda: jax.jvp(gradient, (w,), (dw,)))()
    want = grouped(xs, dw, _SIZES, cotangent=_rounded(grad, jnp.float8_e5m2)).rows
    _assert_close(along, want, 1e-5)

    def of_matrices(x: jax.Array) -> jax.Array:
        return jax.vjp(lambda w: run(x, w), w)[1](grad)[0]

    # The gradient by w has the cotangent as it came, and so has its tangent.
    dx = dx.at[_READ:].set(0)
    _, along = jax.jit(lambda: jax.jvp(of_matrices, (x,), (dx,)))()
    want = grouped(dx, w, _SIZES, cotangent=grad).matrices
    _assert_close(along, want, 1e-5)


def test_sums_over_many_rows_of_f16_fit_weights_of_f32() -> None:
    x = jnp.full((4096, 16), 8.0, jnp.float16)
    w = jnp.full((2, 16, 16), 0.01, jnp.float32)

    def loss(w: jax.Array) -> jax.Array:
        y = f8.ragged_dot(x, w, jnp.array([4096, 0]))
        return 4 * jnp.sum(y.astype(jnp.float32))

    want = np.stack([np.full((16, 16), 4 * 4096 * 8.0), np.zeros((16, 16))])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), want, rtol=2**-8)


def test_delayed_scales_come_from_the_state() -> None:
    """And the gradient by the state is the next state, as that of `f8.dense`."""
    recipe = f8.Delayed(history=2)
    x, w, _, grad = (each[:_READ] for each in _problem(jnp.float32))
    sizes = jnp.array([10, 0, 25, 1])

    def loss(state: Any, product: Any) -> jax.Array:
        return jnp.sum(product(state) * grad)

    def in_groups(state: Any) -> jax.Array:
        return f8.ragged_dot(x, w, sizes, recipe=recipe, state=state)

    def dense(state: Any) -> jax.Array:
        # It has the largest numbers of the same arrays.
        flat = jnp.swapaxes(w, 0, 1).reshape(_K, -1)
        y = f8.dense(x, flat, recipe=recipe, state=state).reshape(_READ, 4, _N)
        ends = jnp.cumsum(sizes)
        number = jnp.searchsorted(ends, jnp.arange(_READ), side="right")
        return jnp.take_along_axis(y, number[:, None, None], 1)[:, 0]

    state: Any = f8.dense_state(recipe)
    for _ in range(2):
        got = jax.jit(jax.grad(loss), static_argnums=1)(state, in_groups)
        want = jax.jit(jax.grad(loss), static_argnums=1)(state, dense)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        state = got
    y, following = f8.ragged_dot(
        x, w, sizes, recipe=recipe, state=state, return_state=True
    )
    assert following.x[1] > 0
    scale = f8.scale_from_history(state.x[1:-1])
    np.testing.assert_allclose(float(scale), float(f8.amax(x)) / 448, rtol=1e-2)
    rounded = [_rounded(each, jnp.float8_e4m3fn) for each in (x, w)]
    _assert_close(y, grouped(rounded[0], rounded[1], sizes).output, 3e-2)


def test_operands_of_f8_go_to_a_graph() -> None:
    """With gradients as JAX has them, without scales."""
    rng = np.random.default_rng(2)
    lhs, rhs = (
        jnp.asarray(rng.integers(-3, 4, shape), "f4") for shape in ((9, 4), (2, 4, 5))
    )
    sizes = jnp.array([3, 4])

    def run(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        a, b = lhs.astype(jnp.float8_e5m2), rhs.astype(jnp.float8_e4m3fn)
        return ragged_dot(a, b, sizes, preferred_element_type=jnp.float32)

    assert "a f8_e5m2[1,9,4], b f8_e4m3fn[2,4,5]" in str(jax.make_jaxpr(run)(lhs, rhs))
    y, back = jax.vjp(run, lhs, rhs)
    want = grouped(lhs, rhs, sizes, cotangent=np.ones(y.shape))
    np.testing.assert_array_equal(y, want.output)
    for a, b in zip(back(jnp.ones(y.shape)), (want.rows, want.matrices), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": jnp.ones((6, 3, 1))}, ValueError, "x is f32[6,3,1]. It must have"),
        ({"w": jnp.ones((2, 4, 4))}, ValueError, "x is f32[6,3] and w f32[2,4,4]"),
        ({"x": jnp.ones((6, 3), "int32")}, TypeError, "x is i32[6,3]. Supported"),
        ({"group_sizes": jnp.ones(2)}, TypeError, "group_sizes is f32[2]. It must"),
        ({"recipe": "delayed"}, TypeError, "recipe='delayed' is no recipe"),
        ({"recipe": f8.Delayed()}, TypeError, "state is NoneType, and f8.Delayed"),
        ({"bias": jnp.ones((3, 4))}, ValueError, "bias is f32[3,4], which does not"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {
        "x": jnp.ones((6, 3)),
        "w": jnp.ones((2, 3, 4)),
        "group_sizes": jnp.array([2, 4]),
    }
    with pytest.raises(error) as caught:
        f8.ragged_dot(**(given | changes))
    assert str(caught.value).startswith(f"f8.ragged_dot: {message}")


# --- the mixture of experts -----------------------------------------------------------


def _mixture(**sizes: int) -> dict[str, Any]:
    """Arrays that f8 holds exactly, so that hidden layers alone are rounded."""
    arrays = truth.drawn(3, **sizes)
    del arrays["selection_bias"]
    return {
        name: x if name == "router_w" else jnp.round(x * 4) / 16
        for name, x in arrays.items()
    }


def _loss(options: dict[str, Any], arrays: dict[str, Any]) -> Any:
    y, _ = moe.layer(**arrays, **options)
    return jnp.sum(jnp.sin(y)), y


def test_experts_in_f8_are_near_those_of_float64() -> None:
    arrays = _mixture(T=24, D=16, E=8, F=32, G=16)
    run = jax.jit(
        jax.value_and_grad(
            functools.partial(_loss, {"top_k": 2, "recipe": f8.Current()}), has_aux=True
        )
    )
    (_, got), gradients = run(arrays)
    want = mixture(**arrays, top_k=2).output
    error = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
    # Hidden layers have 4 bits, so it is no product in more.
    assert 1e-3 < error < 5e-2
    plain = functools.partial(_loss, {"top_k": 2})
    exact = jax.jit(jax.grad(plain, has_aux=True))(arrays)[0]
    for name, x in gradients.items():
        distance = np.linalg.norm(x - exact[name]) / np.linalg.norm(exact[name])
        assert distance < 0.2, name


def test_experts_in_f8_over_eight_devices_are_those_of_one() -> None:
    """Each device has scales of its own, which are powers of two here."""
    arrays = _mixture(T=16, D=16, E=8, F=32, G=16)
    recipe = f8.Current(power_of_2=True)
    options: dict[str, Any] = {"top_k": 2, "recipe": recipe}
    _, want = jax.jit(functools.partial(_loss, options))(arrays)
    axes = {"expert_axis": "expert", "batch_axis": "data", "tensor_axis": "tensor"}
    mesh = mesh_of(data=2, expert=2, tensor=2)
    run = jax.value_and_grad(
        functools.partial(_loss, options | axes | {"mesh": mesh}), has_aux=True
    )
    (_, got), gradients = jax.jit(run)(arrays)
    # Small numbers of the hidden layer are rounded by other scales.
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * np.abs(want).max())
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in gradients.values())


def test_layers_of_flax_take_the_recipe() -> None:
    x = jnp.ones((5, 16)) / 3
    layer = MixtureOfExperts(
        16, 32, 4, 2, shared_features=16, recipe=f8.Current(), rngs=nnx.Rngs(0)
    )
    arrays = {name: getattr(layer, name)[...] for name in layer.parameter_names}
    want, _ = moe.layer(x, **arrays, top_k=2, recipe=f8.Current())
    np.testing.assert_array_equal(layer(x)[0], want)
    other = linen.MixtureOfExperts(
        32, 4, 2, shared_features=16, recipe=f8.Current()
    ).apply({"params": arrays}, x)
    np.testing.assert_array_equal(other[0], want)
    with pytest.raises(TypeError, match=r"^MixtureOfExperts: recipe=Delayed"):
        MixtureOfExperts(16, 32, 4, 2, recipe=f8.Delayed(), rngs=nnx.Rngs(0))  # type: ignore[arg-type]


def test_a_recipe_with_a_state_is_refused() -> None:
    arrays = _mixture(T=4, D=16, E=4, F=16, G=16)
    with pytest.raises(TypeError, match=r"^moe\.layer: recipe=Delayed.* is not f8\.C"):
        moe.layer(**arrays, top_k=1, recipe=f8.Delayed())  # type: ignore[arg-type]
    wide = {**arrays, "up_w": arrays["up_w"].astype(jnp.int32)}
    with pytest.raises(TypeError, match=r"^moe\.layer: up_w is i32"):
        moe.layer(**wide, top_k=1, recipe=f8.Current())
