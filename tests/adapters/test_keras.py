# SPDX-License-Identifier: Apache-2.0
"""Keras models compute with jax_cudnn what they compute with Keras."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import jax_cudnn
from jax_cudnn.adapters.keras import to_cudnn
from tests.adapters.formulas import attention

# Keras's variables do not take NumPy 2's argument `copy`.
pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

_RNG = np.random.default_rng(3)


def _normal(*shape: int) -> np.ndarray:
    return _RNG.normal(size=shape).astype("float32")


def _tokens(*shape: int) -> np.ndarray:
    return _RNG.random(shape) < 0.7


class Centred(layers.Dense):
    """A dense layer that computes something else."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Subtract the mean first."""
        return super().call(inputs - keras.ops.mean(inputs), training=training)


# Layers, their inputs, and what is passed beside them. Keras computes the last ones.
_X, _Y, _IMAGES = _normal(2, 5, 12), _normal(2, 7, 12), _normal(2, 9, 8, 4)
_TURNED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dense": (layers.Dense(6, activation="relu"), (_X,), {}),
    "dense without bias": (layers.Dense(6, "gelu", use_bias=False), (_X,), {}),
    "dense with softmax": (layers.Dense(6, activation="softmax"), (_X,), {}),
    "dense with glu": (layers.Dense(6, activation="glu"), (_X,), {}),
    "conv 2d": (
        layers.Conv2D(6, 3, 2, "same", groups=2, activation="silu"),
        (_IMAGES,),
        {},
    ),
    "conv 2d, dilated": (
        layers.Conv2D(6, (3, 2), dilation_rate=(2, 1), use_bias=False),
        (_IMAGES,),
        {},
    ),
    "conv 2d, channels first": (
        layers.Conv2D(6, 3, data_format="channels_first", activation="tanh"),
        (_IMAGES.transpose(0, 3, 1, 2),),
        {},
    ),
    "conv 1d, causal": (
        layers.Conv1D(6, 3, padding="causal", dilation_rate=2),
        (_X,),
        {},
    ),
    "conv 3d": (layers.Conv3D(3, 2), (_normal(2, 4, 5, 3, 2),), {}),
    "attention": (layers.MultiHeadAttention(3, 4), (_X, _Y), {}),
    "causal attention": (
        layers.MultiHeadAttention(3, 4, output_shape=6),
        (_X, _X),
        {"use_causal_mask": True},
    ),
    "masks": (
        layers.MultiHeadAttention(3, 4),
        (_X, _Y),
        {
            "attention_mask": np.tri(5, 7, 2, bool)[None],
            "value_mask": np.arange(7) < np.array([[7], [3]]),
        },
    ),
    "window": (
        layers.MultiHeadAttention(3, 4, sliding_window=2, use_gate=True),
        (_X, _X),
        {"use_causal_mask": True},
    ),
    "mask of each head": (
        layers.MultiHeadAttention(3, 4),
        (_X, _Y),
        {"attention_mask": _tokens(2, 3, 5, 7) | (np.arange(7) == 6)},
    ),
    "grouped attention": (
        layers.GroupQueryAttention(4, 6, 2),
        (_X, _X),
        {"use_causal_mask": True},
    ),
}
_DELEGATED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "weights": (
        layers.MultiHeadAttention(3, 4),
        (_X, _Y),
        {"return_attention_scores": True, "use_causal_mask": True},
    ),
    "weights of grouped attention": (
        layers.GroupQueryAttention(4, 6, 2),
        (_X, _X),
        {"return_attention_scores": True},
    ),
    "two axes": (
        layers.MultiHeadAttention(3, 4, attention_axes=(1, 2)),
        (_IMAGES, _IMAGES),
        {},
    ),
    "integers": (layers.Dense(3), (np.arange(8).reshape(2, 4),), {}),
}
_CASES = _TURNED | _DELEGATED


