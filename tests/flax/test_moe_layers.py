# SPDX-License-Identifier: Apache-2.0
"""Tests Flax's layers of experts, with Mixtral's and DeepSeek-V3's parameters."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

import optax
from flax import linen as flax_linen
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState

from jax_cudnn import f8, moe
from jax_cudnn.flax.linen import MixtureOfExperts as LinenExperts
from jax_cudnn.flax.nnx import F8State, MixtureOfExperts, SelectionBias
from tests.common.devices import mesh_of

pytestmark = pytest.mark.once

# Tokens, width, hidden width, experts, hidden width of the shared experts.
_T, _D, _F, _E, _G = 11, 6, 5, 8, 10
_DEEPSEEK = {"scores": "sigmoid", "groups": (4, 2), "scale": 2.5}


def _checkpoint(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def _mixtral() -> dict[str, np.ndarray]:
    """Return a block's arrays by Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (_E, _D)}
    for i in range(_E):
        for name, shape in (("w1", (_F, _D)), ("w3", (_F, _D)), ("w2", (_D, _F))):
            shapes[f"experts.{i}.{name}.weight"] = shape
    return _checkpoint(shapes)


def _deepseek() -> dict[str, np.ndarray]:
    """Return a block's arrays by Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (_E, _D),
        "gate.e_score_correction_bias": (_E,),
    }
    mlps = {f"experts.{i}": _F for i in range(_E)} | {"shared_experts": _G}
    for name, width in mlps.items():
        shapes[f"{name}.gate_proj.weight"] = (width, _D)
        shapes[f"{name}.up_proj.weight"] = (width, _D)
        shapes[f"{name}.down_proj.weight"] = (_D, width)
    return _checkpoint(shapes)


def _parameters(
    tensors: dict[str, np.ndarray], gate: str, up: str, down: str
) -> dict[str, np.ndarray]:
    """Return a layer's parameters; Hugging Face has all matrices as (out, in)."""

    def experts(name: str) -> np.ndarray:
        each = [tensors[f"experts.{i}.{name}.weight"].T for i in range(_E)]
        return np.stack(each)

    found = {
        "router_w": tensors["gate.weight"].T,
        "gate_w": experts(gate),
        "up_w": experts(up),
        "down_w": experts(down),
    }
    if f"shared_experts.{up}.weight" in tensors:
        for ours, theirs in (("gate", gate), ("up", up), ("down", down)):
            array = tensors[f"shared_experts.{theirs}.weight"].T
            found[f"shared_{ours}_w"] = array
    return found


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _mixtral_block(tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return what transformers' MixtralSparseMoeBlock returns for two choices."""
    output = np.zeros_like(x)
    for i, token in enumerate(x):
        logits = tensors["gate.weight"] @ token
        weights = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-weights)[:2]
        for expert in chosen:
            w1, w2, w3 = (
                tensors[f"experts.{expert}.{name}.weight"]
                for name in ("w1", "w2", "w3")
            )
            weight = weights[expert] / weights[chosen].sum()
            output[i] += weight * (w2 @ (_silu(w1 @ token) * (w3 @ token)))
    return output


