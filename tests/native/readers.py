# SPDX-License-Identifier: Apache-2.0
"""Runs the extension's readers on a text, for tests."""

import json
from typing import Any

from jax_cudnn import GraphError
from jax_cudnn.graph import from_json
from jax_cudnn.native._extension import extension
from jax_cudnn.native.planner import as_bytes


def parse_graph(text: str) -> str:
    """Return the canonical text of the graph, as the C++ reader understands it."""
    return extension().testing.parse_graph(as_bytes(text))


def parse_request(text: str) -> str:
    """Return the text of a request; raise what is wrong with it, if anything is."""
    return extension().testing.parse_request(as_bytes(text))


def refusal_of(text: str) -> str | None:
    """Return the C++ reader's message, or None where it takes the text."""
    try:
        assert parse_graph(text) == text
    except GraphError as error:
        return str(error)
    return None


def python_refusal(text: str) -> str | None:
    """Return Python's message, or None where it takes the text."""
    try:
        from_json(text)
    except GraphError as error:
        return str(error)
    return None


def dump(data: Any) -> str:
    """Return the canonical text of a JSON tree."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))
