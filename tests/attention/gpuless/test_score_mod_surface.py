# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans attention with a score_mod, forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import score_mods, sdpa
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from tests.common.gpuless import harness

pytestmark = pytest.mark.sampled

_SLOPES = jnp.arange(4, dtype=jnp.float32)
_FUNCTIONS: dict[str, Any] = {
    "softcap": score_mods.softcap(30.0),
    "alibi": score_mods.alibi(_SLOPES),
    "temperatures": lambda x, b, h, q, k: x * _SLOPES[h],
    "rows_and_columns": lambda x, b, h, q, k: jnp.tanh(
        x * _SLOPES[(b + q) % 4] + _SLOPES[(b + k) % 4]
    ),
    "chosen": lambda x, b, h, q, k: jnp.where((q + k) % 3 == 0, x, x * 0.5),
    "clipped": lambda x, b, h, q, k: jnp.clip(x, -_SLOPES[h], 2.0),
    "gated": lambda x, *_: x * jax.nn.sigmoid(x),
}
_OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "lengths": {"key_value_seq_lengths": jnp.array([100, 131])},
    "window": {"local_window_size": (31, 0)},
    "bias": {"bias": jnp.zeros((1, 4, 96, 131), jnp.bfloat16)},
}


def _graphs(function: Any, options: dict[str, Any]) -> list[Graph]:
    """Return the graphs of a forward and of a backward pass."""
    shapes = ((2, 96, 4, 64), (2, 131, 2, 64), (2, 131, 2, 64))
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(q: Any, k: Any, v: Any) -> jax.Array:
        return sdpa(q, k, v, score_mod=function, **options).sum(dtype=jnp.float32)

    with jax.numpy_dtype_promotion("standard"):
        found = traced_graphs(jax.grad(loss, (0, 1, 2)), *operands)
    return [each.graph for each in found]


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_forward_and_backward_have_plans(gpu: str) -> None:
    target = harness.target(gpu)
    texts: dict[tuple[str, str, str], str] = {}
    for name, function in _FUNCTIONS.items():
        for others, options in _OTHERS.items():
            for graph in _graphs(function, options):
                kind = graph.nodes[0].kind
                first = legalize(graph, target).candidates[0].graph
                texts[name, others, kind] = to_json(first)
    assert len(texts) == 2 * len(_FUNCTIONS) * len(_OTHERS)
    answers = harness.plan_all([*texts.values()], gpu, build=False)
    refused = [
        key
        for key, answer in zip(texts, answers, strict=True)
        if "candidates" not in answer
    ]
    assert refused == []


def test_ampere_has_the_forward_kernel_only() -> None:
    graphs = _graphs(_FUNCTIONS["softcap"], {})
    target = harness.target("a100")
    texts = [to_json(legalize(x, target).candidates[0].graph) for x in graphs]
    forward, backward = harness.plan_all(texts, "a100", build=False)
    assert forward["candidates"]
    assert backward["error"] == "UnsupportedError"
