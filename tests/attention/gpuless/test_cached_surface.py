# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN plans attention over caches and pages for every GPU."""

import pytest

from jax_cudnn.graph import to_json
from jax_cudnn.legalize import legalize
from tests.attention.shared.cached import cached_graph
from tests.common.gpuless import harness

# Of each sort of kernel one. Others were planned by hand: docs/decode.md.
_CASES = {
    "one": {},
    "few": {"s": 4},
    "many": {"s": 40},
    "window": {"window": (20, 0)},
    "few_window": {"s": 4, "window": (20, 0)},
    "prompt_window": {"s": 4, "window": (20, 2), "is_causal": False},
    "head_256": {"d": 256, "e": 256},
    "head_192_128": {"d": 192, "e": 128},
    # Latent attention: all query heads share one key head.
    "latent": {"d": 576, "e": 512, "k": 1, "g": 16},
    "few_latent": {"d": 576, "e": 512, "k": 1, "g": 16, "s": 4},
    "no_groups": {"g": 1},
    "heads_first": {"order": (0, 1, 2, 3)},
    "many_heads_first": {"s": 40, "order": (0, 1, 2, 3)},
}
_PAGES = (0, 1, 16, 128)


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_every_form_of_a_cache_has_a_plan(gpu: str) -> None:
    target = harness.target(gpu)
    graphs: dict[str, str] = {}
    for name, case in _CASES.items():
        for page in _PAGES:
            sizes = {"b": 7, "k": 2, "g": 4, "t": 320, "p": 300, "s": 1}
            sizes |= {"i": page, "m": 320 // max(page, 1)}
            options = {"d": 128, "e": 128, "dtype": "bf16", **case}
            sizes |= {x: options.pop(x) for x in ("s", "g", "k") if x in options}
            graph = cached_graph(is_paged=page > 0, sizes=sizes, **options)
            for i, rewrite in enumerate(legalize(graph, target).candidates):
                graphs[f"{name} {page} {i}"] = to_json(rewrite.graph)
    assert len(graphs) == len(_PAGES) * (len(_CASES) + 3)
    answers = harness.plan_all([*graphs.values()], gpu, build=False)
    refused = {
        name: answer
        for name, answer in zip(graphs, answers, strict=True)
        if not answer.get("candidates")
    }
    assert not refused


def test_pages_of_48_tokens_have_no_plan() -> None:
    """The refusal of legalisation is cuDNN's own."""
    sizes = {"s": 1, "i": 48, "m": 4, "p": 9, "b": 2}
    graph = cached_graph(is_paged=True, sizes=sizes, dtype="bf16", query_lengths=True)
    (answer,) = harness.plan_all([to_json(graph)], "h200", build=False)
    assert "power of 2" in str(answer["reasons"])
