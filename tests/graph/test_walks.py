# SPDX-License-Identifier: Apache-2.0
"""Tests walks over a graph's nodes: what leads to a tensor, follows and reads it."""

import pytest

from jax_cudnn.graph import Graph, GraphWriter, MatmulAttributes, Tensor
from jax_cudnn.graph.walks import (
    following,
    leading_to,
    made_by,
    origins,
    read_by,
    readers,
    sources,
)

pytestmark = pytest.mark.once


def _graph() -> Graph:
    """Two products, the second of the first one's relu, and a sum of both."""
    writer = GraphWriter("f32")
    dims, order = (2, 3, 3), (0, 1, 2)
    a, b, c = (
        writer.input(Tensor(name=name, dtype="f32", dims=dims, order=order))
        for name in "abc"
    )

    def product(a: str, b: str) -> str:
        inputs = {"a": a, "b": b}
        return writer.node("matmul", inputs, MatmulAttributes(), dims=dims, order=order)

    first = product(a, b)
    second = product(writer.pointwise("relu", first), c)
    total = writer.pointwise("add", first, second)
    last = Tensor(name="total", dtype="f32", dims=dims, order=order)
    return writer.finish([writer.result(total, last)])


def _names() -> tuple[Graph, str, str, str]:
    graph = _graph()
    first, relu, second, _ = (node.outputs[0][1] for node in graph.nodes)
    return graph, first, relu, second


def test_what_nodes_make_and_read() -> None:
    graph, first, relu, second = _names()
    assert made_by(graph.nodes) == {first, relu, second, "total"}
    assert read_by(graph.nodes) == {"a", "b", "c", first, relu, second}
    assert made_by([]) == read_by([]) == set()


def test_readers_come_in_their_order() -> None:
    graph, first, _, second = _names()
    assert readers(graph.nodes, first) == [graph.nodes[1], graph.nodes[3]]
    assert readers(graph.nodes, second) == [graph.nodes[3]]
    assert readers(graph.nodes, "total") == []


def test_what_leads_to_a_tensor_is_found_through_all_between() -> None:
    graph, first, relu, _ = _names()
    assert leading_to(graph.nodes, [relu]) == list(graph.nodes[:2])
    assert sources(graph.nodes, [relu]) == {"a", "b", first, relu}
    assert leading_to(graph.nodes, ["total"]) == list(graph.nodes)
    # An operand follows from no node, and of some nodes only these are walked.
    assert leading_to(graph.nodes, ["c"]) == []
    assert sources(graph.nodes, ["c"]) == {"c"}
    assert sources(graph.nodes[1:], [relu]) == {first, relu}


def test_what_follows_from_a_tensor() -> None:
    graph, first, relu, second = _names()
    assert following(graph.nodes, ["c"]) == {"c", second, "total"}
    assert following(graph.nodes, ["b"]) == {"b", first, relu, second, "total"}
    assert following(graph.nodes, ["total"]) == {"total"}


def test_origins_are_the_products_that_a_node_follows_from() -> None:
    graph, *_ = _names()
    one, relu, two, total = graph.nodes
    assert origins(graph.nodes, [one, two]) == {
        one: {one},
        relu: {one},
        two: {one, two},
        total: {one, two},
    }
    assert origins(graph.nodes, [two])[relu] == frozenset()
