# SPDX-License-Identifier: Apache-2.0
"""Tests cuDNN's attention in Flax's layers against XLA's, also with a cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import nnx

from jax_cudnn import plans
from jax_cudnn.flax import Rotary, make_attention_fn
from jax_cudnn.flax.nnx import MultiHeadAttention

pytestmark = pytest.mark.gpu

# b batch, s length, f features, h heads, k key heads; d is 64.
B, S, F, H, K = 3, 200, 512, 8, 2
LENGTHS = np.array([129, 7, 60])
STEPS = 4

CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "rotary": {"rotary": Rotary()},
    "window": {"rotary": Rotary(), "local_window_size": (31, 0)},
    "sinks": {
        "rotary": Rotary(base=500.0),
        "use_sinks": True,
        "sinks_init": nnx.initializers.normal(1.0),
    },
}


@pytest.fixture(autouse=True)
def _as_users_have_it():
    """Let Flax's own code broadcast as it does outside of the tests."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def layer_of(implementation: Any, dtype: Any, **options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(
        H,
        F,
        num_kv_heads=K,
        is_causal=True,
        implementation=implementation,
        dtype=dtype,
        decode=False,
        rngs=nnx.Rngs(0),
        **options,
    )


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (B, S, F))


def trained(layer: MultiHeadAttention) -> list[np.ndarray]:
    """Return the output and the gradients of all parameters."""
    graph, params = nnx.split(layer, nnx.Param)
    weights = jax.random.normal(jax.random.key(2), (B, S, F))

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = nnx.merge(graph, params)(x).astype(jnp.float32)
        return jnp.sum(output * weights), output

    grads, output = jax.jit(jax.grad(loss, has_aux=True))(params, inputs())
    return [np.asarray(x, np.float64) for x in [output, *jax.tree.leaves(grads)]]


def generated(layer: MultiHeadAttention) -> list[np.ndarray]:
    """Return what prompts of different lengths and some tokens behind them give."""
    x = inputs()
    layer.init_cache((B, S, F), layer.dtype or jnp.float32, ragged=True)
    graph, params, cache = nnx.split(layer, nnx.Param, nnx.Cache)

    def step(cache: Any, x: jax.Array, lengths: Any) -> tuple[Any, jax.Array]:
        module = nnx.merge(graph, params, cache)
        output = module(x, decode=True, input_lengths=lengths)
        return nnx.state(module, nnx.Cache), output

    step = jax.jit(step, donate_argnums=0)
    cache, prompt = step(cache, x[:, : max(LENGTHS)], jnp.asarray(LENGTHS))
    found = [prompt[b, :n] for b, n in enumerate(LENGTHS)]
    for number in range(STEPS):
        places = jnp.asarray(LENGTHS + number)[:, None, None]
        token = jnp.take_along_axis(x, places, axis=1)
        cache, output = step(cache, token, jnp.ones(B, jnp.int32))
        found.append(output[:, 0])
    return [np.asarray(x, np.float64) for x in found]


@pytest.mark.parametrize("run", [trained, generated])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_is_as_exact_as_xla(name, run, record_property):
    found, beside = (
        run(layer_of(implementation, jnp.bfloat16, **CASES[name]))
        for implementation in ("cudnn", "xla")
    )
    with jax.default_matmul_precision("highest"):
        truth = run(layer_of("xla", jnp.float32, **CASES[name]))
    largest = max(np.abs(z).max() for z in truth)
    for number, (x, y, z) in enumerate(zip(found, beside, truth, strict=True)):
        ours, xlas = (np.abs(each - z).max() / largest for each in (x, y))
        record_property(f"{number}", f"{ours:.1e} (XLA: {xlas:.1e})")
        # The floor is one rounding of a number of bf16 as large as the largest.
        assert ours <= max(2 * xlas, 2**-8), (number, ours, xlas)


@pytest.mark.parametrize("name", CASES)
def test_generated_tokens_are_those_of_the_whole(name):
    layer = layer_of("cudnn", jnp.bfloat16, **CASES[name])
    whole = np.asarray(layer(inputs()), np.float64)
    *prompts, last = generated(layer)[: B + 1]
    for b, (prompt, n) in enumerate(zip(prompts, LENGTHS, strict=True)):
        # Rows of the projections may be summed in another order.
        np.testing.assert_allclose(prompt, whole[b, :n], atol=0.05)
        np.testing.assert_allclose(last[b], whole[b, n], atol=0.05)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_that_heads_drop_alike_are_flaxs(dtype: Any, is_causal: bool) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    q, k, v, cotangent = (jax.random.normal(key, (B, S, H, 64), dtype) for key in keys)
    options: dict[str, Any] = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(9)}
    visible = jnp.tril(jnp.ones((S, S), bool)) if is_causal else None

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        attend = make_attention_fn(implementation="cudnn", is_causal=is_causal)
        return attend(q, k, v, **options)

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return nnx.dot_product_attention(q, k, v, mask=visible, **options)

    def both(function: Any, dtype: Any) -> list[np.ndarray]:
        arrays = [x.astype(dtype) for x in (q, k, v)]
        with jax.default_matmul_precision("highest"):
            output, pullback = jax.vjp(function, *arrays)
            found = [output, *pullback(cotangent.astype(dtype))]
        return [np.asarray(x, np.float64) for x in found]

    report = plans.inspect(
        jax.grad(lambda *x: ours(*x).astype(jnp.float32).sum()), q, k, v
    )
    assert [call.implementation for call in report.calls] == ["cudnn"] * 4
    exact = both(theirs, jnp.float32)
    for mine, flaxs, truth in zip(
        both(ours, dtype), both(theirs, dtype), exact, strict=True
    ):
        scale = np.linalg.norm(truth)
        error = np.linalg.norm(mine - truth) / scale
        assert error <= 2 * np.linalg.norm(flaxs - truth) / scale
