# SPDX-License-Identifier: Apache-2.0
"""Tests that the C++ reader takes exactly the texts that Python takes."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_cudnn import GraphError
from jax_cudnn.graph import Graph, from_json, kind_named, kinds, to_json
from jax_cudnn.graph.description import table
from jax_cudnn.graph.pointwise import ARITY
from jax_cudnn.graph.spec import DTYPE_NAMES
from tests.attention.shared.oracle import attention_graph, graphs
from tests.native.drawn_graphs import fused_graphs
from tests.native.readers import parse_graph

pytestmark = pytest.mark.once

_FOLDER = Path(__file__).parents[1] / "golden"
_GOLDEN = sorted(_FOLDER.glob("*.json"))
_TEXTS = [path.read_text(encoding="ascii").strip() for path in _GOLDEN]
_EXAMPLES = 400

# Values that a mutation puts in place of another.
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["", "query", "sdpa", "bf16", "x y", "\u00e9", "\U0001f600", "\0"]),
    st.text(max_size=6),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["dims", "name", "kind", "z"]), inner),
    ),
    max_leaves=6,
)


def _refusal(text: str) -> str | None:
    """Return the C++ reader's message, or None where it takes the text."""
    try:
        assert parse_graph(text) == text
    except GraphError as error:
        return str(error)
    return None


def _python_refusal(text: str) -> str | None:
    """Return Python's message, or None where it takes the text."""
    try:
        from_json(text)
    except GraphError as error:
        return str(error)
    return None


def _assert_same_verdict(text: str) -> None:
    message = _refusal(text)
    assert (message is None) == (_python_refusal(text) is None), message
    assert message is None or message.strip()


