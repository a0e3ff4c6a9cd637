# SPDX-License-Identifier: Apache-2.0
"""Tests layers in f8: exact rounding, gradients, transformations, what is refused."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import checkpoint_policies, f8, plans
from tests.common.evaluating import with_pullback
from tests.products.shared.f8_dense import (
    RECIPES,
    ULP,
    by_recipe,
    close,
    normal,
    step,
    truth,
)


@pytest.mark.once
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", list(ULP))
@pytest.mark.parametrize("shape", [(24,), (3, 8), (2, 3, 4)])
def test_products_are_those_of_the_rounded(dtype: str, shape: tuple[int, ...]) -> None:
    x = normal(0, *shape, 16).astype(dtype)
    w = normal(1, 16, 48).astype(dtype) / 16
    grad = (normal(2, *shape, 48) * 1e-3).astype(dtype)
    y, grads = with_pullback(f8.dense, (x, w), grad)
    for found, wanted in zip((y, *grads), truth(x, w, grad), strict=True):
        assert found.dtype == dtype
        close(found, wanted, ulp=ULP[dtype])


@pytest.mark.once
def test_weights_keep_their_dtype() -> None:
    x, w = normal(0, 32, 16).astype("bfloat16"), normal(1, 16, 32)
    grad = normal(2, 32, 32).astype("bfloat16")
    y, grads = with_pullback(f8.dense, (x, w), grad)
    assert (y.dtype, *(each.dtype for each in grads)) == ("bfloat16",) * 2 + (
        "float32",
    )
    close(grads[1], truth(x, w, grad)[2], ulp=ULP["float32"])


@pytest.mark.once
def test_bias_and_activation() -> None:
    x, w, bias = normal(0, 6, 16), normal(1, 16, 8), normal(2, 8)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        return f8.dense(x, w, bias=bias, activation="gelu")

    grad = normal(4, 6, 8)
    y, (_, _, by_bias) = with_pullback(layer, (x, w, bias), grad)
    sums = truth(x, w)[0] + np.asarray(bias, np.float64)
    wanted, inner = jax.vjp(jax.nn.gelu, jnp.asarray(sums, jnp.float32))
    close(y, np.asarray(wanted, np.float64), ulp=1e-5)
    (grad,) = inner(grad)
    close(by_bias, np.asarray(grad, np.float64).sum(0), ulp=1e-5)
    # A bias by rows is broadcast the other way.
    rows = normal(3, 6, 1)
    by_rows = jax.jit(jax.grad(lambda r: f8.dense(x, w, bias=r).sum()))(rows)
    np.testing.assert_allclose(by_rows, np.full((6, 1), 8.0))


@pytest.mark.once
def test_several_axes_are_summed() -> None:
    """As `jnp.tensordot` has them: a projection to heads, and back."""
    x, w = normal(0, 2, 5, 16), normal(1, 16, 3, 8)
    grad = normal(3, 2, 5, 3, 8)
    heads, grads = with_pullback(f8.dense, (x, w), grad)
    flat = truth(x, w.reshape(16, 24), grad.reshape(2, 5, 24))
    close(heads, flat[0].reshape(heads.shape), ulp=1e-6)
    for found, wanted in zip(grads, flat[1:], strict=True):
        close(found, wanted.reshape(found.shape), ulp=1e-6)
    v = normal(2, 3, 8, 16)
    merged = jax.jit(functools.partial(f8.dense, axes=2))(heads, v)
    wanted = truth(heads.reshape(2, 5, 24), v.reshape(24, 16))[0]
    close(merged, wanted, ulp=1e-6)


@pytest.mark.once
def test_a_gated_mlp() -> None:
    x = normal(0, 12, 16)
    weights = normal(1, 16, 32), normal(2, 16, 32), normal(3, 32, 16)
    gate, up = (truth(x, w)[0] for w in weights[:2])
    hidden = np.asarray(jax.nn.silu(jnp.asarray(gate, jnp.float32)) * up, np.float32)
    close(jax.jit(f8.gated_mlp)(x, *weights), truth(hidden, weights[2])[0], ulp=1e-2)
    recipe = f8.Delayed()
    state = f8.gated_mlp_state(recipe)

    def loss(state: Any) -> Any:
        return f8.gated_mlp(x, *weights, recipe=recipe, state=state).sum()

    following = jax.jit(jax.grad(loss))(state)
    np.testing.assert_array_equal(following.gate.x, following.up.x)
    assert all(float(each[-1]) == 1 for each in jax.tree.leaves(following))


@pytest.mark.once
def test_an_infinite_cotangent_is_seen() -> None:
    """Loss scaling looks for what is not finite in gradients."""
    x, w = normal(0, 8, 16), normal(1, 16, 8)
    for recipe in RECIPES:
        state = f8.dense_state(recipe)

        def layer(x: Any, w: Any, recipe: Any = recipe, state: Any = state) -> Any:
            return f8.dense(x, w, recipe=recipe, state=state)

        for value in (np.inf, np.nan):
            grad = np.array(normal(2, 8, 8))
            grad[3, 4] = value
            _, (x_grad, w_grad) = with_pullback(layer, (x, w), grad)
            assert not np.isfinite(np.asarray(x_grad[3])).any()
            assert np.isfinite(np.delete(np.asarray(x_grad), 3, 0)).all()
            assert not np.isfinite(np.asarray(w_grad[:, 4])).any()
            assert np.isfinite(np.delete(np.asarray(w_grad), 4, 1)).all()


@pytest.mark.once
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_bias_keeps_its_dtype(dtype: str) -> None:
    x, w = normal(0, 256, 16).astype(dtype), normal(1, 16, 8).astype(dtype)
    bias = normal(2, 8) * 1e3
    grad = normal(3, 256, 8).astype(dtype)
    y, back = jax.vjp(lambda bias: f8.dense(x, w, bias=bias), bias)
    close(y, truth(x, w)[0] + np.asarray(bias, np.float64), ulp=ULP[dtype])
    (found,) = back(grad)
    close(found, np.asarray(grad, np.float64).sum(0), ulp=1e-6)


# --- transformations ------------------------------------------------------------------


@pytest.mark.sampled
@by_recipe
def test_higher_orders_are_those_of_the_reference(recipe: Any) -> None:
    """Forward mode and second derivatives, beside the same in f32."""
    x, w, along = normal(0, 32, 16), normal(1, 16, 32) / 4, normal(2, 16, 32)
    state = f8.dense_state(recipe)

    def loss(w: Any, state: Any = state, x: Any = x) -> Any:
        return jnp.sin(f8.dense(x, w, recipe=recipe, state=state)).mean()

    if state is not None:
        for _ in range(2):
            state = jax.jit(jax.grad(loss, 1))(w, state)
    run = functools.partial(loss, state=state)

    def plain(w: Any) -> Any:
        return jnp.sin(x @ w).mean()

    wanted = jax.jvp(jax.grad(plain), (w,), (along,))[1]

    @jax.jit
    def products(w: Any) -> list[Any]:
        return [
            jax.jvp(jax.grad(run), (w,), (along,))[1],
            jax.grad(lambda w: (jax.grad(run)(w) * along).sum())(w),
            jax.grad(lambda w: jax.jvp(run, (w,), (along,))[1])(w),
            jax.grad(lambda w: (jax.grad(jax.jit(run))(w) * along).sum())(w),
        ]

    # Rounding of normal numbers is an error of 5.3 % in cotangents (f8_e5m2) and of
    # 2.6 % in x and w (f8_e4m3fn). Together they are 6.1 % of the product, with a
    # standard deviation of 0.5 % over draws.
    for product in products(w):
        close(product, np.asarray(wanted, np.float64), ulp=0.08)
    tangent = jax.jvp(lambda x: f8.dense(x, w), (x,), (x,))[1]
    close(tangent, truth(x, w)[0] * 1.0, ulp=0.05)


@pytest.mark.once
@pytest.mark.sampled
@pytest.mark.parametrize(
    "recipe", [f8.Current(), f8.MXFP8(), f8.NVFP4()], ids=lambda x: type(x).__name__
)
def test_forward_mode_of_forward_mode(recipe: Any) -> None:
    """A product is linear in each operand, so the second derivative is known."""
    x, dx = normal(1, 5, 16), normal(2, 5, 16)
    w, dw = normal(3, 16, 7), normal(4, 16, 7)

    def along(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.jvp(lambda *a: f8.dense(*a, recipe=recipe), (x, w), (dx, dw))[1]

    got = jax.jvp(along, (x, w), (dx, dw))[1]
    want = 2 * np.asarray(dx, np.float64) @ np.asarray(dw, np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@by_recipe
def test_scan_and_remat(recipe: Any) -> None:
    """Layers in a scan, with and without remat, equal layers one by one."""
    count = 3
    w, x = normal(0, count, 16, 16) / 4, normal(1, 8, 16)
    one = f8.dense_state(recipe)
    states = jax.tree.map(lambda s: jnp.stack([s] * count), one)

    def layer(x: Any, w: Any, state: Any) -> Any:
        return jnp.tanh(f8.dense(x, w, recipe=recipe, state=state))

    def by_scan(w: Any, states: Any, run: Any) -> Any:
        def body(x: Any, given: Any) -> Any:
            return run(x, *given), None

        return jax.lax.scan(body, x, (w, states))[0].sum()

    def one_by_one(w: Any, states: Any) -> Any:
        y = x
        for i in range(count):
            y = layer(y, w[i], jax.tree.map(lambda s, i=i: s[i], states))
        return y.sum()

    policy = checkpoint_policies.f8_saveable
    runs = layer, jax.checkpoint(layer), jax.checkpoint(layer, policy=policy)
    in_turn = jax.jit(jax.grad(one_by_one, (0, 1)))
    for _ in range(2):
        wanted, following = in_turn(w, states)
        for run in runs:
            scanned = jax.jit(jax.grad(by_scan, (0, 1)), static_argnums=2)
            found = scanned(w, states, run)
            pairs = map(jax.tree.leaves, (found, (wanted, following)))
            for y, other in zip(*pairs, strict=True):
                # A number beside a border of f8 may be rounded the other way.
                close(y, np.asarray(other, np.float64), ulp=0.01)
        states = following


@pytest.mark.sampled
@by_recipe
def test_64_bits_are_no_matter(recipe: Any) -> None:
    with jax.enable_x64(True):
        x, w = normal(0, 8, 16).astype("float32"), normal(1, 16, 8).astype("float32")
        grad = x[:, :8]
        (y, *_), state = step(f8.dense_state(recipe), x, w, grad, recipe)
        assert y.dtype == jnp.float32
        assert all(each.dtype == jnp.float32 for each in jax.tree.leaves(state))
        step(state, x, w, grad, recipe)


@by_recipe
def test_symbolic_sizes(recipe: Any) -> None:
    w, state = normal(1, 16, 8), f8.dense_state(recipe)

    def gradients(x: Any, w: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return f8.dense(x, w, recipe=recipe, state=state)

        y, back = jax.vjp(layer, x, w)
        return y, *back(y)

    (rows,) = jax.export.symbolic_shape("rows")
    kind = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    exported = jax.export.export(jax.jit(gradients))(kind, w)
    x = normal(0, 24, 16)
    for y, other in zip(exported.call(x, w), jax.jit(gradients)(x, w), strict=True):
        close(y, np.asarray(other, np.float64), ulp=2e-3)


def test_a_step_with_a_state_is_exported() -> None:
    recipe = f8.Delayed()
    x, w = normal(0, 8, 16), normal(1, 16, 8)
    state = f8.dense_state(recipe)
    run = jax.jit(functools.partial(step, recipe=recipe))
    exported = jax.export.export(run)(state, x, w, x[:, :8])
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    read = jax.export.deserialize(exported.serialize())
    found, wanted = (each(state, x, w, x[:, :8]) for each in (read.call, run))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_strict_promotion() -> None:
    """Of dtypes and of ranks, forward, backward and in forward mode."""
    x, w, bias = normal(0, 8, 16).astype("bfloat16"), normal(1, 16, 8), normal(2, 8)

    def layer(x: Any, w: Any, bias: Any) -> Any:
        return f8.dense(x, w, bias=bias)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        y, back = jax.vjp(layer, x, w, bias)
        back(y)
        jax.jvp(layer, (x, w, bias), (x, w, bias))


def test_f8_copies_are_what_is_saved() -> None:
    x, w = normal(0, 64, 32).astype("bfloat16"), normal(1, 32, 16).astype("bfloat16")

    def layer(x: Any) -> Any:
        return f8.dense(jnp.sin(x), w).astype(jnp.float32).sum()

    saved = jax.checkpoint(layer, policy=checkpoint_policies.f8_saveable)
    text = str(jax.make_jaxpr(jax.grad(saved))(x))
    # One copy of x: the backward pass does not make it again.
    assert len(re.findall(r"u8\[64,32\] = name", text)) == 1
    again = str(jax.make_jaxpr(jax.grad(jax.checkpoint(layer)))(x))
    assert len(re.findall(r"u8\[64,32\] = name", again)) == 2


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_copies_for_a_gpu_are_conversions_of_arrays_in_row_order(
    implementation: Any,
) -> None:
    x, w = normal(0, 64, 32).astype("bfloat16"), normal(1, 32, 48).astype("bfloat16")

    def gradients(x: Any, w: Any) -> Any:
        layer = functools.partial(f8.dense, implementation=implementation)
        y, back = jax.vjp(layer, x, w)
        return y, *back(y)

    def text(function: Any, platform: str, *operands: Any) -> str:
        traced = jax.jit(function).trace(*operands)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    # x, w and the cotangent, of which two products have copies each.
    found = text(gradients, "cuda", x, w)
    assert found.count("@LayoutConstraint") == 3
    examples = text(jax.vmap(gradients, (0, None)), "cuda", jnp.stack([x, x]), w)
    assert examples.count("@LayoutConstraint") == 3
    # XLA's products keep the rounding. cuDNN's are no conversions back, and barriers
    # would keep XLA from writing both copies at once.
    barriers = found.count("stablehlo.optimization_barrier")
    assert barriers == (6 if implementation == "xla" else 0)
    if implementation == "xla":
        assert "LayoutConstraint" not in text(gradients, "cpu", x, w)
    jax.export.export(
        jax.jit(gradients),
        platforms=["cuda"],
        disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
    )(x, w)


# --- what ran, and errors -------------------------------------------------------------


@by_recipe
def test_all_three_products_are_in_f8(recipe: Any) -> None:
    """A layer of whose products one is in 16 bits fails here."""
    x, w = normal(0, 64, 32).astype("bfloat16"), normal(1, 32, 16).astype("bfloat16")
    state = f8.dense_state(recipe)

    def loss(x: Any, w: Any) -> Any:
        y = f8.dense(x, w, recipe=recipe, state=state, activation="gelu")
        return y.astype(jnp.float32).sum()

    text = str(plans.inspect(jax.grad(loss, (0, 1)), x, w))
    rows = [line for line in text.splitlines() if "[1," in line]
    found = [re.findall(r"(\w+)\[1,", line)[:2] for line in rows]
    assert found == [
        ["f8_e4m3fn", "f8_e4m3fn"],
        ["f8_e5m2", "f8_e4m3fn"],
        ["f8_e4m3fn", "f8_e5m2"],
    ]


_dense: Any = f8.dense
_gated: Any = f8.gated_mlp
_delayed: Any = f8.Delayed
_current: Any = f8.Current
_BAD: dict[str, tuple[type[Exception], str, Any]] = {
    "dtype": (TypeError, "x is i32", lambda x, w: _dense(x.astype(int), w)),
    "f8": (
        TypeError,
        "call jax_cudnn.matmul",
        lambda x, w: _dense(x.astype(jnp.float8_e5m2), w),
    ),
    "shapes": (ValueError, "must be the first of w", lambda x, w: _dense(x, w.T)),
    "axes": (ValueError, "axes=0", lambda x, w: _dense(x, w, axes=0)),
    "too many axes": (ValueError, "axes=2", lambda x, w: _dense(x, w, axes=2)),
    "no recipe": (TypeError, "is no recipe", lambda x, w: _dense(x, w, recipe=None)),
    "no state": (
        TypeError,
        "f8.Delayed needs three",
        lambda x, w: _dense(x, w, recipe=f8.Delayed()),
    ),
    "a state too much": (
        TypeError,
        "f8.Current() has none",
        lambda x, w: _dense(x, w, state=f8.dense_state(f8.Delayed())),
    ),
    "another history": (
        ValueError,
        "a history of 4 has f32 [6]",
        lambda x, w: _dense(
            x, w, recipe=f8.Delayed(history=4), state=f8.dense_state(f8.Delayed())
        ),
    ),
    "complex bias": (
        TypeError,
        "bias is complex64",
        lambda x, w: _dense(x, w, bias=jnp.ones(4, jnp.complex64)),
    ),
    "no recipe of a state": (
        TypeError,
        "is no recipe",
        lambda x, w: f8.dense_state(_delayed),
    ),
    "gated state, an int": (
        TypeError,
        "f8.Delayed needs three",
        lambda x, w: _gated(x, w, w, w.T, recipe=f8.Delayed(), state=5),
    ),
    "history": (ValueError, "is below 1", lambda x, w: f8.Delayed(history=0)),
    "no int": (TypeError, "is not an int", lambda x, w: _delayed(history=1.5)),
    "margin": (TypeError, "margin=0.5", lambda x, w: _current(margin=0.5)),
    "activation": (
        ValueError,
        "activation='swosh'",
        lambda x, w: _dense(x, w, activation="swosh"),
    ),
    "bias": (
        ValueError,
        "does not broadcast",
        lambda x, w: _dense(x, w, bias=jnp.ones(7)),
    ),
    "gated shapes": (ValueError, "up f32[3,4]", lambda x, w: _gated(x, w, w[:3], w.T)),
    "gated state": (
        TypeError,
        "state has 2 parts",
        lambda x, w: _gated(x, w, w, w.T, recipe=f8.Delayed(), state=(1, 2)),
    ),
}


@pytest.mark.parametrize("name", list(_BAD))
def test_what_is_refused(name: str) -> None:
    error, message, call = _BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call(normal(0, 8, 16), normal(1, 16, 4))
