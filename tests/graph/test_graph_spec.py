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
    sdpa_graph,
)
from jax_cudnn.graph.description import table
from tests.attention.shared.oracle import (
    attention_graph,
    backward_graph,
    chained_graph,
    with_tensor,
)

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


def _full_forward() -> Graph:
    return attention_graph(
        bias="1hst",
        mask="b1s1",
        lengths=("query_lengths", "key_lengths"),
        with_stats=True,
    )


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
        (_full_forward, "inputs"),
        (lambda: _full_forward().nodes[0], "kind"),
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
    graph = _full_forward()
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
        _full_forward(),
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


# --- attention ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (
            "key",
            {"dims": (2, 3, 7), "order": (0, 1, 2)},
            "sdpa: key has rank 3, not 4",
        ),
        ("value", {"dtype": "bf16"}, "sdpa: value is bf16, not f32"),
        (
            "key",
            {"dims": (2, 3, 7, 12)},
            "sdpa: key has dims [2, 3, 7, 12], not [2, 3, 7, 11]",
        ),
        (
            "value",
            {"dims": (3, 3, 7, 13)},
            "sdpa: value has dims [3, 3, 7, 13], not [2, 3, 7, 13]",
        ),
        (
            "bias",
            {"dims": (1, 6, 5, 6)},
            "sdpa: bias dims [1, 6, 5, 6] do not broadcast to [2, 6, 5, 7]",
        ),
        (
            "bias",
            {"dims": (6, 5, 7), "order": (0, 1, 2)},
            "sdpa: bias has rank 3, not 4",
        ),
        ("bias", {"dtype": "i32"}, "sdpa: bias is i32, not a float"),
        (
            "mask",
            {"dims": (2, 3, 5, 1)},
            "sdpa: mask dims [2, 3, 5, 1] do not broadcast to [2, 6, 5, 7]",
        ),
        ("mask", {"dtype": "u8"}, "sdpa: mask is u8, not bool"),
        (
            "query_lengths",
            {"dims": (1, 1, 1, 1)},
            "sdpa: query_lengths has dims [1, 1, 1, 1], not [2, 1, 1, 1]",
        ),
        ("key_lengths", {"dtype": "i64"}, "sdpa: key_lengths is i64, not i32"),
        (
            "output",
            {"dims": (2, 6, 5, 11)},
            "sdpa: output has dims [2, 6, 5, 11], not [2, 6, 5, 13]",
        ),
        ("output", {"dtype": "f16"}, "sdpa: output is f16, not f32"),
        (
            "stats",
            {"dims": (2, 6, 5, 7)},
            "sdpa: stats has dims [2, 6, 5, 7], not [2, 6, 5, 1]",
        ),
        ("stats", {"dtype": "bf16"}, "sdpa: stats is bf16, not f32"),
    ],
)
def test_a_bad_attention_tensor_is_refused(
    tensor: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        with_tensor(_full_forward(), tensor, **changes)


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        (
            "grad_output",
            {"dims": (2, 6, 5, 11)},
            "sdpa_backward: grad_output has dims [2, 6, 5, 11], not [2, 6, 5, 13]",
        ),
        ("grad_output", {"dtype": "f64"}, "sdpa_backward: grad_output is f64, not f32"),
        (
            "output",
            {"dims": (2, 6, 7, 13)},
            "sdpa_backward: output has dims [2, 6, 7, 13], not [2, 6, 5, 13]",
        ),
        (
            "grad_query",
            {"dims": (2, 6, 5, 13)},
            "sdpa_backward: grad_query has dims [2, 6, 5, 13], not [2, 6, 5, 11]",
        ),
        ("grad_key", {"dtype": "bf16"}, "sdpa_backward: grad_key is bf16, not f32"),
        (
            "grad_bias",
            {"dims": (2, 6, 5, 7)},
            "sdpa_backward: grad_bias has dims [2, 6, 5, 7], not [1, 6, 5, 7]",
        ),
        (
            "stats",
            {"dims": (2, 6, 5, 7)},
            "sdpa_backward: stats has dims [2, 6, 5, 7], not [2, 6, 5, 1]",
        ),
        ("grad_stats", {"dtype": "f16"}, "sdpa_backward: grad_stats is f16, not f32"),
        ("mask", {"dtype": "u8"}, "sdpa_backward: mask is u8, not bool"),
    ],
)
def test_a_bad_attention_gradient_tensor_is_refused(
    tensor: str, changes: dict[str, Any], message: str
) -> None:
    graph = backward_graph(_full_forward(), with_grad_stats=True)
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        with_tensor(graph, tensor, **changes)


