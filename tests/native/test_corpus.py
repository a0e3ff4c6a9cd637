# SPDX-License-Identifier: Apache-2.0
"""Tests the readers on the inputs that the fuzzer found (tests/fuzz).

Where there is a reader in Python, too, both give the same verdict.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from jax_cudnn import GraphError, native
from jax_cudnn.graph import from_json
from jax_cudnn.native._extension import extension

pytestmark = pytest.mark.once

_TESTS = Path(__file__).parents[1]
_SCORE_MOD = json.loads(
    (_TESTS / "golden" / "sdpa_backward_score_mod.json").read_text(encoding="ascii")
)


def _inputs(target: str) -> list[bytes]:
    found = [
        path.read_bytes() for path in sorted((_TESTS / "corpus" / target).iterdir())
    ]
    assert len(found) > 10
    return found


def _dump(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _assert_same_verdict(text: bytes) -> None:
    """Both readers take the text of a graph, or both refuse it."""
    messages: list[str | None] = []
    for read in (_read, lambda text: from_json(text.decode())):
        try:
            read(text)
            messages.append(None)
        except (GraphError, UnicodeDecodeError) as error:
            messages.append(str(error))
    assert "" not in messages
    assert (messages[0] is None) == (messages[1] is None), messages


def _read(text: bytes) -> None:
    assert extension().testing.parse_graph(text).encode() == text


@pytest.mark.parametrize("target", ["graph", "json"])
def test_a_graph_gets_the_verdict_of_python(target: str) -> None:
    for text in _inputs(target):
        _assert_same_verdict(text)
        # What is refused for its form alone may be refused for more in the right form.
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            continue
        _assert_same_verdict(_dump(tree))


def test_the_steps_of_a_score_mod_get_the_verdict_of_python() -> None:
    for data in _inputs("score_mod"):
        steps, _, gradient = data.decode("utf-8", "replace").partition("\n\n")
        attributes = {
            **_SCORE_MOD["nodes"][0]["attributes"],
            "score_mod": steps.split("\n"),
            "score_mod_grad": gradient.split("\n"),
        }
        nodes = [{**_SCORE_MOD["nodes"][0], "attributes": attributes}]
        _assert_same_verdict(_dump({**_SCORE_MOD, "nodes": nodes}))


def test_a_request_is_taken_or_refused() -> None:
    for text in _inputs("request"):
        try:
            assert extension().testing.parse_request(text).encode() == text
        except GraphError as error:
            assert str(error).startswith("request")  # noqa: PT017


@pytest.mark.parametrize("target", ["plan_file", "store"])
def test_a_stored_plan_is_the_one_or_nothing(tmp_path: Path, target: str) -> None:
    native.set_plan_store(tmp_path, 1 << 20)
    put, get = extension().testing.store_put, extension().testing.store_get
    try:
        put(b"a key", b"a plan")
        (path,) = tmp_path.iterdir()
        whole = path.read_bytes()
        for data in (*_inputs(target), whole):
            path.write_bytes(data)
            found = get(b"a key")
            # Behind magic, checksum and the two sizes is the key, and then the plan.
            assert found is None or data[40:] == b"a key" + found
            put(b"a key", data)
            assert get(b"a key") == data
    finally:
        native.set_plan_store(None, 0)
