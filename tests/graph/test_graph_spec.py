# SPDX-License-Identifier: Apache-2.0
"""Tests that graphs are frozen, hashable, equal by meaning, and checked when made."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from jax_cudnn import GraphError
from jax_cudnn.graph import (
    Attributes,
    Graph,
    Node,
    SdpaAttributes,
    Target,
    Tensor,
    kind_named,
    register_kind,
)
from jax_cudnn.graph.description import table
from tests.attention.shared.oracle import attention_graph, chained_graph, full_forward

pytestmark = pytest.mark.once

_ATTRIBUTES = SdpaAttributes(scale=0.5, is_causal=True)


def _tensor(**changes: Any) -> Tensor:
    fields: dict[str, Any] = {
        "name": "query",
        "dtype": "bf16",
        "dims": (2, 6, 5, 11),
        "order": (0, 2, 1, 3),
    }
    return Tensor(**{**fields, **changes})


# --- tensors --------------------------------------------------------------------------


def test_stored_shape_is_dims_from_slowest_to_fastest_axis() -> None:
    assert _tensor().stored_shape == (2, 5, 6, 11)
    assert _tensor(order=(3, 0, 1, 2)).stored_shape == (11, 2, 6, 5)


def test_a_tensor_is_empty_where_one_axis_is() -> None:
    assert _tensor(dims=(2, 6, 0, 11)).is_empty
    assert not _tensor().is_empty


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "tensor name '' is not an ASCII identifier"),
        ({"name": "a b"}, "tensor name 'a b' is not an ASCII identifier"),
        ({"name": "clé"}, "tensor name 'clé' is not an ASCII identifier"),
        (
            {"dtype": "float32"},
            "tensor 'query': dtype 'float32' is not one of bool, u8, i8, i32, i64, "
            "f4_e2m1fn, f8_e4m3fn, f8_e5m2, f8_e8m0fnu, bf16, f16, f32, f64",
        ),
        ({"dims": (), "order": ()}, "tensor 'query': rank 0 is not 1 to 8"),
        (
            {"dims": (2,) * 9, "order": tuple(range(9))},
            "tensor 'query': rank 9 is not 1 to 8",
        ),
        (
            {"dims": (2, -3, 5, 7)},
            "tensor 'query': dims [2, -3, 5, 7] has a negative entry",
        ),
        (
            {"dims": (2**32, 2**31, 0, 1)},
            "tensor 'query': dims [4294967296, 2147483648, 0, 1] overflow 64 bits",
        ),
        (
            {"order": (0, 2, 2, 3)},
            "tensor 'query': order [0, 2, 2, 3] is not a permutation of the 4 axes",
        ),
        (
            {"order": (0, 1, 2)},
            "tensor 'query': order [0, 1, 2] is not a permutation of the 4 axes",
        ),
    ],
)
def test_a_bad_tensor_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        _tensor(**changes)


def test_the_largest_tensor_is_taken() -> None:
    assert _tensor(dims=(2**62, 1, 1, 1)).dims[0] == 2**62


# --- frozen, hashable, equal ----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (_tensor, "dtype"),
        (full_forward, "inputs"),
        (lambda: full_forward().nodes[0], "kind"),
        (lambda: SdpaAttributes(scale=0.5, is_causal=True), "scale"),
        (
            lambda: Target(name="x", sm_version=90, sm_count=132, cudnn_version=91900),
            "sm_version",
        ),
    ],
)
def test_parts_are_frozen_hashable_and_equal(
    make: Callable[[], Any], field: str
) -> None:
    one, other = make(), make()
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, field, getattr(one, field))


def test_the_order_in_which_tensors_are_listed_does_not_matter() -> None:
    graph = full_forward()
    turned = dataclasses.replace(graph, tensors=graph.tensors[::-1])
    assert turned == graph
    assert hash(turned) == hash(graph)


def test_the_order_of_roles_given_to_make_does_not_matter() -> None:
    roles = {"key": "b", "query": "a", "value": None}
    turned = dict(reversed(roles.items()))
    made = Node.make("sdpa", roles, {}, _ATTRIBUTES)
    assert made == Node.make("sdpa", turned, {}, _ATTRIBUTES)
    assert made.inputs == (("key", "b"), ("query", "a"))


@pytest.mark.parametrize(
    "change",
    [
        {"bias": "1hs1"},
        {"mask": "b1st"},
        {"lengths": ("key_lengths",)},
        {"scale": 0.25},
        {"is_causal": True},
        {"with_stats": True},
        {"dtype": "bf16"},
        {"order": (0, 1, 2, 3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_graphs_that_mean_something_else_differ(change: dict[str, Any]) -> None:
    assert attention_graph(**change) != attention_graph()


# --- graphs ---------------------------------------------------------------------------


def test_operands_and_results_come_in_the_order_asked_for() -> None:
    graph = dataclasses.replace(
        full_forward(),
        inputs=(
            "key_lengths", "mask", "value", "bias", "query", "query_lengths", "key",
        ),
        outputs=("stats", "output"),
    )  # fmt: skip
    assert [t.name for t in graph.input_tensors] == list(graph.inputs)
    assert [t.dims for t in graph.output_tensors] == [(2, 6, 5, 1), (2, 6, 5, 13)]


def test_a_graph_knows_its_only_node_and_its_tensors() -> None:
    graph = attention_graph()
    assert graph.sole_node() is graph.nodes[0]
    assert graph.tensor("value").dims == (2, 3, 7, 13)
    assert not graph.has_empty_tensor
    with pytest.raises(KeyError, match="bias"):
        graph.tensor("bias")


def test_a_tensor_between_two_nodes_is_neither_input_nor_output() -> None:
    graph = chained_graph()
    assert graph.sole_node() is None
    assert "output" not in (*graph.inputs, *graph.outputs)


def _swap_nodes() -> Graph:
    graph = chained_graph()
    return dataclasses.replace(graph, nodes=graph.nodes[::-1])


def _repeat_node() -> Graph:
    graph = attention_graph()
    return dataclasses.replace(graph, nodes=graph.nodes * 2)


def _with_stray() -> Graph:
    graph = attention_graph()
    stray = [_tensor(name=name) for name in ("stray", "lost")]
    return dataclasses.replace(graph, tensors=(*graph.tensors, *stray))


def _replace(**changes: Any) -> Callable[[], Graph]:
    return lambda: dataclasses.replace(attention_graph(), **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dataclasses.replace(
                attention_graph(), tensors=(_tensor(), *attention_graph().tensors)
            ),
            "two tensors have the same name",
        ),
        (
            _replace(inputs=("query", "key", "value", "key")),
            "graph inputs ['query', 'key', 'value', 'key'] name a tensor twice",
        ),
        (
            _replace(outputs=("output", "output")),
            "graph outputs ['output', 'output'] name a tensor twice",
        ),
        (
            _replace(inputs=("query", "key", "values")),
            "graph inputs name an unknown tensor 'values'",
        ),
        (
            _replace(outputs=("result",)),
            "graph outputs name an unknown tensor 'result'",
        ),
        (_replace(nodes=()), "a graph needs at least one node and one output"),
        (_replace(outputs=()), "a graph needs at least one node and one output"),
        (_swap_nodes, "sdpa reads query='output' before it is made"),
        (
            _replace(inputs=("query", "key")),
            "sdpa reads value='value' before it is made",
        ),
        (_repeat_node, "sdpa makes output='output' a second time"),
        (
            _with_stray,
            "tensors ['lost', 'stray'] are neither inputs nor made by a node",
        ),
        (
            _replace(outputs=("output", "query")),
            "'query' is both an input and an output",
        ),
    ],
)
def test_a_bad_graph_is_refused(make: Callable[[], Graph], message: str) -> None:
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        make()


# --- nodes ----------------------------------------------------------------------------


def _with_node(**changes: Any) -> Callable[[], Graph]:
    def make() -> Graph:
        graph = attention_graph()
        node = dataclasses.replace(graph.nodes[0], **changes)
        return dataclasses.replace(graph, nodes=(node,))

    return make


_QKV = (("key", "key"), ("query", "query"), ("value", "value"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _with_node(kind="conv"),
            f"node kind 'conv' is not one of {', '.join(sorted(table()))}. Export a "
            "program of another version of jax_cudnn again",
        ),
        (
            _with_node(attributes=Attributes()),
            "sdpa: attributes are Attributes, not SdpaAttributes",
        ),
        (
            _with_node(inputs=_QKV[::-1]),
            "sdpa: input roles ['value', 'query', 'key'] not sorted or twice",
        ),
        (
            _with_node(inputs=(*_QKV, ("value", "key"))),
            "sdpa: input roles ['key', 'query', 'value', 'value'] not sorted or twice",
        ),
        (
            _with_node(inputs=(("keys", "key"), *_QKV[1:])),
            "sdpa: unknown input role 'keys'",
        ),
        (
            _with_node(outputs=(("grad_query", "output"),)),
            "sdpa: unknown output role 'grad_query'",
        ),
        (
            _with_node(inputs=(("key", "keys"), *_QKV[1:])),
            "sdpa: key names unknown tensor 'keys'",
        ),
        (_with_node(inputs=_QKV[:2]), "sdpa: input 'value' is missing"),
        (_with_node(outputs=()), "sdpa: output 'output' is missing"),
    ],
)
def test_a_bad_node_is_refused(make: Callable[[], Graph], message: str) -> None:
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        make()


def test_a_node_kind_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"^node kind 'sdpa' is registered twice$"):
        register_kind(kind_named("sdpa"))
