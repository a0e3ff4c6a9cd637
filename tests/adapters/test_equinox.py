# SPDX-License-Identifier: Apache-2.0
"""Equinox models compute with jax_cudnn what they compute with Equinox."""

import io
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import masks
from jax_cudnn.adapters.equinox import to_cudnn
from tests.adapters.formulas import attention
from tests.common import drawn

pytestmark = pytest.mark.once

_KEY = jax.random.key(0)
_T = 5


class Model(eqx.Module):
    """One of each layer, for one example (3, 9, 8)."""

    image: eqx.nn.Conv2d
    strided: eqx.nn.Conv
    row: eqx.nn.Conv1d
    scalar: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    cross: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    rotary: eqx.nn.RotaryPositionalEmbedding

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 7)
        self.image = eqx.nn.Conv2d(3, 8, (3, 2), padding="SAME", key=keys[0])
        self.strided = eqx.nn.Conv(2, 8, 10, 3, 2, 1, groups=2, key=keys[1])
        self.row = eqx.nn.Conv1d(
            10, 12, 3, padding=1, padding_mode="CIRCULAR", use_bias=False, key=keys[2]
        )
        self.scalar = eqx.nn.Linear(20, "scalar", key=keys[3])
        self.attention = eqx.nn.MultiheadAttention(
            3, 12, use_query_bias=True, use_output_bias=True, key=keys[4]
        )
        self.cross = eqx.nn.MultiheadAttention(
            2, 12, 10, 10, output_size=7, qk_size=4, vo_size=6, key=keys[5]
        )
        self.mlp = eqx.nn.MLP(7, 3, 16, 2, key=keys[6])
        self.rotary = eqx.nn.RotaryPositionalEmbedding(4)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.image(x))
        y = self.strided(x)  # (10, 5, 4)
        x = self.row(y.reshape(10, 20)).T  # (20, 12)
        gate = self.scalar(x[:, 0])

        def rotated(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            turn = jax.vmap(self.rotary, in_axes=1, out_axes=1)
            return turn(q), turn(k), v

        causal = jnp.tril(jnp.ones((20, 20), bool))
        x = x + gate * self.attention(x, x, x, causal, process_heads=rotated)
        memory = y.reshape(10, 20).T[:_T]
        by_head = jnp.arange(2 * 20 * _T).reshape(2, 20, _T) % 3 != 1
        return jax.vmap(self.mlp)(self.cross(x, memory, memory, by_head))


def _values_and_gradients(model: Model, x: jax.Array) -> Any:
    def loss(model: Model) -> Any:
        y = jax.vmap(model)(x)
        return jnp.sum(jnp.sin(y)), y

    return eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))(model)


