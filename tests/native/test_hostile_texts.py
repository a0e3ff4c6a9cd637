# SPDX-License-Identifier: Apache-2.0
"""Tests that the C++ reader gives mutated and random texts the verdict of Python's."""

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
from jax_cudnn.graph import kind_named, kinds, to_json
from jax_cudnn.graph.pointwise import ARITY
from jax_cudnn.graph.spec import DTYPE_NAMES
from tests.native.drawn_graphs import fused_graphs
from tests.native.readers import dump, parse_graph, python_refusal, refusal_of

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


def _assert_same_verdict(text: str) -> None:
    message = refusal_of(text)
    assert (message is None) == (python_refusal(text) is None), message
    assert message is None or message.strip()


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
    refusal, wanted = refusal_of(dump(data)), python_refusal(dump(data))
    if refusal is None and wanted is not None:
        # What a kind checks beyond its description, C++ checks as it builds the graph.
        with patch.object(kinds, "kind_named", _without_own_check):
            wanted = python_refusal(dump(data))
    assert refusal == wanted


def test_parts_that_do_not_add_up_are_left_to_the_check_of_their_kind() -> None:
    data = json.loads((_FOLDER / "sdpa_qkv_forward.json").read_text())
    (qkv,) = (tensor for tensor in data["tensors"] if tensor["name"] == "qkv")
    qkv["dims"][1] += 3
    assert refusal_of(dump(data)) is None
    assert "are not 1 for queries and as many" in str(python_refusal(dump(data)))
    with patch.object(kinds, "kind_named", _without_own_check):
        assert python_refusal(dump(data)) is None


def _without_own_check(name: str) -> kinds.NodeKind:
    return replace(kind_named(name), check=None)


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
            dump(data)
        except (ValueError, RecursionError):
            return
    _assert_same_verdict(dump(data))


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
    _assert_same_verdict(dump(value))


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
