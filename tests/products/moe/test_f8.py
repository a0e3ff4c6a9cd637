# SPDX-License-Identifier: Apache-2.0
"""Tests products in groups in f8 against float64 of rounded operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import f8, ragged_dot
from tests.products.shared import block_scaled
from tests.products.shared.f8_dense import ROUNDS_TWICE
from tests.products.shared.grouped import grouped

pytestmark = [pytest.mark.once]

_SIZES = jnp.array([10, 0, 25, 1])
_ROWS, _K, _N, _READ = 40, 32, 48, 36


def _problem(dtype: Any) -> tuple[jax.Array, ...]:
    """Return x, w, a bias and a cotangent; rows in no group are NaN."""
    rng = np.random.default_rng(0)
    shapes = ((_ROWS, _K), (4, _K, _N), (4, _N), (_ROWS, _N))
    x, w, bias, grad = [
        jnp.asarray(np.asarray(rng.normal(size=s), "f4")) for s in shapes
    ]
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
        jnp.asarray(np.asarray(rng.standard_normal(shape), "f4"))
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


_BLOCKS = {"MXFP8": f8.MXFP8(), "NVFP4": f8.NVFP4()}


def _in_blocks(x: Any, name: str) -> np.ndarray:
    """Return what the copy of an array stands for, with blocks along its last axis."""
    x = np.asarray(x, np.float64)
    return block_scaled.rounded(x.reshape(-1, x.shape[-1]), name).reshape(x.shape)


@pytest.mark.parametrize("name", list(_BLOCKS))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_blocks_lie_along_what_is_summed_over(name: str, dtype: Any) -> None:
    """Of sizes that blocks do not fill; the gradient of w reads the product's rows."""
    recipe, rounded = _BLOCKS[name], functools.partial(_in_blocks, name=name)
    x, w, bias, grad = _problem(jnp.bfloat16)
    x, grad = x.astype(dtype), (grad * 256).astype(dtype)
    w = w.astype(jnp.bfloat16).astype(jnp.float32)

    @jax.jit
    def run(x: jax.Array, w: jax.Array) -> Any:
        y, back = jax.vjp(
            lambda x, w: f8.ragged_dot(x, w, _SIZES, bias=bias, recipe=recipe), x, w
        )
        return y, *back(grad)

    read, cotangent = (each.at[_READ:].set(0) for each in (x, grad))
    rows = rounded(read)
    turned = rounded(np.swapaxes(w, 1, 2))
    forward = grouped(rows, np.swapaxes(turned, 1, 2), _SIZES, bias)
    narrow = grouped(rows, rounded(w), _SIZES, cotangent=rounded(cotangent))
    wide = grouped(rows, w, _SIZES, cotangent=cotangent)
    got = run(x, w)
    assert [each.dtype for each in got] == [dtype, dtype, jnp.float32]
    wanted = forward.output, narrow.rows, wide.matrices
    for each, exact in zip(got, wanted, strict=True):
        _assert_close(each, exact, 2**-7)
    assert np.all(np.asarray(got[0][_READ:]) == 0)
    assert np.all(np.asarray(got[1][_READ:]) == 0)


@pytest.mark.parametrize("name", list(_BLOCKS))
def test_derivatives_by_blocks_agree_with_those_of_rounded_operands(name: str) -> None:
    x, w, _, _ = (each.at[_READ:].set(0) for each in _problem(jnp.float32))
    rng = np.random.default_rng(1)
    dx, dw, grad = (
        jnp.asarray(np.asarray(rng.standard_normal(shape), "f4"))
        for shape in (x.shape, w.shape, (_ROWS, _N))
    )
    dx = dx.at[_READ:].set(0)
    run = functools.partial(f8.ragged_dot, group_sizes=_SIZES, recipe=_BLOCKS[name])
    _, along = jax.jit(lambda: jax.jvp(run, (x, w), (dx, dw)))()
    rows = _in_blocks(x, name)
    matrices = np.swapaxes(_in_blocks(np.swapaxes(w, 1, 2), name), 1, 2)
    want = grouped(dx, matrices, _SIZES).output + grouped(rows, dw, _SIZES).output
    _assert_close(along, want, 1e-5)

    def gradients(x: jax.Array, w: jax.Array) -> Any:
        return jax.vjp(run, x, w)[1](grad)

    # The gradient by x is linear in w, that by w in x.
    _, (by_x, by_w) = jax.jit(lambda: jax.jvp(gradients, (x, w), (dx, dw)))()
    cotangent = _in_blocks(grad.at[_READ:].set(0), name)
    _assert_close(by_x, grouped(rows, dw, _SIZES, cotangent=cotangent).rows, 1e-5)
    _assert_close(by_w, grouped(dx, w, _SIZES, cotangent=grad).matrices, 1e-5)


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
        jnp.asarray(np.asarray(rng.integers(-3, 4, shape), "f4"))
        for shape in ((9, 4), (2, 4, 5))
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