def test_models_compute_what_equinox_computes() -> None:
    model = Model(_KEY)
    turned = to_cudnn(model)
    x = drawn.normal(0, (4, 3, 9, 8))
    # The gradients are modules: of the same leaves, in the same order.
    for found, expected in zip(
        jax.tree.leaves(_values_and_gradients(turned, x)),
        jax.tree.leaves(_values_and_gradients(model, x)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    report = jax_cudnn.plans.inspect(jax.vmap(turned), x)
    # Each layer is one call for all examples and tokens, and no product is left.
    first = {call.shapes.partition("],")[0] for call in report.calls}
    assert first == {
        *("f32[4,3,9,8", "f32[4,8,9,8", "f32[4,10,22"),  # images
        *("f32[1,4,20", "f32[1,20,10", "f32[1,80,12", "f32[1,80,7", "f32[1,80,16"),
        *("f32[4,20,3,4", "f32[4,20,2,4"),  # heads
    }
    text = str(jax.make_jaxpr(jax.vmap(turned))(x))
    assert "dot_general" not in text
    assert "conv_general_dilated" not in text
    # The model that was turned is as it was.
    assert type(model.mlp.layers[0]) is eqx.nn.Linear
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    again = eqx.tree_deserialise_leaves(file, to_cudnn(Model(jax.random.key(1))))
    assert eqx.tree_equal(again, turned)


def test_a_turned_model_gets_another_implementation() -> None:
    made = to_cudnn(eqx.nn.MultiheadAttention(2, 8, key=_KEY))
    assert {made.implementation, made.query_proj.implementation} == {"auto"}
    again = to_cudnn(made, implementation="xla")
    assert {again.implementation, again.query_proj.implementation} == {"xla"}
    assert eqx.tree_equal(to_cudnn(again), made)


def test_weights_are_read_as_they_lie() -> None:
    layer = to_cudnn(eqx.nn.Linear(3, 4, key=_KEY))
    text = str(jax.make_jaxpr(jax.vmap(layer))(jnp.ones((5, 3))))
    assert "b f32[1,3,4] order(0,2,1)" in text
    # The other transpositions are of axes of size 1.
    assert "3,4] = transpose" not in text


def test_masks_are_data_and_rows_without_keys_are_0() -> None:
    layer = to_cudnn(eqx.nn.MultiheadAttention(2, 8, key=_KEY))
    x = drawn.normal(0, (6, 8))
    found = layer(x, x, x, masks.Causal())
    array = layer(x, x, x, jnp.tril(jnp.ones((6, 6), bool)))
    np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-6)
    none = layer(x, x, x, jnp.zeros((6, 6), bool))
    assert not jnp.any(none)


def test_dropout_drops_weights_in_training_only() -> None:
    layer = eqx.nn.MultiheadAttention(8, 8 * 32, dropout_p=0.25, key=_KEY)
    # Projections of nothing, and values that are a unit matrix, return the weights.
    unit = jnp.eye(8 * 32)
    layer = eqx.tree_at(
        lambda x: [
            p.weight for p in (x.query_proj, x.key_proj, x.value_proj, x.output_proj)
        ],
        layer,
        [unit] * 4,
    )
    layer = to_cudnn(layer)
    q, k = drawn.normal(0, (2, 32, 8 * 32))
    v = jnp.tile(jnp.eye(32), (1, 8))
    run = eqx.filter_jit(lambda layer, key: layer(q, k, v, key=key))
    heads = (1, 32, 8, 32)
    weights = attention(
        q.reshape(heads), k.reshape(heads), q.reshape(heads), weights_only=True
    )[0]
    for seed in range(2):
        draw = np.asarray(run(layer, jax.random.key(seed))).reshape(32, 8, 32)
        draw = draw.swapaxes(0, 1)
        kept = draw != 0
        np.testing.assert_allclose(draw[kept], weights[kept] / 0.75, rtol=1e-4)
        assert abs(1 - kept.mean() - 0.25) < 0.02
    off = run(eqx.nn.inference_mode(layer), None).reshape(32, 8, 32)
    np.testing.assert_allclose(off.swapaxes(0, 1), weights, rtol=1e-4)
    with pytest.raises(ValueError, match=r"dropout of 0.25 needs a random key"):
        layer(q, k, v)


def test_16_bit_models_may_get_f32_inputs() -> None:
    layer = eqx.nn.MultiheadAttention(2, 8, key=_KEY)
    narrow = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, layer
    )
    x = drawn.normal(0, (6, 8))
    for y in (x, x.astype(jnp.bfloat16)):
        found, own = (each(y, y, y) for each in (to_cudnn(narrow), narrow))
        assert found.dtype == own.dtype
        np.testing.assert_allclose(
            found.astype(jnp.float32), layer(x, x, x), rtol=0.05, atol=0.02
        )


def test_wrong_calls_are_refused() -> None:
    class Own(eqx.nn.Linear):
        """A layer of someone's own."""

    with pytest.raises(ValueError, match="a Own, has no layer of equinox"):
        to_cudnn(Own(3, 4, key=_KEY))
    with pytest.raises(ValueError, match="implementation"):
        to_cudnn(Model(_KEY), implementation="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\), not \(3,\)"):
        to_cudnn(eqx.nn.Linear(3, 4, key=_KEY))(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"shape \(2, 3, 8, 8\), and one example"):
        to_cudnn(eqx.nn.Conv2d(3, 4, 3, key=_KEY))(jnp.ones((2, 3, 8, 8)))
    layer = to_cudnn(eqx.nn.MultiheadAttention(2, 8, key=_KEY))
    x = jnp.ones((6, 8))
    with pytest.raises(ValueError, match="process_heads returned shapes"):
        layer(x, x, x, process_heads=lambda q, k, v: (q[1:], k, v))
    with pytest.raises(ValueError, match="MultiheadAttention: "):
        layer(x, x[1:], x)
    for mask in (jnp.ones((5, 6), bool), jnp.ones((3, 6, 6), bool), np.ones(5, bool)):
        shape = re.escape(str(mask.shape))
        told = rf"mask has shape {shape}. Its shape must be \(6, 6\), .* or \(2, 6, 6\)"
        with pytest.raises(ValueError, match=f"^MultiheadAttention: {told}"):
            layer(x, x, x, mask)
    told = r"Conv: x has shape \(8, 9, 3\), with 8 channels on axis 0, and the layer "
    with pytest.raises(ValueError, match=told + r"takes 3.*moveaxis\(x, -1, 0\)"):
        to_cudnn(eqx.nn.Conv2d(3, 4, 3, key=_KEY))(jnp.ones((8, 9, 3)))
