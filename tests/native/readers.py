# SPDX-License-Identifier: Apache-2.0
"""Runs the extension's readers on a text, for tests."""

from jax_cudnn.native._extension import extension
from jax_cudnn.native.planner import as_bytes


def parse_graph(text: str) -> str:
    """Return the canonical text of the graph, as the C++ reader understands it."""
    return extension().testing.parse_graph(as_bytes(text))


def parse_request(text: str) -> str:
    """Return the text of a request; raise what is wrong with it, if anything is."""
    return extension().testing.parse_request(as_bytes(text))
