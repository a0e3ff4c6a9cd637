# SPDX-License-Identifier: Apache-2.0
"""Tests that the C++ reader takes exactly the texts that Python takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_cudnn import GraphError
from jax_cudnn.graph import Graph, to_json
from jax_cudnn.graph.description import table
from tests.attention.shared.oracle import attention_graph, graphs
from tests.native.drawn_graphs import fused_graphs
from tests.native.readers import dump, parse_graph, python_refusal, refusal_of

pytestmark = pytest.mark.once

_FOLDER = Path(__file__).parents[1] / "golden"
_GOLDEN = sorted(_FOLDER.glob("*.json"))
_TEXTS = [path.read_text(encoding="ascii").strip() for path in _GOLDEN]
_EXAMPLES = 400


# --- what is taken --------------------------------------------------------------------


@pytest.mark.parametrize("text", _TEXTS, ids=[path.stem for path in _GOLDEN])
def test_golden_graphs_come_back_byte_for_byte(text: str) -> None:
    assert parse_graph(text) == text


@given(graphs() | fused_graphs())
@settings(max_examples=_EXAMPLES)
def test_every_graph_that_python_writes_is_taken(graph: Graph) -> None:
    assert parse_graph(to_json(graph)) == to_json(graph)


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=_EXAMPLES)
def test_numbers_are_written_as_python_writes_them(scale: float) -> None:
    text = to_json(attention_graph(dtype="bf16", scale=scale))
    assert parse_graph(text) == text


# --- what is refused ------------------------------------------------------------------


def _changed(**changes: Any) -> str:
    return dump({**json.loads(_TEXTS[0]), **changes})


_TENSOR = {"dims": [2], "dtype": "f32", "name": "key", "order": [0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph: not JSON: syntax error at byte"),
        ("nul", "graph: not JSON: syntax error at byte"),
        ("NaN", "graph: not JSON: syntax error at byte"),
        ("null", "graph: expected an object, got null"),
        ("[1]", "graph: expected an object, got a list"),
        ("{}", "graph.inputs: missing field"),
        (
            '{"schema":1,"schema":1}',
            "graph: field 'schema' appears twice in one object",
        ),
        (_changed(extra=1), "graph.extra: unknown field"),
        (_changed(schema=True), "graph.schema: expected an integer, got a boolean"),
        (_changed(schema=1.0), "graph.schema: expected an integer, got a number"),
        (_changed(schema=2), "graph.schema: 2 is not 1, the one known here"),
        (_changed(schema=2**63), f"graph.schema: {2**63} does not fit in 64 bits"),
        (_changed(schema=-(2**80)), f"graph.schema: {-(2**80)} does not fit"),
        (_changed(inputs="query"), "graph.inputs: expected a list, got a string"),
        (
            _changed(inputs=["q", 1]),
            "graph.inputs[1]: expected a string, got an integer",
        ),
        (_changed(nodes=[[]]), "graph.nodes[0]: expected an object, got a list"),
        (_changed(nodes=[]), "a graph needs at least one node and one output"),
        (_changed(tensors=[None]), "graph.tensors[0]: expected an object, got null"),
        (
            _changed(tensors=[{**_TENSOR, "dtype": "float"}]),
            "graph.tensors[0].dtype: 'float' is not a known dtype",
        ),
        (
            _changed(tensors=[{**_TENSOR, "dims": [2, 0.5]}]),
            "graph.tensors[0].dims[1]: expected an integer, got a number",
        ),
        (
            _changed(tensors=[{**_TENSOR, "dims": [-1]}]),
            "tensor 'key': dims [-1] has a negative entry",
        ),
        (
            _changed(tensors=[{**_TENSOR, "dims": [2**62, 4], "order": [0, 1]}]),
            f"tensor 'key': dims [{2**62}, 4] overflow 64 bits",
        ),
        (
            _changed(tensors=[{**_TENSOR, "dims": [], "order": []}]),
            "tensor 'key': rank 0 is not 1 to 8",
        ),
        (
            _changed(tensors=[{**_TENSOR, "order": [1]}]),
            "tensor 'key': order [1] is not a permutation of the 1 axes",
        ),
        (
            _changed(tensors=[{**_TENSOR, "name": "a-b"}]),
            "tensor name 'a-b' is not an ASCII identifier",
        ),
        (
            _changed(outputs=["missing"]),
            "graph outputs name an unknown tensor 'missing'",
        ),
        (
            _changed(inputs=["key", "key"]),
            "graph inputs ['key', 'key'] name a tensor twice",
        ),
        (_TEXTS[0] + " ", "graph: the text is valid but not in canonical form"),
        (_TEXTS[0] + "}", "graph: not JSON: syntax error at byte"),
        ("[" * 100_000, "graph: nested deeper than 16 levels"),
        ('{"a":' * 100_000, "graph: nested deeper than 16 levels"),
        (
            '"' + "x" * (9 << 20) + '"',
            "graph: 9437186 bytes of text, more than 8388608",
        ),
        # As long as it may be, and read in a time that grows with the length.
        (
            "{" + ",".join(f'"{i:x}":0' for i in range(700_000)) + "}",
            "graph.0: unknown field",
        ),
    ],
)
def test_a_refusal_names_the_field(text: str, message: str) -> None:
    with pytest.raises(GraphError) as raised:
        parse_graph(text)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"scale"', '"scala"', "graph.nodes[0].attributes.scala: unknown field"),
        (
            '"is_causal":true',
            '"is_causal":1',
            "graph.nodes[0].attributes.is_causal: exp",
        ),
        (
            '"kind":"sdpa"',
            '"kind":"sdp"',
            f"node kind 'sdp' is not one of {', '.join(sorted(table()))}. Export a "
            "program of another version of jax_cudnn again",
        ),
        # A name that such nodes had once: an old text is refused.
        (
            '"kind":"sdpa"',
            '"kind":"sdpa_paged"',
            f"node kind 'sdpa_paged' is not one of {', '.join(sorted(table()))}. "
            "Export a program of another version of jax_cudnn again",
        ),
        # With it, there is no key.
        ('"query":"query"', '"qkv":"query"', "sdpa: unknown input role 'key'"),
        ('"key":"key"', '"keys":"key"', "sdpa: unknown input role 'keys'"),
        ('"key":"key",', "", "sdpa: input 'key' is missing"),
        ('"key":"key"', '"key":"k"', "sdpa: key names unknown tensor 'k'"),
        ('"stats":"stats"', '"stats":"output"', "sdpa: stats is f16, not f32"),
        (
            '[1,6,5,7],"dtype":"f32"',
            '[1,6,5,3],"dtype":"f32"',
            "sdpa: bias dims [1, 6,",
        ),
        ('"dtype":"i32"', '"dtype":"i64"', "sdpa: query_lengths is i64, not i32"),
        ('"scale":', '"scale":1e999,"x":', "graph: not JSON: unreadable value at byte"),
    ],
)
def test_a_wrong_node_is_refused_as_in_python(old: str, new: str, message: str) -> None:
    text = (_FOLDER / "sdpa_forward_full.json").read_text()
    assert old in text
    changed = text.strip().replace(old, new)
    with pytest.raises(GraphError) as raised:
        parse_graph(changed)
    assert str(raised.value).startswith(message)
    assert python_refusal(changed) is not None


# By golden file: one change for each check of the shape rules.
_WRONG: dict[str, list[tuple[str, str, str | None]]] = {
    "pointwise": [
        ('"mode":"lt"', '"mode":"l"', "pointwise: mode 'l' is not a known"),
        (":0.01,", ":1e999,", None),
        (
            *('"alpha":0,"mode":"lt"', '"alpha":2,"mode":"lt"'),
            "pointwise: lt takes no alpha",
        ),
        ('"b":"x","c":"lt_1"', '"b":"x"', "pointwise: select takes 3 inputs, not a, b"),
        (
            *('"b":"x","c":"lt_1"', '"c":"lt_1"'),
            "pointwise: select takes 3 inputs, not a, c",
        ),
        (
            *('[1,3,1],"dtype":"bf16"', '[1,2,1],"dtype":"bf16"'),
            "pointwise: b dims [1, 2, 1] do not broadcast to [2, 3, 5]",
        ),
        (
            *('[2,3,5],"dtype":"f64","name":"x"', '[2,1,5],"dtype":"f64","name":"x"'),
            "pointwise: output has dims [2, 3, 5], not [2, 1, 5]",
        ),
        ('"bool"', '"f32"', "pointwise: the output of lt is f32"),
        ('"c":"lt_1"', '"c":"x"', "pointwise: c of select is f64"),
        ('"dtype":"bf16"', '"dtype":"bool"', "pointwise: b of relu_grad is bool"),
        (
            *('[1,1,1],"dtype"', '[1,1,2],"dtype"'),
            "constant: output has dims [1, 1, 2], not [1, 1, 1]",
        ),
        (
            *('[1,1,1],"dtype":"f64"', '[1,1,1],"dtype":"f16"'),
            "constant: output is f16, not f32 or f64",
        ),
        ('"mode":"add"', '"mode":"mul"', "reduction: mode 'mul' is not a known one"),
        (
            *('[1,3,1],"dtype":"f64"', '[1,2,1],"dtype":"f64"'),
            "reduction: output dims [1, 2, 1] do not broadcast to [2, 3, 5]",
        ),
        (
            *('[1,3,1],"dtype":"f64"', '[1,3,1],"dtype":"bool"'),
            "reduction: output is bool",
        ),
    ],
    "matmul_forward": [
        (
            '[3,5,7],"dtype":"f16","name":"a","order":[0,1,2]',
            '[3,5],"dtype":"f16","name":"a","order":[0,1]',
            "matmul: a has rank 2, not 3",
        ),
        ('"dtype":"f16","name":"a"', '"dtype":"bool","name":"a"', "matmul: a is bool"),
        ("[3,5,7]", "[3,5,6]", "matmul: b has dims [1, 7, 11], not [3, 6, 11]"),
        ("[1,7,11]", "[2,7,11]", "matmul: b has dims [2, 7, 11], not [3, 7, 11]"),
        ("[3,5,7]", "[3,4,7]", "matmul: output has dims [3, 5, 11], not [3, 4, 11]"),
    ],
    "conv_forward": [
        (
            *('"padding_high":[-1,4]', '"padding_high":[-1]'),
            "conv_fprop: padding_high has 1 entries, not 2",
        ),
        (
            *('"rhs_dilation":[2,3]', '"rhs_dilation":[2,0]'),
            "conv_fprop: rhs_dilation [2, 0] is below 1",
        ),
        (
            '{"lhs_dilation":[1,2],"padding_high":[-1,4],"padding_low":[1,3],'
            '"rhs_dilation":[2,3],"window_strides":[2,1]}',
            '{"lhs_dilation":[],"padding_high":[],"padding_low":[],"rhs_dilation":[],'
            '"window_strides":[]}',
            "conv_fprop: lhs_dilation has 0 entries, not 2",
        ),
        (
            '[2,6,11,13],"dtype":"bf16","name":"x","order":[0,2,3,1]',
            '[2,6,11],"dtype":"bf16","name":"x","order":[0,2,1]',
            "conv_fprop: w has rank 4, not 3",
        ),
        (
            *('"dtype":"bf16","name":"w"', '"dtype":"bool","name":"w"'),
            "conv_fprop: w is bool",
        ),
        (
            *("[10,3,3,5]", "[10,4,3,5]"),
            "conv_fprop: 6 along axis 1 of x does not divide by 4 (channels in per "
            "group)",
        ),
        (
            *("[10,3,3,5]", "[10,0,3,5]"),
            "conv_fprop: 6 along axis 1 of x does not divide by 0 (channels in per "
            "group)",
        ),
        (
            *("[10,3,3,5]", "[9,3,3,5]"),
            "conv_fprop: 9 along axis 0 of w does not divide by 2 (groups)",
        ),
        (
            *('"window_strides":[2,1]', '"window_strides":[2,3]'),
            "conv_fprop: output has dims [2, 10, 4, 20], not [2, 10, 4, 7]",
        ),
        (
            *('"rhs_dilation":[2,3]', f'"rhs_dilation":[2,{2**62}]'),
            "conv_fprop: output has dims [2, 10, 4, 20], not [2, 10, 4, 0]",
        ),
    ],
    "conv_backward": [
        (
            *("[10,3,3,5]", "[10,3,1,5]"),
            "conv_wgrad: grad_output has dims [2, 10, 4, 20], not [2, 10, 6, 20]",
        ),
        (
            '[2,6,11,13],"dtype":"bf16","name":"grad_x"',
            '[2,6,1,13],"dtype":"bf16","name":"grad_x"',
            "conv_dgrad: grad_output has dims [2, 10, 4, 20], not [2, 10, 0, 20]",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [(name, *change) for name, changes in _WRONG.items() for change in changes],
)
def test_a_wrong_contraction_gets_the_message_of_python(
    name: str, old: str, new: str, message: str | None
) -> None:
    text = (_FOLDER / f"{name}.json").read_text().strip()
    assert old in text
    changed = text.replace(old, new)
    refusal = refusal_of(changed)
    assert refusal is not None
    if message is None:  # C++ refuses the number before it knows the field.
        assert python_refusal(changed) == "pointwise: alpha inf is not finite"
    else:
        assert refusal.startswith(message)
        assert refusal == python_refusal(changed)


@pytest.mark.parametrize("name", ["padding_high", "lhs_dilation"])
def test_a_convolution_of_huge_sizes_overflows_nothing(name: str) -> None:
    data = json.loads((_FOLDER / "conv_forward.json").read_text())
    node = data["nodes"][0]
    assert node["kind"] == "conv_fprop"
    node["attributes"][name][1] = 2**63 - 1
    node["attributes"]["padding_low"][1] = 2**63 - 1
    refusal = refusal_of(dump(data))
    assert refusal == "conv_fprop: the size of spatial axis 1 overflows 64 bits"
    assert refusal == python_refusal(dump(data))


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("window", [[1], [1, 2, 3], [-1, 2], [2**63 - 1, 0], []])
def test_a_window_has_two_entries_or_none(window: list[int], kind: str) -> None:
    data = json.loads((_FOLDER / f"sdpa_{kind}.json").read_text())
    data["nodes"][0]["attributes"] |= {"scale": 0.25, "window": window}
    name, refusal = data["nodes"][0]["kind"], refusal_of(dump(data))
    wanted = f"{name}: window has {len(window)} entries, not 0 or 2"
    if not window:  # its default is not written
        wanted = "graph: the text is valid but not in canonical form"
    assert refusal == (None if len(window) == 2 else wanted)
    assert refusal == python_refusal(dump(data))


def test_lone_surrogates_and_bytes_that_are_no_text_are_refused() -> None:
    for text in ('"\ud800"', '{"\udfff":1}'):
        with pytest.raises(GraphError, match=r"graph: not JSON: syntax error at byte"):
            parse_graph(text)
