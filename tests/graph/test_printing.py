# SPDX-License-Identifier: Apache-2.0
"""Tests that printed and drawn graphs say what the graph is."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_cudnn
from jax_cudnn.graph import Graph, GraphWriter, MatmulAttributes, Tensor
from jax_cudnn.graph.printing import mermaid_lines
from jax_cudnn.lowering import traced_graphs

pytestmark = pytest.mark.once


def _layer() -> Graph:
    """Return relu(a b + bias), with b stored transposed and the sums as a result."""
    writer = GraphWriter("f32")
    writer.input(Tensor(name="a", dtype="bf16", dims=(1, 5, 3), order=(0, 1, 2)))
    writer.input(Tensor(name="weights", dtype="bf16", dims=(1, 3, 7), order=(0, 2, 1)))
    writer.input(Tensor(name="bias", dtype="f32", dims=(1, 1, 7), order=(0, 1, 2)))
    product = writer.node(
        "matmul",
        {"a": "a", "b": "weights"},
        MatmulAttributes(),
        dims=(1, 5, 7),
        order=(0, 1, 2),
    )
    total = writer.pointwise("add", product, "bias")
    made = writer.pointwise("relu", total, alpha=0.25)
    final = Tensor(name="output", dtype="bf16", dims=(1, 5, 7), order=(0, 1, 2))
    return writer.finish((writer.result(made, final), writer.result(total, _SUMS)))


_BOX = re.compile(r"  (t_\w+|n\d+) ?[\[(]")
_SUMS = Tensor(name="sums", dtype="f16", dims=(1, 5, 7), order=(0, 1, 2))


def _loss(query: jax.Array, key: jax.Array) -> jax.Array:
    output = jax_cudnn.sdpa(query, key, key, is_causal=True)
    return jnp.sum(output.astype(jnp.float32))


def _gradient_graph() -> Graph:
    query = jax.ShapeDtypeStruct((2, 5, 3, 16), jnp.bfloat16)
    return traced_graphs(jax.grad(_loss), query, query)[1][0]


def test_text_has_a_line_for_each_node() -> None:
    assert str(_layer()) == (
        "operands a bf16[1,5,3], weights bf16[1,3,7] order(0,2,1), bias f32[1,1,7]\n"
        "matmul_0 f32[1,5,7] = matmul(a, b=weights)\n"
        "add_1 f32[1,5,7] = add(matmul_0, bias)\n"
        "output bf16[1,5,7] = relu(add_1; alpha=0.25)\n"
        "sums f16[1,5,7] = identity(add_1)\n"
        "results output, sums"
    )


def test_text_of_attention_has_all_results_and_attributes() -> None:
    (line,) = str(_gradient_graph()).splitlines()[1:-1]
    assert line.endswith(
        " = sdpa_backward(grad_output, key, output, query, stats, value; "
        "scale=0.25, is_causal=True)"
    )
    stored = "bf16[2,3,5,16] order(0,2,1,3)"
    for name in ("grad_query", "grad_key", "grad_value"):
        assert f"{name} {stored}" in line


def test_a_graph_without_operands_says_so() -> None:
    writer = GraphWriter("f32")
    total = writer.pointwise("exp", writer.constant(2.5, 2))
    final = Tensor(name="output", dtype="f32", dims=(1, 1), order=(0, 1))
    assert str(writer.finish((writer.result(total, final),))) == (
        "operands (none)\n"
        "constant_0 f32[1,1] = constant(value=2.5)\n"
        "output f32[1,1] = exp(constant_0)\n"
        "results output"
    )


def test_mermaid_has_boxes_and_labelled_arrows() -> None:
    assert _layer().mermaid().splitlines() == [
        "flowchart TD",
        '  t_a(["a<br/>bf16[1,5,3]"])',
        '  t_weights(["weights<br/>bf16[1,3,7] order(0,2,1)"])',
        '  t_bias(["bias<br/>f32[1,1,7]"])',
        '  n0["matmul"]',
        '  n1["add"]',
        '  n2["relu<br/>alpha=0.25"]',
        '  t_output(["output<br/>bf16[1,5,7]"])',
        '  n3["identity"]',
        '  t_sums(["sums<br/>f16[1,5,7]"])',
        "  t_a --> n0",
        '  t_weights -->|"b"| n0',
        '  n0 -->|"a: matmul_0 f32[1,5,7]"| n1',
        '  t_bias -->|"b"| n1',
        '  n1 -->|"a: add_1 f32[1,5,7]"| n2',
        "  n2 --> t_output",
        '  n1 -->|"a: add_1 f32[1,5,7]"| n3',
        "  n3 --> t_sums",
    ]


def test_a_prefix_keeps_several_graphs_apart() -> None:
    plain = "\n".join(mermaid_lines(_layer()))
    prefixed = "\n".join(mermaid_lines(_layer(), "c3_"))
    name = r"(t_\w+|n\d)\b"
    assert re.sub(rf"\bc3_{name}", r"\1", prefixed) == plain
    assert not re.search(rf"\b{name}", prefixed)


def test_dot_has_boxes_and_labelled_arrows() -> None:
    lines = _layer().dot().splitlines()
    assert lines[0] == "digraph cudnn {"
    assert lines[-1] == "}"
    assert r'  t_a [label="a\nbf16[1,5,3]", style=rounded];' in lines
    assert r'  n2 [label="relu\nalpha=0.25"];' in lines
    assert '  n0 -> n1 [label="a: matmul_0 f32[1,5,7]"];' in lines
    assert "  n2 -> t_output;" in lines


@pytest.mark.parametrize("make", [_layer, _gradient_graph])
def test_arrows_join_what_is_drawn_and_nothing_is_left_out(make) -> None:
    graph = make()
    for text, arrow in ((graph.mermaid(), "-->"), (graph.dot(), "->")):
        lines = [re.sub(r'"[^"]*"', '""', line) for line in text.splitlines()[1:]]
        joined = [line for line in lines if arrow in line]
        boxes = [line for line in lines if arrow not in line]
        ends = [end for line in joined for end in re.findall(r"t_\w+|n\d+", line)]
        drawn = [match[1] for line in boxes if (match := _BOX.match(line))]
        assert sorted(set(ends)) == sorted(drawn)
        assert len(drawn) == len(graph.inputs) + len(graph.outputs) + len(graph.nodes)
        read = sum(len(node.inputs) for node in graph.nodes)
        assert len(joined) == read + len(graph.outputs)