def _deepseek_block(tensors: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Return what transformers' DeepseekV3MoE returns for three choices."""

    def mlp(name: str, token: np.ndarray) -> np.ndarray:
        gate, up, down = (
            tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return down @ (_silu(gate @ token) * (up @ token))

    output = np.zeros_like(x)
    for i, token in enumerate(x):
        scores = 1 / (1 + np.exp(-(tensors["gate.weight"] @ token)))
        choice = scores + tensors["gate.e_score_correction_bias"]
        of_groups = np.sort(choice.reshape(4, 2))[:, -2:].sum(1)
        for group in np.argsort(of_groups)[:2]:
            choice[2 * group : 2 * group + 2] = -np.inf
        chosen = np.argsort(-choice)[:3]
        for expert in chosen:
            weight = 2.5 * scores[expert] / (scores[chosen].sum() + 1e-20)
            output[i] += weight * mlp(f"experts.{expert}", token)
        output[i] += mlp("shared_experts", token)
    return output


def _layers(model: str) -> tuple[Any, Any, dict[str, Any], Any, np.ndarray]:
    """Return nnx's and linen's layer, parameters, a bias, and the block's results."""
    x = np.random.default_rng(1).standard_normal((_T, _D))
    if model == "Mixtral":
        tensors = _mixtral()
        parameters = _parameters(tensors, "w1", "w3", "w2")
        sizes: dict[str, Any] = {"num_experts": _E, "top_k": 2}
        want, bias = _mixtral_block(tensors, x), None
    else:
        tensors = _deepseek()
        parameters = _parameters(tensors, "gate_proj", "up_proj", "down_proj")
        sizes = {"num_experts": _E, "top_k": 3, "shared_features": _G, **_DEEPSEEK}
        sizes["use_selection_bias"] = True
        want = _deepseek_block(tensors, x)
        bias = jnp.asarray(tensors["gate.e_score_correction_bias"], jnp.float32)
    ours = MixtureOfExperts(_D, _F, **sizes, rngs=nnx.Rngs(0))
    values = {name: jnp.asarray(v, jnp.float32) for name, v in parameters.items()}
    return ours, LinenExperts(_F, **sizes), {"x": x, **values}, bias, want


@pytest.mark.parametrize("model", ["Mixtral", "DeepSeek-V3"])
def test_checkpoints_give_the_block_of_their_model(model: str) -> None:
    ours, linen_layer, values, bias, want = _layers(model)
    x = jnp.asarray(values.pop("x"), jnp.float32)
    assert set(ours.parameter_names) == set(values)
    for name, value in values.items():
        assert getattr(ours, name)[...].shape == value.shape
        getattr(ours, name).set_value(value)
    variables: dict[str, Any] = {"params": values}
    if bias is not None:
        ours.selection_bias.set_value(bias)
        variables["selection_bias"] = {"selection_bias": bias}
    shapes = jax.eval_shape(linen_layer.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(lambda a: a.shape, shapes)
    nnxs = nnx.jit(lambda layer, x: layer(x))(ours, x)
    for y, auxiliary in (nnxs, jax.jit(linen_layer.apply)(variables, x)):
        np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * np.abs(want).max())
        assert isinstance(auxiliary, moe.Auxiliary)


def test_all_parameters_get_a_gradient_and_the_selection_bias_gets_none() -> None:
    options: dict[str, Any] = {
        **{"use_bias": True, "shared_features": 3, "use_selection_bias": True},
        **{"dtype": jnp.bfloat16, "capacity_factor": 2.0},
    }
    layer = MixtureOfExperts(_D, _F, _E, 2, **options, rngs=nnx.Rngs(0))
    x = jnp.asarray(
        np.asarray(np.random.default_rng(2).standard_normal((3, 7, _D)), jnp.float32)
    )

    def loss(layer: MixtureOfExperts) -> jax.Array:
        y, auxiliary = layer(x)
        assert y.dtype == jnp.bfloat16
        total = jnp.sum(y.astype(jnp.float32) ** 2)
        return total + auxiliary.load_balance_loss

    gradients = nnx.jit(nnx.grad(loss))(layer)
    assert set(gradients) == set(layer.parameter_names)
    for name in layer.parameter_names:
        value = gradients[name][...]
        assert value.dtype == jnp.float32
        assert np.abs(value).max() > 0, name
    assert isinstance(layer.selection_bias, SelectionBias)


def test_without_a_gate_and_over_devices() -> None:
    options: dict[str, Any] = {"use_gate": False, "activation": "gelu"}
    x = jnp.asarray(
        np.asarray(np.random.default_rng(3).standard_normal((8, _D)), jnp.float32)
    )
    layer = LinenExperts(_F, _E, 2, **options)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    assert set(variables["params"]) == {"router_w", "up_w", "down_w"}
    want, _ = jax.jit(layer.apply)(variables, x)
    spread = LinenExperts(
        _F, _E, 2, **options, expert_axis="expert", mesh=mesh_of(expert=4)
    )
    got, _ = jax.jit(spread.apply)(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert isinstance(spread, flax_linen.Module)


# --- f8 -------------------------------------------------------------------------------

_DELAYED = f8.Delayed(history=4)
_WEIGHTS = ("up_w", "down_w", "shared_up_w", "shared_down_w")
_IN_F8: dict[str, Any] = {"use_gate": False, "shared_features": 16}


def _of_f8(recipe: Any) -> tuple[Any, Any, dict[str, jax.Array], jax.Array]:
    """Return nnx's and linen's layer, their parameters, and inputs."""
    options = {**_IN_F8, "recipe": recipe}
    layer = MixtureOfExperts(16, 32, 4, 2, **options, rngs=nnx.Rngs(0))
    arrays = {name: getattr(layer, name)[...] for name in layer.parameter_names}
    x = jnp.asarray(
        np.asarray(np.random.default_rng(4).standard_normal((5, 16)), jnp.float32)
    )
    return layer, LinenExperts(32, 4, 2, **options), arrays, x


@pytest.mark.parametrize("recipe", [f8.Current(), f8.MXFP8()], ids=["Current", "MXFP8"])
def test_layers_take_recipes_without_a_state(recipe: Any) -> None:
    layer, other, arrays, x = _of_f8(recipe)

    @jax.jit
    def run() -> Any:
        want, _ = moe.layer(x, gate_w=None, **arrays, top_k=2, recipe=recipe)
        return want, layer(x)[0], other.apply({"params": arrays}, x)[0]

    want, *others = run()
    for found in others:
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert layer.f8_states is None
    shapes = jax.eval_shape(other.init, jax.random.key(0), x)
    assert set(shapes) == {"params"}


def _run(arrays: dict[str, jax.Array], x: jax.Array, state: Any) -> Any:
    return moe.layer(
        x,
        gate_w=None,
        **arrays,
        top_k=2,
        recipe=_DELAYED,
        state=state,
        return_state=True,
    )


def test_nnx_notes_amaxes_in_the_forward_pass() -> None:
    """Cotangents have the scales of their own amaxes; evaluation notes nothing."""
    layer, _, arrays, x = _of_f8(_DELAYED)
    first = moe.layer_state(_DELAYED)
    assert first is not None
    state: Any = moe.LayerState(*(each._replace(grad=None) for each in first))

    @nnx.jit
    def gradient(layer: Any, x: jax.Array) -> Any:
        return nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x)[0])))(layer)

    def loss(arrays: Any, x: jax.Array, state: Any) -> Any:
        y, _, following = _run(arrays, x, state)
        return jnp.sum(jnp.sin(y)), following

    plain = jax.jit(jax.grad(loss, has_aux=True))
    for factor in (1.0, 4.0, 0.5):
        found = gradient(layer, factor * x)
        wanted, state = plain(arrays, factor * x, state)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name][...], value, rtol=1e-4, atol=1e-6)
    for name in _WEIGHTS:
        own = getattr(layer.f8_states, name)
        np.testing.assert_allclose(own.x[...], getattr(state, name).x, rtol=1e-4)
        np.testing.assert_allclose(own.w[...], getattr(state, name).w, rtol=1e-4)
    assert len(jax.tree.leaves(nnx.state(layer, F8State))) == 2 * len(_WEIGHTS)
    layer.eval()
    before = jax.tree.map(np.asarray, nnx.state(layer, F8State))
    nnx.jit(lambda layer, x: layer(x))(layer, x)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(layer, F8State))
    viewed = nnx.view(layer, deterministic=False)
    assert not viewed.f8_states.deterministic


