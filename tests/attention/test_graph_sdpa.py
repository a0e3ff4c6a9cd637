# SPDX-License-Identifier: Apache-2.0
"""Tests that graphs of attention and of its gradient are checked when made."""

import dataclasses
import re
from typing import Any

import pytest

from jax_cudnn import GraphError
from jax_cudnn.graph import SdpaAttributes, kind_named, sdpa_graph
from tests.attention.shared.oracle import (
    attention_graph,
    backward_graph,
    full_forward,
    with_tensor,
)

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("tensor", "changes", "message"),
    [
        ("key", {"dims": (2, 3, 7), "order": (0, 1, 2)}, "sdpa: key has rank 3, not 4"),
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
def test_a_bad_attention_tensor_is_refused(
    tensor: str, changes: dict[str, Any], message: str
) -> None:
    graph = full_forward()
    if message.startswith("sdpa_backward"):
        graph = backward_graph(graph, with_grad_stats=True)
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        with_tensor(graph, tensor, **changes)


def test_a_gradient_of_a_bias_that_is_not_there_is_refused() -> None:
    graph = backward_graph(attention_graph(with_stats=True))
    (node,) = graph.nodes
    bias = dataclasses.replace(
        graph.tensor("query"), name="grad_bias", dims=(1, 6, 5, 7)
    )
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
        sdpa_graph(inputs, attributes=SdpaAttributes(scale=0.5, is_causal=True))


def test_statistics_are_f64_for_f64_and_f32_for_all_else() -> None:
    made = {
        dtype: attention_graph(dtype=dtype, with_stats=True).tensor("stats").dtype
        for dtype in ("bf16", "f16", "f32", "f64")
    }
    assert made == {"bf16": "f32", "f16": "f32", "f32": "f32", "f64": "f64"}


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