def test_a_gradient_of_a_bias_that_is_not_there_is_refused() -> None:
    graph = backward_graph(attention_graph(with_stats=True))
    (node,) = graph.nodes
    bias = _tensor(name="grad_bias", dtype="f32", dims=(1, 6, 5, 7))
    with pytest.raises(GraphError, match=r"^sdpa_backward: grad_bias without bias$"):
        dataclasses.replace(
            graph,
            tensors=(*graph.tensors, bias),
            nodes=(
                dataclasses.replace(
                    node, outputs=(("grad_bias", "grad_bias"), *node.outputs)
                ),
            ),
            outputs=(*graph.outputs, "grad_bias"),
        )


@pytest.mark.parametrize(("h", "k"), [(6, 4), (3, 6), (6, 0)])
def test_query_heads_that_do_not_divide_are_refused(h: int, k: int) -> None:
    message = f"sdpa: {h} along axis 1 of query does not divide by {k} (key heads)"
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        attention_graph(
            sizes={"b": 2, "s": 5, "t": 7, "h": h, "k": k, "d": 11, "e": 13}
        )


@pytest.mark.parametrize("k", [0, 3])
def test_attention_without_heads_is_legal(k: int) -> None:
    sizes = {"b": 2, "s": 5, "t": 7, "h": 0, "k": k, "d": 11, "e": 13}
    assert attention_graph(sizes=sizes).has_empty_tensor


def test_integer_operands_are_refused() -> None:
    with pytest.raises(GraphError, match=r"^sdpa: query is i32, not a float$"):
        attention_graph(dtype="i32")


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan")])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(GraphError, match=f"^sdpa: scale {scale} is not finite$"):
        attention_graph(scale=scale)


def test_tensors_are_named_by_their_roles() -> None:
    graph = attention_graph()
    inputs = {t.name: t for t in graph.input_tensors}
    inputs["key"] = dataclasses.replace(inputs["key"], name="k")
    with pytest.raises(GraphError, match=r"^sdpa: tensor 'k' is given as 'key'$"):
        sdpa_graph(inputs, attributes=_ATTRIBUTES)


def test_statistics_are_f64_for_f64_and_f32_for_all_else() -> None:
    made = {
        dtype: attention_graph(dtype=dtype, with_stats=True).tensor("stats").dtype
        for dtype in ("bf16", "f16", "f32", "f64")
    }
    assert made == {"bf16": "f32", "f16": "f32", "f32": "f32", "f64": "f64"}


# --- derivative -----------------------------------------------------------------------


def test_residuals_add_statistics_once() -> None:
    derivative = kind_named("sdpa").derivative
    assert derivative is not None
    with_stats = attention_graph(with_stats=True)
    assert derivative.with_residuals(attention_graph()) == with_stats
    assert derivative.with_residuals(with_stats) == with_stats


def test_backward_says_where_its_operands_come_from() -> None:
    derivative = kind_named("sdpa").derivative
    assert derivative is not None
    forward = attention_graph(bias="1hst", mask="bh1t", with_stats=True)
    assert forward.inputs == ("query", "key", "value", "bias", "mask")
    wanted = (True, True, True, True, False)
    backward = derivative.backward(forward, wanted, (True, True))
    sources = dict(zip(backward.graph.inputs, backward.operands, strict=True))
    assert sources == {
        "query": ("input", 0),
        "key": ("input", 1),
        "value": ("input", 2),
        "bias": ("input", 3),
        "mask": ("input", 4),
        "output": ("output", 0),
        "stats": ("output", 1),
        "grad_output": ("cotangent", 0),
        "grad_stats": ("cotangent", 1),
    }
    gradients = dict(zip(backward.graph.outputs, backward.gradients, strict=True))
    assert gradients == {
        "grad_query": 0,
        "grad_key": 1,
        "grad_value": 2,
        "grad_bias": 3,
    }


@pytest.mark.parametrize("is_bias_wanted", [False, True])
def test_backward_computes_a_bias_gradient_only_where_wanted(
    is_bias_wanted: bool,
) -> None:
    derivative = kind_named("sdpa").derivative
    assert derivative is not None
    forward = attention_graph(bias="b1st")
    wanted = (True, False, True, is_bias_wanted)
    backward = derivative.backward(forward, wanted, (True,))
    assert ("grad_bias" in backward.graph.outputs) == is_bias_wanted


@pytest.mark.parametrize("nonzero", [(True, False), (False, True), (True, True)])
def test_backward_reads_the_cotangent_of_statistics_only_where_there_is_one(
    nonzero: tuple[bool, bool],
) -> None:
    derivative = kind_named("sdpa").derivative
    assert derivative is not None
    forward = attention_graph(with_stats=True)
    backward = derivative.backward(forward, (True, True, True), nonzero)
    assert "grad_output" in backward.graph.inputs
    assert ("grad_stats" in backward.graph.inputs) == nonzero[1]
