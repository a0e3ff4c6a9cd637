# SPDX-License-Identifier: Apache-2.0
"""Tests the mixture of experts on one device against a loop in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.test_util import check_grads

from jax_cudnn import moe
from tests.common import drawn as numbers
from tests.products.moe.truth import PLAIN, Mixture, drawn, mixture

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SIZES = {"T": 13, "D": 6, "E": 5, "F": 7, "G": 3}
_run_layer = jax.jit(moe.layer, static_argnames=("top_k", "capacity_factor"))
_run_router = jax.jit(moe.router, static_argnames="top_k")


def _problem(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return random arrays and options."""
    sizes = {name: int(rng.integers(1, 9)) for name in "DEFG"}
    sizes["T"] = int(rng.choice([0, 1, 5, 17]))
    names = [*PLAIN]
    if rng.random() < 0.3:
        names.remove("gate_w")
    for name in ("selection_bias", "gate_bias", "up_bias", "down_bias"):
        if rng.random() < 0.5 and (name != "gate_bias" or "gate_w" in names):
            names.append(name)
    if rng.random() < 0.5:
        names += ["shared_up_w", "shared_down_w"]
        names += ["shared_gate_w"] if rng.random() < 0.7 else []
    arrays = drawn(int(rng.integers(99)), names, np.float64, **sizes)
    arrays.setdefault("gate_w", None)
    if rng.random() < 0.4:
        # All tokens choose one expert first.
        arrays["selection_bias"] = jnp.eye(sizes["E"], dtype=jnp.float64)[0] * 9
    options: dict[str, Any] = {
        "top_k": int(rng.integers(1, sizes["E"] + 1)),
        "scores": str(rng.choice(["softmax", "sigmoid"])),
        "normalize": bool(rng.random() < 0.6),
        "scale": float(rng.choice([1.0, 2.5])),
    }
    divisors = [n for n in range(2, sizes["E"] + 1) if sizes["E"] % n == 0]
    if divisors and rng.random() < 0.5:
        count = int(rng.choice(divisors))
        kept = -(-options["top_k"] * count // sizes["E"])
        options["groups"] = (count, kept)
    if rng.random() < 0.5:
        options["capacity_factor"] = float(rng.choice([0.2, 0.7, 1.0, 1.5]))
    return arrays, options


def _assert_is(got: tuple[jax.Array, moe.Auxiliary], want: Mixture, eps: float) -> None:
    y, auxiliary = got
    assert y.shape == want.output.shape
    found = {"output": y, **vars(auxiliary)}
    for name, value in want._asdict().items():
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), value, rtol=eps, atol=eps, err_msg=name
        )


@pytest.mark.parametrize("seed", range(48))
def test_random_layers_are_the_loop(seed: int) -> None:
    with jax.enable_x64(True):
        arrays, options = _problem(np.random.default_rng(seed))
        got = jax.jit(functools.partial(moe.layer, **options))(**arrays)
        _assert_is(got, mixture(**arrays, **options), 1e-11)


@pytest.mark.parametrize(
    ("dtype", "eps"), [("float32", 1e-5), ("bfloat16", 4e-2), ("float16", 5e-3)]
)
def test_each_dtype(dtype: str, eps: float) -> None:
    # Scaled as layers are, so that f16 holds all.
    arrays: dict[str, Any] = {
        name: x / len(x) ** 0.5 for name, x in drawn(0, dtype=dtype, **_SIZES).items()
    }
    y, auxiliary = _run_layer(**arrays, top_k=2)
    assert y.dtype == dtype
    assert {x.dtype for x in vars(auxiliary).values()} == {jnp.dtype("float32")}
    _assert_is((y, auxiliary), mixture(**arrays, top_k=2), eps)


def test_a_router_in_f32_beside_bf16_chooses_in_f32() -> None:
    arrays = drawn(1, PLAIN, "bfloat16", **_SIZES)
    # Equal in bf16.
    router = jnp.ones((_SIZES["D"], _SIZES["E"])) + 1e-4 * jnp.arange(5.0)[None]
    x = jnp.ones_like(arrays["x"])
    found = _run_router(x, router, top_k=2).experts
    np.testing.assert_array_equal(found, np.tile([[4, 3]], (_SIZES["T"], 1)))
    arrays["router_w"] = router
    y, _ = _run_layer(**arrays, top_k=2)
    assert y.dtype == jnp.bfloat16