def _results() -> dict[str, Any]:
    """Return each case's results, and the gradient of their sum by the weights."""

    def loss(name: str, weights: Any) -> Any:
        layer, inputs, more = _CASES[name]
        state = [x.value for x in layer.non_trainable_variables]
        results, _ = layer.stateless_call(weights, state, *inputs, **more)
        leaves = jax.tree.leaves(results)
        return sum(jnp.sum(jnp.sin(x)) for x in leaves), results

    def run(weights: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jax.grad(lambda w, name=name: loss(name, w), has_aux=True)(each)
            for name, each in weights.items()
        }

    weights = {
        name: [jnp.asarray(x.value) for x in layer.trainable_variables]
        for name, (layer, _, _) in _CASES.items()
    }
    return jax.jit(run)(weights)


def test_layers_compute_what_keras_computes(caplog: pytest.LogCaptureFixture) -> None:
    for layer, inputs, more in _CASES.values():
        layer(*inputs, **more)  # builds it
        for variable in layer.trainable_variables:
            variable.assign(variable + 0.3 * _normal(*variable.shape))
    expected = _results()
    for name, (layer, _, _) in _CASES.items():
        (told,) = to_cudnn(layer).layers
        assert told.is_turned, name
    caplog.set_level(logging.INFO, "jax_cudnn")
    found = _results()
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5),
        found,
        expected,
    )
    told = [each for each in caplog.messages if "Keras computes" in each]
    assert len(told) == len(_DELEGATED)
    for part in ("the attention weights are asked for", "more than one axis", "int32"):
        assert any(part in each for each in told), part


def test_kernels_take_bias_and_activation() -> None:
    layer, inputs, _ = _TURNED["conv 2d"]
    to_cudnn(layer)
    report = jax_cudnn.plans.inspect(lambda x: layer(x), *inputs)
    (call,) = report.calls
    assert call.op.startswith("conv_fprop+add+")
    attend, inputs, _ = _TURNED["causal attention"]
    to_cudnn(attend)
    report = jax_cudnn.plans.inspect(lambda x: attend(x, x, use_causal_mask=True), _X)
    assert [each.op for each in report.calls] == ["sdpa"]
    # Causality is no array of all scores.
    assert report.calls[0].part.nodes[0].attributes.is_causal


def test_16_bit_policies_are_nearer_to_f32() -> None:
    outputs = {}
    for policy in ("float32", "mixed_bfloat16"):
        keras.utils.set_random_seed(1)
        made = (
            layers.Conv1D(16, 3, activation="gelu", dtype=policy),
            layers.MultiHeadAttention(2, 8, dtype=policy),
            layers.Dense(16, activation="silu", dtype=policy),
        )
        for x in made:
            x.build(*[(4, 32, 16)] * (1 + isinstance(x, layers.MultiHeadAttention)))

        def run(x: Any, made: Any = made) -> Any:
            x = made[0](x)
            return made[2](made[1](x, x, use_causal_mask=True))

        x = np.random.default_rng(1).normal(size=(4, 32, 16)).astype("float32")
        outputs[policy, "keras"] = jax.jit(run)(x)
        for each in made:
            to_cudnn(each)
        outputs[policy, "jax_cudnn"] = jax.jit(lambda x, run=run: run(x))(x)
    truth = outputs["float32", "keras"]
    np.testing.assert_allclose(outputs["float32", "jax_cudnn"], truth, atol=1e-5)
    own, ours = (
        np.abs(np.asarray(outputs["mixed_bfloat16", x], np.float32) - truth).mean()
        for x in ("keras", "jax_cudnn")
    )
    assert outputs["mixed_bfloat16", "jax_cudnn"].dtype == jnp.bfloat16
    assert 0 < ours < 1.1 * own


