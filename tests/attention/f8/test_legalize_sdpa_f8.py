# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN's graph of f8 attention keeps the meaning, and its limits."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.graph import Target, from_json, to_json
from jax_cudnn.legalize import legalize
from tests.attention.shared.f8_graphs import f8_graph
from tests.attention.shared.legal import HOPPER
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate, evaluate_legal

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_BLACKWELL = dataclasses.replace(HOPPER, name="NVIDIA B200", sm_version=100)
_BOTH = ("query_lengths", "key_lengths")


@pytest.mark.parametrize("target", [HOPPER, _BLACKWELL])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"d": 5, "e": 19},
        {"s": 1},
        {"s": 1, "lengths": ("key_lengths",), "with_stats": False},
        {"lengths": _BOTH},
        {"lengths": ("query_lengths",), "is_causal": True},
        {"is_causal": True, "dtype": "f8_e5m2"},
        {"window": (2, 3), "s": 6},
        {"window": (2, 3), "s": 6, "is_causal": True},
        {"window": (99, 99), "lengths": _BOTH},
        {"scale": -0.25},
        {"scale": 0.0},
        {"order": (3, 0, 1, 2)},
        {"with_amax": False, "with_stats": False, "d": 3},
    ],
)
def test_cudnns_graph_means_the_same(change: dict[str, Any], target: Target) -> None:
    graph = f8_graph(**change)
    (rewrite,) = legalize(graph, target).candidates
    assert from_json(to_json(rewrite.graph)) == rewrite.graph
    tensors = {tensor.name: tensor for tensor in rewrite.graph.tensors}
    for role in ("query", "key", "value", "output"):
        assert tensors[role].order[-1] == 3
        assert tensors[role].dims[3] % 16 == 0
    assert tensors["query"].dims[2] > 1 or target == _BLACKWELL
    assert ("query_lengths" in tensors) == ("key_lengths" in tensors)
    attributes: Any = rewrite.graph.nodes[0].attributes
    assert attributes.scale > 0
    operands = draw_arrays(graph, seed=4)
    want = evaluate(graph, operands)
    got = evaluate_legal(rewrite, operands)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))


@pytest.mark.parametrize(
    ("change", "target", "reason"),
    [
        (
            {},
            dataclasses.replace(HOPPER, name="NVIDIA A100", sm_version=80),
            "NVIDIA A100 is sm_80; cuDNN's f8 attention needs sm_90 (Hopper) or newer",
        ),
        (
            {},
            dataclasses.replace(HOPPER, cudnn_version=91000),
            "cuDNN 9.10.0: there is no f8 attention. Use cuDNN 9.10.1 or newer",
        ),
        (
            {"result": "bf16"},
            HOPPER,
            "the result is bf16; cuDNN gives 16-bit results of f8 operands on sm_100 "
            "(Blackwell) and newer, from 9.13 on. Ask for f8 and dequantize",
        ),
        (
            {"result": "f16"},
            dataclasses.replace(_BLACKWELL, cudnn_version=91200),
            "the result is f16; cuDNN gives 16-bit results of f8 operands on sm_100 "
            "(Blackwell) and newer, from 9.13 on. Ask for f8 and dequantize",
        ),
        (
            {"d": 257},
            HOPPER,
            "head sizes d=257, e=13; cuDNN's f8 attention takes at most 256",
        ),
        (
            {"d": 192, "e": 129},
            _BLACKWELL,
            "head sizes d=192, e=129; on sm_100, cuDNN's f8 attention takes at most "
            "128, and d=192 with e=128 from 9.19 on",
        ),
        (
            {"window": (1, 1), "lengths": _BOTH},
            HOPPER,
            "the window [1, 1] leaves queries without a key, or is combined with "
            "lengths; "
            "cuDNN's f8 attention has no mask for it",
        ),
        (
            {"s": 1, "is_causal": True},
            HOPPER,
            "a single query with is_causal or a window; cuDNN's f8 attention takes two "
            "or more on sm_90. Omit them, and the keys that they mask",
        ),
        (
            {"b": 65536},
            HOPPER,
            "cuDNN's attention takes at most 65535 batch entries and 65535 heads",
        ),
    ],
)
def test_limits_are_told(change: dict[str, Any], target: Target, reason: str) -> None:
    refusal = legalize(f8_graph(**change), target)
    assert not refusal.candidates
    assert refusal.reasons == (reason,)
    assert 'implementation="xla"' in refusal.advice


def test_what_one_gpu_takes_is_not_refused_for_an_unknown_one() -> None:
    changes: list[dict[str, Any]] = [{"result": "bf16"}, {"d": 300}]
    for change in changes:
        assert legalize(f8_graph(**change), None).candidates


def test_wide_heads_that_blackwell_takes() -> None:
    assert legalize(f8_graph(d=192, e=128), _BLACKWELL).candidates
    old = dataclasses.replace(_BLACKWELL, cudnn_version=91800)
    assert not legalize(f8_graph(d=192, e=128), old).candidates