def test_axes_of_tokens_are_kept() -> None:
    arrays = drawn(2, **_SIZES | {"T": 12})
    flat, _ = _run_layer(**arrays, top_k=2)
    routing = jax.eval_shape(
        functools.partial(moe.router, top_k=2, normalize=False),
        *(arrays["x"].reshape(3, 4, -1), arrays["router_w"]),
    )
    assert routing.experts.shape == routing.weights.shape == (3, 4, 2)
    arrays["x"] = arrays["x"].reshape(3, 4, -1)
    y, _ = _run_layer(**arrays, top_k=2)
    np.testing.assert_array_equal(y, flat.reshape(y.shape))
    arrays["x"] = arrays["x"][1, 2]
    y, _ = _run_layer(**arrays, top_k=2)
    np.testing.assert_allclose(y, flat[6], rtol=1e-5, atol=1e-5)


def _total(options: dict[str, Any], arrays: dict[str, Any]) -> jax.Array:
    y, auxiliary = moe.layer(**arrays, **options)
    losses = auxiliary.load_balance_loss + 0.1 * auxiliary.z_loss
    return jnp.sum(jnp.sin(y)) + losses


def _dense(options: dict[str, Any], w: dict[str, Any]) -> jax.Array:
    """Return the same of all experts for all tokens, differentiated by JAX."""
    k, x = options["top_k"], w["x"]
    z = x @ w["router_w"]
    s = jax.nn.softmax(z)
    e = s.shape[1]
    _, chosen = jax.lax.top_k(s + w["selection_bias"][None], k)
    hot = jax.nn.one_hot(chosen, e, dtype=s.dtype).sum(1)
    weights = s * hot / (s * hot).sum(1, keepdims=True)

    def product(spec: str, x: jax.Array, name: str) -> jax.Array:
        return jnp.einsum(spec, x, w[f"{name}_w"]) + w[f"{name}_bias"][None]

    gate, up = (product("td,edf->tef", x, name) for name in ("gate", "up"))
    y = product("tef,efd->ted", jax.nn.silu(gate) * up, "down")
    shared = jax.nn.silu(x @ w["shared_gate_w"]) * (x @ w["shared_up_w"])
    total = jnp.einsum("te,ted->td", weights, y) + shared @ w["shared_down_w"]
    balance = e * jnp.sum(hot.mean(0) / k * s.mean(0))
    z_loss = jnp.mean(jax.nn.logsumexp(z, axis=1) ** 2)
    return jnp.sum(jnp.sin(total)) + balance + 0.1 * z_loss


@pytest.mark.parametrize("top_k", [1, 3, 5])
def test_gradients_are_those_of_the_dense_formula(top_k: int) -> None:
    with jax.enable_x64(True):
        arrays = drawn(top_k, dtype=np.float64, **_SIZES)
        options: dict[str, Any] = {"top_k": top_k}
        for run in (
            lambda f: jax.value_and_grad(functools.partial(f, options))(arrays),
            lambda f: jax.jvp(functools.partial(f, options), (arrays,), (arrays,)),
        ):
            got, want = (jax.jit(run, static_argnums=0)(f) for f in (_total, _dense))
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-10), got, want
            )