def test_values_may_have_a_size_of_their_own() -> None:
    """`jax.nn` refuses them, and Keras with it."""
    layer = layers.MultiHeadAttention(3, 4, value_dim=5)
    to_cudnn(layer)
    assert layer(_X, _Y).shape == _X.shape
    q, k, v = _normal(2, 5, 3, 4), _normal(2, 7, 3, 4), _normal(2, 7, 3, 5)
    found, _ = layer._compute_attention(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_allclose(found, attention(q, k, v), rtol=2e-5, atol=2e-6)


def test_dropout_drops_weights_in_training_only() -> None:
    layer = layers.MultiHeadAttention(8, 16, dropout=0.25, seed=4)
    layer.build((4, 32, 16), (4, 32, 16))
    to_cudnn(layer)
    q, k = _normal(2, 4, 32, 8, 16)
    # Values that are a unit matrix return the weights.
    v = np.broadcast_to(np.eye(32, dtype=np.float32)[:, None], (4, 32, 8, 32))
    weights = attention(q, k, q, weights_only=True)
    draws = [
        np.asarray(
            layer._compute_attention(*map(jnp.asarray, (q, k, v)), training=training)[0]
        ).swapaxes(1, 2)
        for training in (False, True, True)
    ]
    np.testing.assert_allclose(draws[0], weights, rtol=1e-4)
    for draw in draws[1:]:
        kept = draw != 0
        np.testing.assert_allclose(draw[kept], weights[kept] / 0.75, rtol=1e-4)
        assert abs(1 - kept.mean() - 0.25) < 0.02
    assert np.any((draws[1] != 0) != (draws[2] != 0))


def _model() -> keras.Model:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(inputs)
    x = layers.Reshape((64, 8))(x)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(x))


def test_models_train_alike_and_are_saved_as_keras_models(tmp_path: Path) -> None:
    x, y = _normal(8, 8, 8, 3), np.arange(8, dtype="int32") % 5
    trained = []
    for is_turned in (False, True):
        model = _model()
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        if is_turned:
            before = model.predict(x, verbose=0)
            assert model.predict_function is not None
            report = to_cudnn(model)
            assert [each.is_turned for each in report.layers] == [True] * 3
            assert model.predict_function is None  # it is compiled anew
            np.testing.assert_allclose(model.predict(x, verbose=0), before, atol=1e-6)
        model.fit(x, y, epochs=2, batch_size=8, verbose=0, shuffle=False)
        trained.append(model)
    for ours, own in zip(trained[1].weights, trained[0].weights, strict=True):
        np.testing.assert_allclose(ours, own, rtol=1e-4, atol=1e-6)
    trained[1].save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.layers[-1]) is layers.Dense
    assert "call" not in vars(again.layers[-1])
    np.testing.assert_allclose(again(x), trained[1](x), rtol=1e-5)


def test_the_report_says_what_stays_as_it_is() -> None:
    quantised = layers.Dense(4, name="eights")
    quantised.build((2, 4))
    quantised.quantize("int8")
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="own"), Centred(4), quantised]
    )
    lines = str(to_cudnn(model)).splitlines()
    assert [" ".join(line.split()[1:]) for line in lines] == [
        "Dense jax_cudnn",
        "Centred unchanged: Centred has a call of its own",
        "Dense unchanged: it is quantised, to int8",
    ]
    # Layers have paths once they are built.
    unbuilt = keras.Sequential([layers.Dense(4, name="own")])
    assert str(to_cudnn(unbuilt)) == "own  Dense  jax_cudnn"
    empty = to_cudnn(keras.Sequential([keras.Input((4,)), layers.Flatten()]))
    assert str(empty) == "no attention, convolution or dense layer"


def test_what_cannot_be_turned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="model is list, not a Keras layer"):
        to_cudnn([])  # type: ignore[arg-type]
    layer = layers.MultiHeadAttention(3, 4, name="heads")
    with pytest.raises(ValueError, match="implementation"):
        to_cudnn(layer, implementation="fast")  # type: ignore[arg-type]
    to_cudnn(layer, implementation="cudnn")
    with pytest.raises(jax_cudnn.UnsupportedError, match="weights are asked for"):
        layer(_X, _Y, return_attention_scores=True)
    with pytest.raises(TypeError, match="Did you mean implementation"):
        to_cudnn(layer, backend="cudnn")  # type: ignore[call-arg]
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(RuntimeError, match=r'backend "torch".* KERAS_BACKEND'):
        to_cudnn(layer)