def _dump(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _places(data: Any) -> list[tuple[Any, Any]]:
    """List every (container, key) of a JSON tree."""
    found: list[tuple[Any, Any]] = []
    items: Any = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for key, value in items:
        found += [(data, key), *_places(value)]
    return found


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
    return _dump({**json.loads(_TEXTS[0]), **changes})


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
    assert _python_refusal(changed) is not None


# One change of a golden file for each check of the contractions' shape rules.
@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "pointwise",
            '"mode":"lt"',
            '"mode":"l"',
            "pointwise: mode 'l' is not a known",
        ),
        ("pointwise", ":0.01,", ":1e999,", None),
        (
            "pointwise",
            '"alpha":0,"mode":"lt"',
            '"alpha":2,"mode":"lt"',
            "pointwise: lt takes no alpha",
        ),
        (
            "pointwise",
            '"b":"x","c":"lt_1"',
            '"b":"x"',
            "pointwise: select takes 3 inputs, not a, b",
        ),
        (
            "pointwise",
            '"b":"x","c":"lt_1"',
            '"c":"lt_1"',
            "pointwise: select takes 3 inputs, not a, c",
        ),
        (
            "pointwise",
            '[1,3,1],"dtype":"bf16"',
            '[1,2,1],"dtype":"bf16"',
            "pointwise: b dims [1, 2, 1] do not broadcast to [2, 3, 5]",
        ),
        (
            "pointwise",
            '[2,3,5],"dtype":"f64","name":"x"',
            '[2,1,5],"dtype":"f64","name":"x"',
            "pointwise: output has dims [2, 3, 5], not [2, 1, 5]",
        ),
        (
            "pointwise",
            '"bool"',
            '"f32"',
            "pointwise: the output of lt is f32",
        ),
        (
            "pointwise",
            '"c":"lt_1"',
            '"c":"x"',
            "pointwise: c of select is f64",
        ),
        (
            "pointwise",
            '"dtype":"bf16"',
            '"dtype":"bool"',
            "pointwise: b of relu_grad is bool",
        ),
        (
            "pointwise",
            '[1,1,1],"dtype"',
            '[1,1,2],"dtype"',
            "constant: output has dims [1, 1, 2], not [1, 1, 1]",
        ),
        (
            "pointwise",
            '[1,1,1],"dtype":"f64"',
            '[1,1,1],"dtype":"f16"',
            "constant: output is f16, not f32 or f64",
        ),
        (
            "pointwise",
            '"mode":"add"',
            '"mode":"mul"',
            "reduction: mode 'mul' is not a known one",
        ),
        (
            "pointwise",
            '[1,3,1],"dtype":"f64"',
            '[1,2,1],"dtype":"f64"',
            "reduction: output dims [1, 2, 1] do not broadcast to [2, 3, 5]",
        ),
        (
            "pointwise",
            '[1,3,1],"dtype":"f64"',
            '[1,3,1],"dtype":"bool"',
            "reduction: output is bool",
        ),
        (
            "matmul_forward",
            '[3,5,7],"dtype":"f16","name":"a","order":[0,1,2]',
            '[3,5],"dtype":"f16","name":"a","order":[0,1]',
            "matmul: a has rank 2, not 3",
        ),
        (
            "matmul_forward",
            '"dtype":"f16","name":"a"',
            '"dtype":"bool","name":"a"',
            "matmul: a is bool",
        ),
        (
            "matmul_forward",
            "[3,5,7]",
            "[3,5,6]",
            "matmul: b has dims [1, 7, 11], not [3, 6, 11]",
        ),
        (
            "matmul_forward",
            "[1,7,11]",
            "[2,7,11]",
            "matmul: b has dims [2, 7, 11], not [3, 7, 11]",
        ),
        (
            "matmul_forward",
            "[3,5,7]",
            "[3,4,7]",
            "matmul: output has dims [3, 5, 11], not [3, 4, 11]",
        ),
        (
            "conv_forward",
            '"padding_high":[-1,4]',
            '"padding_high":[-1]',
            "conv_fprop: padding_high has 1 entries, not 2",
        ),
        (
            "conv_forward",
            '"rhs_dilation":[2,3]',
            '"rhs_dilation":[2,0]',
            "conv_fprop: rhs_dilation [2, 0] is below 1",
        ),
        (
            "conv_forward",
            '{"lhs_dilation":[1,2],"padding_high":[-1,4],"padding_low":[1,3],'
            '"rhs_dilation":[2,3],"window_strides":[2,1]}',
            '{"lhs_dilation":[],"padding_high":[],"padding_low":[],"rhs_dilation":[],'
            '"window_strides":[]}',
            "conv_fprop: lhs_dilation has 0 entries, not 2",
        ),
        (
            "conv_forward",
            '[2,6,11,13],"dtype":"bf16","name":"x","order":[0,2,3,1]',
            '[2,6,11],"dtype":"bf16","name":"x","order":[0,2,1]',
            "conv_fprop: w has rank 4, not 3",
        ),
        (
            "conv_forward",
            '"dtype":"bf16","name":"w"',
            '"dtype":"bool","name":"w"',
            "conv_fprop: w is bool",
        ),
        (
            "conv_forward",
            "[10,3,3,5]",
            "[10,4,3,5]",
            "conv_fprop: 6 along axis 1 of x does not divide by 4 (channels in per "
            "group)",
        ),
        (
            "conv_forward",
            "[10,3,3,5]",
            "[10,0,3,5]",
            "conv_fprop: 6 along axis 1 of x does not divide by 0 (channels in per "
            "group)",
        ),
        (
            "conv_forward",
            "[10,3,3,5]",
            "[9,3,3,5]",
            "conv_fprop: 9 along axis 0 of w does not divide by 2 (groups)",
        ),
        (
            "conv_forward",
            '"window_strides":[2,1]',
            '"window_strides":[2,3]',
            "conv_fprop: output has dims [2, 10, 4, 20], not [2, 10, 4, 7]",
        ),
        (
            "conv_forward",
            '"rhs_dilation":[2,3]',
            f'"rhs_dilation":[2,{2**62}]',
            "conv_fprop: output has dims [2, 10, 4, 20], not [2, 10, 4, 0]",
        ),
        (
            "conv_backward",
            "[10,3,3,5]",
            "[10,3,1,5]",
            "conv_wgrad: grad_output has dims [2, 10, 4, 20], not [2, 10, 6, 20]",
        ),
        (
            "conv_backward",
            '[2,6,11,13],"dtype":"bf16","name":"grad_x"',
            '[2,6,1,13],"dtype":"bf16","name":"grad_x"',
            "conv_dgrad: grad_output has dims [2, 10, 4, 20], not [2, 10, 0, 20]",
        ),
    ],
)
def test_a_wrong_contraction_gets_the_message_of_python(
    name: str, old: str, new: str, message: str | None
) -> None:
    text = (_FOLDER / f"{name}.json").read_text().strip()
    assert old in text
    changed = text.replace(old, new)
    refusal = _refusal(changed)
    assert refusal is not None
    if message is None:  # C++ refuses the number before it knows the field.
        assert _python_refusal(changed) == "pointwise: alpha inf is not finite"
    else:
        assert refusal.startswith(message)
        assert refusal == _python_refusal(changed)


@pytest.mark.parametrize("name", ["padding_high", "lhs_dilation"])
def test_a_convolution_of_huge_sizes_overflows_nothing(name: str) -> None:
    data = json.loads((_FOLDER / "conv_forward.json").read_text())
    node = data["nodes"][0]
    assert node["kind"] == "conv_fprop"
    node["attributes"][name][1] = 2**63 - 1
    node["attributes"]["padding_low"][1] = 2**63 - 1
    refusal = _refusal(_dump(data))
    assert refusal == "conv_fprop: the size of spatial axis 1 overflows 64 bits"
    assert refusal == _python_refusal(_dump(data))


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("window", [[1], [1, 2, 3], [-1, 2], [2**63 - 1, 0], []])
def test_a_window_has_two_entries_or_none(window: list[int], kind: str) -> None:
    data = json.loads((_FOLDER / f"sdpa_{kind}.json").read_text())
    data["nodes"][0]["attributes"] |= {"scale": 0.25, "window": window}
    name, refusal = data["nodes"][0]["kind"], _refusal(_dump(data))
    wanted = f"{name}: window has {len(window)} entries, not 0 or 2"
    if not window:  # its default is not written
        wanted = "graph: the text is valid but not in canonical form"
    assert refusal == (None if len(window) == 2 else wanted)
    assert refusal == _python_refusal(_dump(data))