def test_linen_has_the_next_state_as_a_gradient() -> None:
    """And TrainState writes it over, as that of Flax's own f8."""
    _, layer, arrays, x = _of_f8(_DELAYED)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    held = variables[OVERWRITE_WITH_GRADIENT]
    roles = ("x", "w", "grad")
    assert set(held) == {f"{n}_{role}_state" for n in _WEIGHTS for role in roles}
    variables = {**variables, "params": arrays}
    train: Any = TrainState.create(
        apply_fn=layer.apply, params=variables, tx=optax.sgd(1e-2)
    )
    state: Any = moe.layer_state(_DELAYED)

    @jax.jit
    def step(train: Any, x: jax.Array) -> Any:
        def loss(variables: Any) -> Any:
            y, auxiliary = train.apply_fn(variables, x)
            return jnp.sum(jnp.sin(y)) + auxiliary.load_balance_loss

        return train.apply_gradients(grads=jax.grad(loss)(train.params))

    @jax.jit
    def plain(arrays: Any, x: jax.Array, state: Any) -> Any:
        def loss(arrays: Any, state: Any) -> Any:
            y, auxiliary, _ = _run(arrays, x, state)
            return jnp.sum(jnp.sin(y)) + auxiliary.load_balance_loss

        grads, state = jax.grad(loss, (0, 1))(arrays, state)
        return jax.tree.map(lambda a, g: a - 1e-2 * g, arrays, grads), state

    for factor in (1.0, 4.0):
        train = step(train, factor * x)
        arrays, state = plain(arrays, factor * x, state)
    for name, value in arrays.items():
        found = train.params["params"][name]
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-6)
    for name in _WEIGHTS:
        for role in roles:
            found = train.params[OVERWRITE_WITH_GRADIENT][f"{name}_{role}_state"]
            wanted = getattr(getattr(state, name), role)
            np.testing.assert_allclose(found, wanted, rtol=1e-3)
    with pytest.raises(
        ValueError, match="MixtureOfExperts: the layer has no up_w_x_st"
    ):
        layer.apply({"params": arrays}, x)