def test_both_modes_and_second_order_agree_with_finite_differences() -> None:
    with jax.enable_x64(True):
        arrays = drawn(3, dtype=np.float64, **_SIZES)
        run = jax.jit(functools.partial(_total, {"top_k": 2, "capacity_factor": 0.8}))
        small = {name: x / 2 for name, x in arrays.items()}
        check_grads(run, (small,), order=2, modes=("fwd", "rev"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("capacity_factor", [None, 0.6])
def test_a_token_that_is_not_finite_spoils_itself_alone(
    value: float, capacity_factor: float | None
) -> None:
    arrays = drawn(4, **_SIZES)
    # With one choice, the last token takes no other token's place.
    top_k = 2 if capacity_factor is None else 1
    options: dict[str, Any] = {"top_k": top_k, "capacity_factor": capacity_factor}
    arrays["x"] = arrays["x"].at[-1].set(1.0)
    spoilt = arrays | {"x": arrays["x"].at[-1].set(value)}

    @jax.jit
    def run(w: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        y, back = jax.vjp(lambda x: moe.layer(**(w | {"x": x}), **options)[0], w["x"])
        return y, back(jnp.ones_like(y))[0]

    for got, want in zip(run(spoilt), run(arrays), strict=True):
        np.testing.assert_array_equal(got[:-1], want[:-1])
        assert not np.isfinite(got[-1]).any()


def test_a_spoilt_expert_reaches_its_own_tokens_alone() -> None:
    arrays = drawn(5, **_SIZES)
    arrays["selection_bias"] /= 10
    experts = _run_router(
        arrays["x"],
        arrays["router_w"],
        top_k=2,
        selection_bias=arrays["selection_bias"],
    ).experts
    own = np.asarray((experts == 0).any(1))
    assert 0 < own.sum() < _SIZES["T"]
    want, _ = _run_layer(**arrays, top_k=2)
    arrays["down_w"] = arrays["down_w"].at[0].set(jnp.nan)
    got, _ = _run_layer(**arrays, top_k=2)
    np.testing.assert_array_equal(got[~own], want[~own])
    assert np.isnan(got[own]).all()


def test_dropped_tokens_give_zero_whatever_they_are() -> None:
    arrays = drawn(6, PLAIN, **_SIZES)
    bias = 9 * jnp.eye(_SIZES["E"])[2]
    # All scores of NaN are alike: these tokens go to expert 0.
    spoilt = arrays | {"x": arrays["x"].at[-2:].set(jnp.nan)}
    # One row for each expert: the first token's.
    y, auxiliary = _run_layer(
        **spoilt, top_k=1, selection_bias=bias, capacity_factor=0.1
    )
    assert float(auxiliary.dropped) == pytest.approx(11 / 13)
    assert np.abs(y[0]).min() > 0
    assert np.isnan(y[-2]).all()
    others = jnp.array([*range(1, 11), 12])
    np.testing.assert_array_equal(y[others], np.zeros((11, _SIZES["D"])))


@pytest.mark.parametrize("seed", range(12))
def test_vmap_over_any_operands(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = drawn(seed, **_SIZES)
    chosen = {name for name in arrays if rng.random() < 0.3} or {"x"}
    axes = {name: 0 if name in chosen else None for name in arrays}
    stacked = {
        name: jnp.stack([x, x[::-1]]) if name in chosen else x
        for name, x in arrays.items()
    }
    gradient = jax.jit(jax.grad(functools.partial(_total, {"top_k": 2})))
    got = jax.jit(jax.vmap(gradient, (axes,)))(stacked)
    for i in range(2):
        example = {name: x[i] if name in chosen else x for name, x in stacked.items()}
        want = gradient(example)
        for name in arrays:
            scale = 1 + np.abs(want[name]).max()
            np.testing.assert_allclose(got[name][i], want[name], atol=2e-5 * scale)


def test_layers_in_a_scan_with_remat() -> None:
    layers = [drawn(seed, **_SIZES) for seed in range(3)]
    x = layers[0]["x"]
    for each in layers:
        del each["x"]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs) / 4, *layers)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def step(x: jax.Array, w: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        y, auxiliary = moe.layer(x, **w, top_k=2)
        return x + y, auxiliary.z_loss

    def scanned(w: Any) -> jax.Array:
        y, losses = jax.lax.scan(step, x, w)
        return jnp.sum(y**2) + jnp.sum(losses)

    def looped(w: Any) -> jax.Array:
        y, total = x, jnp.zeros(())
        for i in range(3):
            y, loss = step.__wrapped__(y, jax.tree.map(lambda a: a[i], w))  # noqa: B023
            total += loss
        return jnp.sum(y**2) + total

    got, want = (jax.jit(jax.grad(run))(stacked) for run in (scanned, looped))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-4)


def test_a_program_for_any_number_of_tokens() -> None:
    arrays = drawn(7, PLAIN, **_SIZES)
    x = arrays.pop("x")

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return moe.layer(x, **arrays, top_k=2)[0]

    (tokens,) = export.symbolic_shape("t")
    like = jax.ShapeDtypeStruct((tokens, x.shape[1]), x.dtype)
    exported = export.export(run)(like)
    np.testing.assert_allclose(exported.call(x[:5]), run(x[:5]), rtol=1e-5, atol=1e-5)


# --- the permutation ------------------------------------------------------------------


def test_a_permutation_sorts_by_expert_then_choice_then_token() -> None:
    experts = jnp.array([[2, 0], [0, 2], [2, 7], [0, -1]])
    permutation = jax.jit(moe.permutation, static_argnums=1, static_argnames="capacity")
    found = permutation(experts, 4)
    np.testing.assert_array_equal(found.group_sizes, [3, 0, 3, 0])
    # Numbers of token * 2 + choice; 8 is no choice.
    np.testing.assert_array_equal(found.source, [2, 6, 1, 0, 4, 3, 8, 8])
    np.testing.assert_array_equal(found.target, [[3, 2], [0, 5], [4, 8], [1, 8]])
    few = permutation(experts, 4, capacity=2)
    np.testing.assert_array_equal(few.group_sizes, [2, 0, 2, 0])
    np.testing.assert_array_equal(few.source, [2, 6, 0, 4, 8, 8, 8, 8])
    x = jnp.arange(1.0, 5)[:, None]
    np.testing.assert_array_equal(moe.permute(x, few)[:, 0], [2, 4, 1, 3, 0, 0, 0, 0])
    rows = jnp.arange(10.0, 18)[:, None].at[4:].set(jnp.nan)
    y = moe.unpermute(rows, few, jnp.full((4, 2), 0.5))
    np.testing.assert_array_equal(y[:, 0], [6, 5, 6.5, 5.5])
    assert permutation(experts[:3], 2, capacity=1).source.shape == (2,)


def test_no_gradient_adds_rows_in_unknown_order() -> None:
    found = moe.permutation(jnp.array([[1, 0], [0, 2], [2, 1]]), 3)

    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(moe.unpermute(moe.permute(x, found) ** 2, found, weights) ** 3)

    x, weights = jnp.ones((3, 4)), jnp.ones((3, 2))
    text = jax.jit(jax.grad(run, (0, 1))).lower(x, weights).as_text()
    assert "stablehlo.gather" in text
    assert "scatter" not in text
    gradient = jax.grad(lambda x: jnp.sum(moe.permute(x, found)))
    np.testing.assert_array_equal(gradient(x), np.full((3, 4), 2.0))


# --- numbers at the edge of a type ----------------------------------------------------


def test_complex_rows_keep_their_imaginary_part() -> None:
    order = moe.permutation(jnp.array([[1, 0], [0, 1], [1, 0]]), 2)
    z = jnp.array([[1 + 2j], [3j], [2]], jnp.complex64)
    there_and_back = moe.unpermute(moe.permute(z, order), order)
    np.testing.assert_array_equal(there_and_back, 2 * z)
    moved = jax.jvp(lambda z: moe.permute(z, order), (z,), (1j * jnp.ones_like(z),))[1]
    np.testing.assert_array_equal(moved, 1j * np.ones((6, 1)))
    grad = jax.grad(lambda z: jnp.sum(jnp.abs(moe.permute(z, order))))(z)
    plain = jax.grad(lambda z: jnp.sum(jnp.abs(jnp.repeat(z, 2, axis=0))))(z)
    np.testing.assert_allclose(grad, plain, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.int32])
def test_experts_of_any_integers(dtype: Any) -> None:
    chosen = np.array([[0], [1], [1], [100]]).astype(dtype)
    sizes = moe.permutation(jnp.asarray(chosen), 300).group_sizes
    np.testing.assert_array_equal(sizes, np.bincount(chosen[:, 0], minlength=300))
    if np.issubdtype(dtype, np.signedinteger):
        dropped = moe.permutation(jnp.asarray(-chosen - 1), 256)
        assert int(dropped.group_sizes.sum()) == 0
        np.testing.assert_array_equal(dropped.target, np.full((4, 1), 4))


def test_experts_beyond_32_bits_are_dropped() -> None:
    with jax.enable_x64(True):
        chosen = jnp.array([[2**32], [1], [2**40 + 1]])
        assert moe.permutation(chosen, 3).group_sizes.tolist() == [0, 1, 0]


def test_a_capacity_is_rounded_as_it_is_written_and_may_be_large() -> None:
    x, router_w = numbers.normal(0, (50, 4)), jnp.zeros((4, 10))
    shapes = (10, 4, 3), (10, 4, 3), (10, 3, 4)
    weights = (numbers.normal(1, shape) for shape in shapes)
    layer = functools.partial(_run_layer, x, router_w, *weights, top_k=2)
    # All tokens want the first two experts, which take 11 rows each.
    _, auxiliary = layer(capacity_factor=1.1)
    assert float(auxiliary.dropped) == pytest.approx(1 - 22 / 100)
    y, auxiliary = layer(capacity_factor=1e9)
    assert float(auxiliary.dropped) == 0
    np.testing.assert_allclose(y, layer()[0], rtol=1e-6)
    assert moe.permutation(jnp.array([[0]]), 2, capacity=2**40).target.tolist() == [[0]]


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_a_layer_by_xla_asks_cudnn_for_nothing(implementation: Any) -> None:
    arrays = drawn(0, PLAIN, **_SIZES)
    layer = functools.partial(moe.layer, top_k=2, implementation=implementation)
    run = jax.jit(lambda arrays: layer(**arrays))
    text = run.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert ("@jax_cudnn." in text) == (implementation == "auto")
