# SPDX-License-Identifier: Apache-2.0
"""Tests the order of attention's passes, and which of them a graph takes."""

from typing import Any

import pytest

from jax_cudnn.graph import Graph, Target
from jax_cudnn.legalize import legalize
from jax_cudnn.legalize.attention import passes
from jax_cudnn.legalize.attention.passes import ORDERS, PASSES, REASONS, Pass
from tests.attention.shared.cached import cached_graph
from tests.attention.shared.oracle import attention_graph, backward_graph

pytestmark = pytest.mark.once

_ALL = {name for order in ORDERS.values() for name in order}
_TARGET = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)


def test_orders_are_of_passes_that_there_are_and_each_is_in_one() -> None:
    assert set(PASSES) == _ALL - {"dropout"}
    for order in ORDERS.values():
        assert len(set(order)) == len(order)


@pytest.mark.parametrize(("first", "others", "why"), REASONS)
def test_every_order_obeys_each_reason(
    first: str, others: tuple[str, ...], why: str
) -> None:
    assert why.endswith(".")
    for other in others:
        common = [order for order in ORDERS.values() if {first, other} <= {*order}]
        assert common, f"{first} and {other} are in no order"
        for order in common:
            assert order.index(first) < order.index(other)


def _attention(**options: Any) -> Graph:
    sizes = {"b": 2, "s": 128, "t": 256, "h": 6, "k": 3, "d": 8, "e": 16}
    return attention_graph(dtype="bf16", **{"sizes": sizes, **options})


def _gradient(**options: Any) -> Graph:
    return backward_graph(_attention(with_stats=True, **options))


_ALWAYS = ["keep_layout", "complete_lengths", "pad_heads"]


@pytest.mark.parametrize(
    ("graph", "added"),
    [
        (_attention(), []),
        (_attention(scale=-0.3), ["make_scale_positive"]),
        (_attention(sinks="1h11"), ["take_sinks"]),
        (_attention(with_max=True), ["ask_for_sum"]),
        (_attention(mask="1hst"), ["hide_dead_rows", "complete_bias"]),
        (_attention(lengths=("key_lengths",)), ["hide_dead_rows"]),
        (_attention(bias="bhs1"), ["absorb_row_bias"]),
        (_attention(bias="bhst"), ["complete_bias"]),
        (_gradient(), []),
        (_gradient(bias="bhst"), ["take_far_rows", "complete_bias"]),
        (_gradient(sinks="1h11"), ["take_sinks"]),
    ],
    ids=str,
)
def test_a_graph_takes_the_passes_for_what_it_has(
    graph: Graph, added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def noting(name: str, each: Pass) -> Pass:
        def run(editor: Any) -> None:
            found.append(name)
            each.run(editor)

        return each._replace(run=run)

    noted = {name: noting(name, each) for name, each in PASSES.items()}
    monkeypatch.setattr(passes, "PASSES", noted)
    rewrite = legalize(graph, _TARGET).candidates[0]
    assert set(found) == {*_ALWAYS, *added}
    assert "mask" not in rewrite.graph.inputs


def test_attention_over_a_cache_takes_its_own_passes() -> None:
    graph = cached_graph(dtype="bf16", sizes={"s": 1}, scale=-0.3)
    (rewrite,) = legalize(graph, _TARGET).candidates
    attributes: Any = rewrite.graph.nodes[0].attributes
    assert attributes.scale == 0.3
    assert {"query_lengths", "key_lengths"} <= {*rewrite.graph.inputs}
