# SPDX-License-Identifier: Apache-2.0
"""Tests that graphs survive JSON, in canonical bytes, and other text is refused."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_cudnn import GraphError
from jax_cudnn.graph import Graph, all_kinds, from_json, to_json
from jax_cudnn.graph.description import table
from tests.attention.shared.oracle import attention_graph, backward_graph, graphs

pytestmark = pytest.mark.once

_GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.json"))

# A forward graph on one line, as C++ reads it.
_TEXT = (
    '{"inputs":["query","key","value"],"nodes":[{"attributes":{"is_causal":true,'
    '"scale":0.10000000000000001},"inputs":{"key":"key","query":"query",'
    '"value":"value"},"kind":"sdpa","outputs":{"output":"output"}}],'
    '"outputs":["output"],"schema":1,"tensors":['
    '{"dims":[2,3,7,11],"dtype":"bf16","name":"key","order":[0,2,1,3]},'
    '{"dims":[2,6,5,13],"dtype":"bf16","name":"output","order":[0,2,1,3]},'
    '{"dims":[2,6,5,11],"dtype":"bf16","name":"query","order":[0,2,1,3]},'
    '{"dims":[2,3,7,13],"dtype":"bf16","name":"value","order":[0,2,1,3]}]}'
)


def _graph() -> Graph:
    return attention_graph(dtype="bf16", scale=0.1, is_causal=True)


# --- round trip -----------------------------------------------------------------------


def test_the_canonical_text_is_known_to_the_byte() -> None:
    assert to_json(_graph()) == _TEXT
    assert from_json(_TEXT) == _graph()


@given(graphs())
def test_legal_graphs_survive_their_text(graph: Graph) -> None:
    text = to_json(graph)
    assert text.isascii()
    assert not re.search(r"\s", text)
    read = from_json(text)
    assert read == graph
    assert to_json(read) == text


@given(graphs(), graphs())
def test_texts_are_equal_where_graphs_are(one: Graph, other: Graph) -> None:
    assert (to_json(one) == to_json(other)) == (one == other)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (1.0, "1"),
        (1, "1"),
        (-0.125, "-0.125"),
        (0.0, "0"),
        (-0.0, "0"),
        (1e16, "10000000000000000"),
        (1e17, "1e+17"),
        (1e-5, "1.0000000000000001e-05"),
        (5e-324, "4.9406564584124654e-324"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
    ],
)
def test_scales_are_written_with_17_digits_and_read_back(
    scale: float, text: str
) -> None:
    graph = attention_graph(scale=scale)
    written = to_json(graph)
    assert f'"scale":{text}}}' in written
    assert from_json(written) == graph


@pytest.mark.parametrize("path", _GOLDEN, ids=lambda path: path.stem)
def test_golden_files_are_read_and_written_to_the_byte(path: Path) -> None:
    text = path.read_text(encoding="ascii").removesuffix("\n")
    assert to_json(from_json(text)) == text


def test_golden_files_cover_every_kind() -> None:
    graphs = [from_json(path.read_text().strip()) for path in _GOLDEN]
    assert {node.kind for each in graphs for node in each.nodes} == {*all_kinds()}


# --- what the reader refuses ----------------------------------------------------------


def _edited(edit: Callable[[dict[str, Any]], object]) -> str:
    data = copy.deepcopy(json.loads(_TEXT))
    edit(data)
    return json.dumps(data, separators=(",", ":"), sort_keys=True)


def _set(*path: str | int, to: object) -> Callable[[dict[str, Any]], object]:
    def edit(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = to

    return edit


def _delete(*path: str | int) -> Callable[[dict[str, Any]], object]:
    def edit(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return edit


_NODE: tuple[str, int] = ("nodes", 0)
_TENSOR: tuple[str, int] = ("tensors", 2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("schema", to=2), "graph.schema: 2 is not 1, the one known here"),
        (_set("schema", to=1.0), "graph.schema: expected an integer, got a number"),
        (_set("schema", to=True), "graph.schema: expected an integer, got a boolean"),
        (_set("schema", to="1"), "graph.schema: expected an integer, got a string"),
        (_set("version", to=1), "graph.version: unknown field"),
        (_delete("outputs"), "graph.outputs: missing field"),
        (_set("inputs", to={}), "graph.inputs: expected a list, got an object"),
        (_set("inputs", 1, to=3), "graph.inputs[1]: expected a string, got an integer"),
        (_set("outputs", 0, to=None), "graph.outputs[0]: expected a string, got null"),
        (_set("nodes", to=None), "graph.nodes: expected a list, got null"),
        (_set("tensors", to="x"), "graph.tensors: expected a list, got a string"),
        (_set(*_NODE, to=[]), "graph.nodes[0]: expected an object, got a list"),
        (_set(*_NODE, "name", to="x"), "graph.nodes[0].name: unknown field"),
        (_delete(*_NODE, "outputs"), "graph.nodes[0].outputs: missing field"),
        (
            _set(*_NODE, "kind", to=1.5),
            "graph.nodes[0].kind: expected a string, got a number",
        ),
        (
            _set(*_NODE, "kind", to="conv"),
            f"node kind 'conv' is not one of {', '.join(sorted(table()))}. Export a "
            "program of another version of jax_cudnn again",
        ),
        # A name that such nodes had once: an old text is refused.
        (
            _set(*_NODE, "kind", to="sdpa_qkv"),
            f"node kind 'sdpa_qkv' is not one of {', '.join(sorted(table()))}. Export "
            "a program of another version of jax_cudnn again",
        ),
        (
            _set(*_NODE, "inputs", "qkv", to="query"),
            "sdpa: unknown input role 'key'",
        ),
        (
            _set(*_NODE, "inputs", to=[]),
            "graph.nodes[0].inputs: expected an object, got a list",
        ),
        (
            _set(*_NODE, "inputs", "key", to=False),
            "graph.nodes[0].inputs.key: expected a string, got a boolean",
        ),
        (
            _set(*_NODE, "outputs", "output", to=7),
            "graph.nodes[0].outputs.output: expected a string, got an integer",
        ),
        (
            _set(*_NODE, "inputs", "sink", to="key"),
            "sdpa: unknown input role 'sink'",
        ),
        (
            _set(*_NODE, "attributes", to=3),
            "graph.nodes[0].attributes: expected an object, got an integer",
        ),
        (
            _set(*_NODE, "attributes", "temperature", to=3),
            "graph.nodes[0].attributes.temperature: unknown field",
        ),
        (
            _delete(*_NODE, "attributes", "scale"),
            "graph.nodes[0].attributes.scale: missing field",
        ),
        (
            _set(*_NODE, "attributes", "scale", to="1"),
            "graph.nodes[0].attributes.scale: expected a number, got a string",
        ),
        (
            _set(*_NODE, "attributes", "scale", to=True),
            "graph.nodes[0].attributes.scale: expected a number, got a boolean",
        ),
        (
            _set(*_NODE, "attributes", "scale", to=2**63),
            "graph.nodes[0].attributes.scale: 9223372036854775808 does not fit in 64 "
            "bits",
        ),
        (
            _set(*_NODE, "attributes", "is_causal", to=1),
            "graph.nodes[0].attributes.is_causal: expected a boolean, got an integer",
        ),
        (_set(*_TENSOR, to=0), "graph.tensors[2]: expected an object, got an integer"),
        (_set(*_TENSOR, "strides", to=[]), "graph.tensors[2].strides: unknown field"),
        (_delete(*_TENSOR, "dtype"), "graph.tensors[2].dtype: missing field"),
        (
            _set(*_TENSOR, "dtype", to="float32"),
            "graph.tensors[2].dtype: 'float32' is not a known dtype",
        ),
        (
            _set(*_TENSOR, "dtype", to=None),
            "graph.tensors[2].dtype: expected a string, got null",
        ),
        (
            _set(*_TENSOR, "name", to=[]),
            "graph.tensors[2].name: expected a string, got a list",
        ),
        (
            _set(*_TENSOR, "dims", to=4),
            "graph.tensors[2].dims: expected a list, got an integer",
        ),
        (
            _set(*_TENSOR, "dims", 3, to=11.0),
            "graph.tensors[2].dims[3]: expected an integer, got a number",
        ),
        (
            _set(*_TENSOR, "dims", 1, to=True),
            "graph.tensors[2].dims[1]: expected an integer, got a boolean",
        ),
        (
            _set(*_TENSOR, "dims", 0, to=2**63),
            "graph.tensors[2].dims[0]: 9223372036854775808 does not fit in 64 bits",
        ),
        (
            _set(*_TENSOR, "dims", 0, to=-(2**63) - 1),
            "graph.tensors[2].dims[0]: -9223372036854775809 does not fit in 64 bits",
        ),
        (
            _set(*_TENSOR, "dims", 2, to=-5),
            "tensor 'query': dims [2, 6, -5, 11] has a negative entry",
        ),
        (
            _set(*_TENSOR, "order", 2, to="1"),
            "graph.tensors[2].order[2]: expected an integer, got a string",
        ),
        (
            _set(*_TENSOR, "order", 2, to=0),
            "tensor 'query': order [0, 2, 0, 3] is not a permutation of the 4 axes",
        ),
    ],
)
def test_a_wrong_field_is_refused_with_its_path(
    edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(GraphError, match=f"^{re.escape(message)}$"):
        from_json(_edited(edit))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "graph: not JSON: Expecting value: line 1 column 1 (char 0)"),
        (_TEXT[:-1], "graph: not JSON: Expecting ',' delimiter: "),
        (_TEXT + "}", "graph: not JSON: Extra data: "),
        ("[" * 100_000, "graph: not JSON: "),
        ("9" * 5_000, "graph: not JSON: "),
        ("[]", "graph: expected an object, got a list"),
        ("null", "graph: expected an object, got null"),
        ("2.5", "graph: expected an object, got a number"),
        ("NaN", "graph: NaN is not a finite number"),
        (
            _TEXT.replace("0.10000000000000001", "-Infinity"),
            "graph: -Infinity is not a finite number",
        ),
        (
            _TEXT.replace("0.10000000000000001", "1e999"),
            "sdpa: scale inf is not finite",
        ),
        (
            _TEXT.replace('"schema":1', '"schema":1,"schema":1'),
            "graph: field 'schema' appears twice in one object",
        ),
        (
            _TEXT.replace('"dtype"', '"name":"key","dtype"', 1),
            "graph: field 'name' appears twice in one object",
        ),
    ],
)
def test_text_that_is_no_graph_is_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=f"^{re.escape(message)}"):
        from_json(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (",", ", "),
        ("0.10000000000000001", "0.1"),
        ("0.10000000000000001", "1.0000000000000001e-1"),
        ('"query"', '"\\u0071uery"'),
        ('"inputs":["query","key","value"],', ""),
        ("}]}", "}]}\n"),
        (
            '{"dims":[2,3,7,11],"dtype":"bf16",',
            '{"dtype":"bf16","dims":[2,3,7,11],',
        ),
    ],
    ids=["space", "digits", "exponent", "escape", "order", "newline", "key order"],
)
def test_another_spelling_of_a_graph_is_refused(old: str, new: str) -> None:
    text = _TEXT.replace(old, new, 1)
    if not new:  # move the field to the end instead
        text = f"{text[:-1]},{old[:-1]}}}"
    assert text != _TEXT
    with pytest.raises(
        GraphError, match=r"^graph: the text is valid but not in canonical form$"
    ):
        from_json(text)


def test_tensors_in_another_order_are_not_canonical() -> None:
    with pytest.raises(GraphError, match="not in canonical form"):
        from_json(_edited(lambda data: data["tensors"].reverse()))


@given(st.data())
def test_damaged_text_gives_a_graph_error_or_a_graph(data: st.DataObject) -> None:
    text = to_json(backward_graph(attention_graph(bias="1hst", with_stats=True)))
    start = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(start, min(start + 8, len(text))))
    alphabet = st.sampled_from('{}[]",:-+.eE0123456789 abc\\\n')
    damaged = text[:start] + data.draw(st.text(alphabet, max_size=4)) + text[stop:]
    try:
        graph = from_json(damaged)
    except GraphError:
        return
    assert to_json(graph) == damaged
