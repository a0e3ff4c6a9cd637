# SPDX-License-Identifier: Apache-2.0
"""Tests Flax's layers of experts, with Mixtral's and DeepSeek-V3's parameters."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen as flax_linen
from flax import nnx

from jax_cudnn import moe
from jax_cudnn.flax.linen import MixtureOfExperts as LinenExperts
from jax_cudnn.flax.nnx import MixtureOfExperts, SelectionBias
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
    for y, auxiliary in (ours(x), linen_layer.apply(variables, x)):
        np.testing.assert_allclose(y, want, rtol=0, atol=2e-6 * np.abs(want).max())
        assert isinstance(auxiliary, moe.Auxiliary)


def test_all_parameters_get_a_gradient_and_the_selection_bias_gets_none() -> None:
    options: dict[str, Any] = {
        **{"use_bias": True, "shared_features": 3, "use_selection_bias": True},
        **{"dtype": jnp.bfloat16, "capacity_factor": 2.0},
    }
    layer = MixtureOfExperts(_D, _F, _E, 2, **options, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 7, _D)), jnp.float32)

    def loss(layer: MixtureOfExperts) -> jax.Array:
        y, auxiliary = layer(x)
        assert y.dtype == jnp.bfloat16
        total = jnp.sum(y.astype(jnp.float32) ** 2)
        return total + auxiliary.load_balance_loss

    gradients = nnx.grad(loss)(layer)
    assert set(gradients) == set(layer.parameter_names)
    for name in layer.parameter_names:
        value = gradients[name][...]
        assert value.dtype == jnp.float32
        assert np.abs(value).max() > 0, name
    assert isinstance(layer.selection_bias, SelectionBias)


def test_without_a_gate_and_over_devices() -> None:
    options: dict[str, Any] = {"use_gate": False, "activation": "gelu"}
    x = jnp.asarray(np.random.default_rng(3).standard_normal((8, _D)), jnp.float32)
    layer = LinenExperts(_F, _E, 2, **options)
    variables = layer.init(jax.random.key(0), x)
    assert set(variables["params"]) == {"router_w", "up_w", "down_w"}
    want, _ = layer.apply(variables, x)
    spread = LinenExperts(
        _F, _E, 2, **options, expert_axis="expert", mesh=mesh_of(expert=4)
    )
    got, _ = jax.jit(spread.apply)(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert isinstance(spread, flax_linen.Module)


def test_messages() -> None:
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
