# SPDX-License-Identifier: Apache-2.0
"""Tests that compiled loops run each kernel once, also where they keep its results."""

import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn import checkpoint_policies

pytestmark = pytest.mark.gpu

_TURNS, _ROWS, _LENGTH, _WIDTH = 6, 2, 256, 512


def _attend(x: jax.Array) -> jax.Array:
    heads = x.reshape(_ROWS, _LENGTH, -1, 64)
    attended = jax_cudnn.sdpa(
        heads, heads, heads, is_causal=True, implementation="cudnn"
    )
    return attended.reshape(x.shape)


def _normalise(x: jax.Array) -> jax.Array:
    return jax_cudnn.rms_norm(x, jnp.ones(x.shape[-1], x.dtype), implementation="cudnn")


def _multiply(x: jax.Array) -> jax.Array:
    weights = jnp.eye(_WIDTH, dtype=x.dtype)
    return jax_cudnn.matmul(x, weights, activation="relu", implementation="cudnn")


@pytest.mark.parametrize(
    ("kind", "call"),
    [("sdpa", _attend), ("rms_norm", _normalise), ("matmul", _multiply)],
)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_kernel_whose_results_a_loop_stacks_and_reads_is_launched_once(
    kind: str, call: Callable[[jax.Array], jax.Array], is_checkpointed: bool
) -> None:
    def layer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(call(x @ weights) @ weights), None

    if is_checkpointed:
        policy = checkpoint_policies.everything_saveable
        layer = jax.checkpoint(layer, policy=policy)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    keys = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(keys[0], (_TURNS, _WIDTH, _WIDTH), jnp.bfloat16)
    x = jax.random.normal(keys[1], (_ROWS, _LENGTH, _WIDTH), jnp.bfloat16)
    text = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    assert text is not None
    calls = [line for line in text.splitlines() if " custom-call(" in line]
    kinds = Counter(
        found
        for line in calls
        if "jax_cudnn." in line
        for found in set(re.findall(r"\\22kind\\22:\\22(\w+)\\22", line))
    )
    assert kinds[kind] == 1, kinds