def test_linen_scan_stacks_states() -> None:
    class Block(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x: jax.Array, _: None) -> Any:
            layer = LinenExperts(32, 4, 2, use_gate=False, recipe=_DELAYED)
            return x + layer(x)[0], None

    deep = flax_linen.scan(
        Block,
        variable_axes={"params": 0, OVERWRITE_WITH_GRADIENT: 0},
        split_rngs={"params": True},
        length=2,
    )()
    x = jnp.asarray(
        np.asarray(np.random.default_rng(5).standard_normal((5, 16)), jnp.float32)
    )
    variables = jax.jit(deep.init)(jax.random.key(0), x, None)

    def loss(variables: Any) -> Any:
        y: Any = deep.apply(variables, x, None)
        return jnp.sum(jnp.sin(y[0]))

    gradients = jax.jit(jax.grad(loss))(variables)
    for each in jax.tree.leaves(gradients[OVERWRITE_WITH_GRADIENT]):
        assert each.shape == (2, 6)
        assert (each[:, 0] > 0).all()


def test_messages() -> None:
    for make in (
        lambda: MixtureOfExperts(_D, _F, _E, 2, recipe="f8", rngs=nnx.Rngs(0)),  # type: ignore[arg-type]
        lambda: LinenExperts(_F, _E, 2, recipe="f8").init(  # type: ignore[arg-type]
            jax.random.key(0), jnp.ones((2, _D))
        ),
    ):
        with pytest.raises(TypeError, match="MixtureOfExperts: recipe='f8' is no rec"):
            make()
    with pytest.raises(ValueError, match="MixtureOfExperts: hidden_features=0 must be"):
        MixtureOfExperts(_D, 0, _E, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="shared_features=-1 is negative"):
        LinenExperts(_F, _E, 2, shared_features=-1).init(
            jax.random.key(0), jnp.ones((2, _D))
        )
    with pytest.raises(ValueError, match="implementation='cuda' is not"):
        MixtureOfExperts(_D, _F, _E, 2, implementation="cuda", rngs=nnx.Rngs(0))  # type: ignore[arg-type]
    message = re.escape("moe.layer: top_k=9 experts are chosen of 8.")
    with pytest.raises(ValueError, match=message):
        MixtureOfExperts(_D, _F, _E, 9, rngs=nnx.Rngs(0))(jnp.ones((2, _D)))