def test_lone_surrogates_and_bytes_that_are_no_text_are_refused() -> None:
    for text in ('"\ud800"', '{"\udfff":1}'):
        with pytest.raises(GraphError, match=r"graph: not JSON: syntax error at byte"):
            parse_graph(text)


_WORDS = st.sampled_from([*DTYPE_NAMES, *ARITY, "nope"])


@given(
    st.sampled_from(_TEXTS) | fused_graphs().map(to_json),
    st.randoms(use_true_random=False),
    st.integers(-2, 7),
    _WORDS,
)
@settings(max_examples=4 * _EXAMPLES)
def test_a_well_typed_change_gets_the_message_of_python(
    text: str, rng: random.Random, number: int, word: str
) -> None:
    data = json.loads(text)
    container, key = rng.choice(
        [
            (container, key)
            for container, key in _places(data)
            if isinstance(container[key], str | int | float)
        ]
    )
    container[key] = word if isinstance(container[key], str) else number
    refusal, wanted = _refusal(_dump(data)), _python_refusal(_dump(data))
    if refusal is None and wanted is not None:
        # What a kind checks beyond its description, C++ checks as it builds the graph.
        with patch.object(kinds, "kind_named", _without_own_check):
            wanted = _python_refusal(_dump(data))
    assert refusal == wanted


def test_parts_that_do_not_add_up_are_left_to_the_check_of_their_kind() -> None:
    data = json.loads((_FOLDER / "sdpa_qkv_forward.json").read_text())
    (qkv,) = (tensor for tensor in data["tensors"] if tensor["name"] == "qkv")
    qkv["dims"][1] += 3
    assert _refusal(_dump(data)) is None
    assert "are not 1 for queries and as many" in str(_python_refusal(_dump(data)))
    with patch.object(kinds, "kind_named", _without_own_check):
        assert _python_refusal(_dump(data)) is None


def _without_own_check(name: str) -> kinds.NodeKind:
    return replace(kind_named(name), check=None)


# --- hostile texts --------------------------------------------------------------------


@given(st.sampled_from(_TEXTS), st.randoms(use_true_random=False), _VALUES)
@settings(max_examples=_EXAMPLES)
def test_a_mutated_tree_gets_the_verdict_of_python(
    text: str, rng: random.Random, value: Any
) -> None:
    data = json.loads(text)
    container, key = rng.choice(_places(data))
    action = rng.choice(["replace", "delete", "duplicate", "swap"])
    if action == "replace":
        container[key] = value
    elif action == "delete":
        del container[key]
    elif action == "duplicate" and isinstance(container, list):
        container.insert(key, container[key])
    else:
        other, place = rng.choice(_places(data))
        container[key], other[place] = other[place], container[key]
        # A container may now hold itself.
        try:
            _dump(data)
        except (ValueError, RecursionError):
            return
    _assert_same_verdict(_dump(data))


@given(st.sampled_from(_TEXTS), st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=_EXAMPLES)
def test_mutated_characters_get_the_verdict_of_python(
    text: str, rng: random.Random, count: int
) -> None:
    characters = list(text)
    for _ in range(count):
        place = rng.randrange(len(characters))
        kind = rng.choice(["replace", "insert", "delete"])
        new = rng.choice('{}[]",:.0123456789-+eE truefalsn\\u\t\n\x7f\u00e9')
        if kind == "delete":
            del characters[place]
        elif kind == "insert":
            characters.insert(place, new)
        else:
            characters[place] = new
    _assert_same_verdict("".join(characters))


@given(_VALUES)
@settings(max_examples=_EXAMPLES)
def test_random_json_gets_the_verdict_of_python(value: Any) -> None:
    _assert_same_verdict(_dump(value))


@given(st.text(max_size=60))
@settings(max_examples=_EXAMPLES)
def test_random_text_gets_the_verdict_of_python(text: str) -> None:
    _assert_same_verdict(text)


@given(st.binary(max_size=60))
@settings(max_examples=_EXAMPLES)
def test_random_bytes_are_refused(data: bytes) -> None:
    # Surrogates carry arbitrary bytes through a Python string.
    text = data.decode("utf-8", "surrogateescape")
    with pytest.raises(GraphError, match=r"^graph"):
        parse_graph(text)
