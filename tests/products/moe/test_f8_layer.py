# SPDX-License-Identifier: Apache-2.0
"""Tests mixtures of experts in f8: their products, and the states of `f8.Delayed`."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jax_cudnn import f8, moe
from tests.common.devices import mesh_of
from tests.products.moe import truth
from tests.products.moe.truth import mixture

pytestmark = [pytest.mark.once, pytest.mark.sampled]


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


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [
        # Hidden layers have 4 bits, so it is no product in more.
        (f8.Current(), 1e-3, 5e-2),
        (f8.MXFP8(), 1e-3, 5e-2),
        # All operands have 2 bits.
        (f8.NVFP4(), 5e-2, 0.3),
    ],
    ids=["Current", "MXFP8", "NVFP4"],
)
def test_experts_in_f8_are_near_those_of_float64(
    recipe: f8.Current | f8.MXFP8 | f8.NVFP4, least: float, most: float
) -> None:
    arrays = _mixture(T=24, D=16, E=8, F=32, G=16)
    run = jax.jit(
        jax.value_and_grad(
            functools.partial(_loss, {"top_k": 2, "recipe": recipe}), has_aux=True
        )
    )
    (_, got), gradients = run(arrays)
    want = mixture(**arrays, top_k=2).output
    error = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
    assert least < error < most
    plain = functools.partial(_loss, {"top_k": 2})
    exact = jax.jit(jax.grad(plain, has_aux=True))(arrays)[0]
    for name, x in gradients.items():
        distance = np.linalg.norm(x - exact[name]) / np.linalg.norm(exact[name])
        assert distance < 4 * most, name


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


# --- delayed scaling ------------------------------------------------------------------

_RECIPE = f8.Delayed(history=2)


def _small() -> dict[str, Any]:
    names = [name for name in truth.ARRAYS if name not in ("selection_bias",)]
    return truth.drawn(5, names, T=24, D=16, E=4, F=32, G=16)


def _state() -> Any:
    return moe.layer_state(_RECIPE)


def _by_parts(arrays: dict[str, Any], state: Any) -> jax.Array:
    """Return the same layer of `f8.ragged_dot` and `f8.dense`, product by product."""
    x = arrays["x"]
    routing = moe.router(x, arrays["router_w"], top_k=2)
    order = moe.permutation(routing.experts, arrays["router_w"].shape[1])

    def experts(x: jax.Array, name: str) -> jax.Array:
        return f8.ragged_dot(
            x,
            arrays[f"{name}_w"],
            order.group_sizes,
            bias=arrays[f"{name}_bias"],
            recipe=_RECIPE,
            state=getattr(state, f"{name}_w"),
        )

    def shared(x: jax.Array, name: str) -> jax.Array:
        name = f"shared_{name}_w"
        return f8.dense(x, arrays[name], recipe=_RECIPE, state=getattr(state, name))

    def mlp(product: Any, x: jax.Array) -> jax.Array:
        return product(jax.nn.silu(product(x, "gate")) * product(x, "up"), "down")

    rows = mlp(experts, moe.permute(x, order))
    return moe.unpermute(rows, order, routing.weights) + mlp(shared, x)


def _step(product: Any, arrays: dict[str, Any], state: Any) -> Any:
    def loss(arrays: dict[str, Any], state: Any) -> Any:
        y = product(arrays, state)
        return jnp.sum(jnp.sin(y)), y

    return jax.grad(loss, (0, 1), has_aux=True)(arrays, state)


def _layer(arrays: dict[str, Any], state: Any, **options: Any) -> jax.Array:
    return moe.layer(**arrays, top_k=2, recipe=_RECIPE, state=state, **options)[0]


def test_a_layer_has_the_scales_and_states_of_its_products() -> None:
    """For three steps of tensors that grow and shrink."""
    arrays, states = _small(), [_state(), _state()]
    steps = [jax.jit(functools.partial(_step, run)) for run in (_layer, _by_parts)]
    for factor in (1.0, 8.0, 0.5):
        given = arrays | {"x": arrays["x"] * factor}
        found = [step(given, state) for step, state in zip(steps, states, strict=True)]
        ((got, states[0]), y), ((want, states[1]), other) = found
        np.testing.assert_allclose(y, other, rtol=0, atol=1e-5 * np.abs(other).max())
        for name, value in want.items():
            bound = 1e-4 * np.abs(value).max()
            np.testing.assert_allclose(got[name], value, rtol=0, atol=bound)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3), *states)


def test_a_history_has_the_amaxes_of_former_steps() -> None:
    arrays, state = _small(), _state()
    step = jax.jit(functools.partial(_step, _layer))
    largest = float(jnp.abs(arrays["x"]).max())
    for factor in (1.0, 4.0, 2.0):
        (_, state), _ = step(arrays | {"x": arrays["x"] * factor}, state)
    for name in ("gate_w", "up_w", "shared_gate_w", "shared_up_w"):
        x, w, grad = getattr(state, name)
        # The newest one is read with the next step.
        np.testing.assert_allclose(x[1:3], [4 * largest, largest], rtol=1e-3)
        amax = float(jnp.abs(arrays[name]).max())
        np.testing.assert_allclose(w[1:3], [amax, amax], rtol=1e-3)
        assert (grad[1:3] > 0).all()


def test_the_next_state_is_known_forward_but_for_the_cotangents() -> None:
    arrays, state = _small(), _state()
    step = jax.jit(functools.partial(_step, _layer))
    (_, state), _ = step(arrays, state)
    (_, by_gradient), _ = step(arrays, state)
    run = functools.partial(moe.layer, **arrays, top_k=2, recipe=_RECIPE)
    _, _, forward = jax.jit(lambda s: run(state=s, return_state=True))(state)
    for name, each in forward._asdict().items():
        other = getattr(by_gradient, name)
        np.testing.assert_allclose(each.x, other.x, rtol=1e-5)
        np.testing.assert_allclose(each.w, other.w, rtol=1e-5)
        np.testing.assert_array_equal(each.grad, getattr(state, name).grad)
    # There is none without such a recipe.
    for recipe in (None, f8.Current()):
        plain = functools.partial(run, recipe=recipe, return_state=True)
        y, auxiliary, none = jax.eval_shape(plain)
        assert y.shape == arrays["x"].shape
        assert isinstance(auxiliary, moe.Auxiliary)
        assert none is None


def test_states_of_weights_that_a_layer_lacks() -> None:
    arrays = {name: _small()[name] for name in ("x", "router_w", "up_w", "down_w")}
    arrays["gate_w"] = None
    full = _state()
    part = moe.LayerState(None, full.up_w, full.down_w, None, None, None)
    gradient = jax.jit(jax.grad(lambda s: _layer(arrays, s).sum()))
    gradients = [gradient(state) for state in (full, part)]
    assert float(gradients[0].up_w.x[-1]) == 1
    assert all((each == 0).all() for each in jax.tree.leaves(gradients[0].gate_w))
    assert gradients[1].shared_gate_w is None
    for got, want in zip(gradients[1][1:3], gradients[0][1:3], strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_states_are_added_up_over_devices(kind: AxisType) -> None:
    arrays, state = _mixture(T=16, D=16, E=8, F=32, G=16), _state()
    axes = {"expert_axis": "expert", "batch_axis": "data", "tensor_axis": "tensor"}
    count, names = 8, ("x", "router_w", "up_w", "down_w", "up_bias", "shared_up_w")
    arrays = {name: arrays.get(name) for name in (*names, "gate_w", "shared_down_w")}
    arrays["gate_w"] = None
    with jax.set_mesh(mesh_of(kind, data=2, expert=2, tensor=2)):
        over = jax.jit(
            functools.partial(_step, functools.partial(_layer, **axes)),
        )
        run = functools.partial(moe.layer, **arrays, top_k=2, recipe=_RECIPE, **axes)
        (_, first), _ = over(arrays, state)
        (gradients, second), y = over(arrays, first)
        forward = jax.jit(lambda s: run(state=s, return_state=True)[2])(state)
    one = jax.jit(functools.partial(_step, _layer))
    (_, alone), _ = one(arrays, state)
    (wanted, after), other = one(arrays, alone)
    # Added up, amaxes are larger, so operands of 4 bits are rounded by other scales.
    assert np.linalg.norm(y - other) < 0.1 * np.linalg.norm(other)
    for name, value in wanted.items():
        if value is None:
            continue
        distance = np.linalg.norm(gradients[name] - value)
        assert distance < 0.2 * np.linalg.norm(value), name
    for name in ("up_w", "down_w", "shared_up_w", "shared_down_w"):
        of_one = getattr(after, name)
        state = getattr(second, name)
        for got, want in zip(state, of_one, strict=True):
            assert float(got[-1]) == count
            ratio = float(got[1] / count / want[1])
            assert 0.9 < ratio < 1.05 * count ** (1 / 8), name
        # Those known forward are the largest, as one device has them.
        got, want = getattr(forward, name), getattr(alone, name)
        np.testing.assert_allclose(got.w, want.w, rtol=1e-6)
        if name not in ("down_w", "shared_down_w"):
            np.testing.assert_allclose(got.x, want.x, rtol=1e-6)


def test_a_state_inside_shard_map_is_the_device_s_own() -> None:
    arrays = _mixture(T=16, D=16, E=8, F=32, G=16)
    state = jax.tree.map(lambda s: jnp.stack([s] * 4), _state())
    tokens = PartitionSpec("expert")
    specs = {
        name: tokens
        if x.ndim == 3 or "bias" in name or name == "x"
        else PartitionSpec()
        for name, x in arrays.items()
    }

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(expert=4),
        in_specs=(specs, tokens),
        out_specs=tokens,
    )
    def step(arrays: dict[str, Any], state: Any) -> Any:
        own = jax.tree.map(lambda s: s[0], state)
        run = functools.partial(_layer, expert_axis="expert")
        return jax.tree.map(lambda s: s[None], _step(run, arrays, own)[0][1])

    following = jax.jit(step)(arrays, state)
    for each in jax.tree.leaves(following):
        assert each.shape == (4, 4)
        assert (each[:, -1] == 1).all()
    # Devices have other rows, and other weights.
    assert len(np.unique(following.up_w.w[:, 0])) > 1


def test_vmap_scan_and_remat() -> None:
    """Layers one after another, with and without remat, and examples with one state."""
    arrays = {name: _small()[name] for name in ("x", "router_w", "up_w", "down_w")}
    arrays = {name: x / x.shape[-2] ** 0.5 for name, x in arrays.items()}
    x = arrays.pop("x")
    layers = jax.tree.map(lambda w: jnp.stack([w, -w[::-1]]), arrays)
    states = jax.tree.map(lambda s: jnp.stack([s] * 2), _state())

    def run(x: jax.Array, given: Any) -> Any:
        return _layer({"x": x, "gate_w": None, **given[0]}, given[1]), None

    def in_turn(layers: Any, states: Any) -> jax.Array:
        y = x
        for i in range(2):
            y, _ = run(y, jax.tree.map(lambda a, i=i: a[i], (layers, states)))
        return jnp.sum(jnp.sin(y))

    def scanned(run: Any, layers: Any, states: Any) -> jax.Array:
        return jnp.sum(jnp.sin(jax.lax.scan(run, x, (layers, states))[0]))

    want = jax.jit(jax.grad(in_turn, (0, 1)))(layers, states)
    for body in (run, jax.checkpoint(run)):
        loss = functools.partial(scanned, body)
        got = jax.jit(jax.grad(loss, (0, 1)))(layers, states)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-5),
            got,
            want,
        )

    def many(state: Any) -> jax.Array:
        each = jax.vmap(lambda x: run(x, (arrays, state))[0])
        return jnp.sum(each(jnp.stack([x, x, 2 * x])))

    for state in jax.tree.leaves(jax.jit(jax.grad(many))(_state())[1:3]):
        assert float(state[-1]) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recipe": "f8"},
            "moe.layer: recipe='f8' is no recipe. Pass f8.Delayed(history=16)",
        ),
        (
            {"recipe": f8.Delayed()},
            "moe.layer: state is NoneType, and f8.Delayed needs a state of six "
            "products. Pass moe.layer_state(recipe), and later its gradient.",
        ),
        (
            {"recipe": f8.Delayed(), "state": moe.LayerState(*[None] * 6)},
            "moe.layer: state.gate_w is NoneType, and f8.Delayed needs three arrays. "
            "Pass moe.layer_state(recipe), and later its gradient.",
        ),
        (
            {"recipe": f8.Delayed(), "state": moe.layer_state(f8.Delayed(history=3))},
            "moe.layer: state.gate_w.x is f32[5], and a history of 16 has f32 [18]. "
            "Pass moe.layer_state(recipe), and later its gradient.",
        ),
        (
            {"recipe": f8.MXFP8(), "state": moe.layer_state(f8.Delayed())},
            "moe.layer: state is given, and f8.MXFP8() has none. Leave it out.",
        ),
        (
            {"state": moe.layer_state(f8.Delayed())},
            "moe.layer: state is given, and no recipe. Pass recipe=f8.Delayed(), or",
        ),
        ({"recipe": f8.Current(), "up_w": True}, "moe.layer: up_w is i32"),
    ],
)
def test_messages(changes: dict[str, Any], message: str) -> None:
    arrays = _mixture(T=4, D=16, E=4, F=16, G=16)
    if "up_w" in changes:
        changes = {**changes, "up_w": arrays["up_w"].astype(jnp.int32)}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        moe.layer(**(arrays | changes), top_k=1)
    with pytest.raises(TypeError, match=r"^moe\.layer_state: recipe='f8' is no recipe"):
        moe.layer_state("f8")  # type: ignore[arg-type]
