# SPDX-License-Identifier: Apache-2.0
"""Does the C++ reader take exactly the texts that Python takes, byte for byte?"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_cudnn import GraphError
from jax_cudnn.graph import Graph, from_json, to_json
from jax_cudnn.native import parse_graph
from tests.attention import attention_graph, graphs

_GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.json"))
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


def _python_takes(text: str) -> bool:
    try:
        from_json(text)
    except GraphError:
        return False
    return True


def _assert_same_verdict(text: str) -> None:
    message = _refusal(text)
    assert (message is None) == _python_takes(text), message
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


@given(graphs())
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
        ('"kind":"sdpa"', '"kind":"sdp"', "node kind 'sdp' is not one of sdpa, sdpa_b"),
        ('"key":"key"', '"keys":"key"', "sdpa: unknown input role 'keys'"),
        ('"key":"key",', "", "sdpa: input 'key' is missing"),
        ('"key":"key"', '"key":"k"', "sdpa: key names unknown tensor 'k'"),
        ('"stats":"stats"', '"stats":"output"', "sdpa: stats has dims"),
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
    text = (Path(__file__).parents[1] / "golden/sdpa_forward_full.json").read_text()
    assert old in text
    changed = text.strip().replace(old, new)
    with pytest.raises(GraphError) as raised:
        parse_graph(changed)
    assert str(raised.value).startswith(message)
    assert not _python_takes(changed)


def test_lone_surrogates_and_bytes_that_are_no_text_are_refused() -> None:
    for text in ('"\ud800"', '{"\udfff":1}'):
        with pytest.raises(GraphError, match=r"graph: not JSON: syntax error at byte"):
            parse_graph(text)


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
