# SPDX-License-Identifier: Apache-2.0
"""A planning process that answers as a test says, for tests that have no cuDNN."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

import jax_cudnn
from jax_cudnn import LibraryError
from jax_cudnn.graph import Graph, from_json
from jax_cudnn.lowering import decision
from jax_cudnn.offline import planner

CANDIDATE = {
    "name": "eng2",
    "engine": 2,
    "knobs": [["STAGES", 3]],
    "variant": 0,
    "request": '{"engine":2,"knobs":{"STAGES":3},"variant":0}',
    "behavior_notes": ["RUNTIME_COMPILATION"],
    "numeric_notes": [],
    "is_built": True,
    "workspace_bytes": 4321,
    "build_ms": 1.5,
    "failure": "",
    "refusal": "",
}
FAILED = {**CANDIDATE, "name": "eng7", "is_built": False, "failure": "no kernel"}
UNTRIED = {**CANDIDATE, "name": "eng8", "is_built": False}

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class FakeProcess:
    """Answers questions as a test says; remembers them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Answer = lambda _: {"candidates": [FAILED, CANDIDATE, UNTRIED]}
        self.missing = ""

    def greeting(self) -> dict[str, Any]:
        if self.missing:
            raise LibraryError(self.missing)
        return {"cudnn_version": 91900, "cudnn_path": "/nowhere/libcudnn.so.9"}

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question)
        return self.answer(question)


def refusal(*reasons: str) -> dict[str, Any]:
    """Return the answer that a graph has no plan."""
    return {
        "error": "UnsupportedError",
        "message": "",
        "summary": "cuDNN has no plan.",
        "reasons": list(reasons),
        "advice": "",
    }


@contextmanager
def fake_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcess]:
    """Let a fake plan for every GPU by its name."""
    made = FakeProcess()
    monkeypatch.setattr(planner, "_process", lambda: made)
    caches = (planner._ask, planner._named_gpu, decision._decide)
    for cache in caches:
        cache.cache_clear()
    try:
        yield made
    finally:
        for cache in caches:
            cache.cache_clear()


def graph_in(question: dict[str, Any]) -> Graph:
    """Return the graph that a question is about."""
    return from_json(question["graph"])


def dtypes_in(question: dict[str, Any]) -> set[str]:
    """Return the dtypes of the operands of its graph."""
    return {tensor.dtype for tensor in graph_in(question).input_tensors}


def refuse(
    fake: FakeProcess, condition: Callable[[dict[str, Any]], bool], *reasons: str
) -> None:
    """Let the process refuse questions of a kind, and answer all others."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if condition(question):
            return refusal(*reasons)
        return {"candidates": [CANDIDATE]}

    fake.answer = answer


def matmul_call(dtype: Any, **options: Any) -> tuple[Any, ...]:
    """Return a matmul and what it is called with."""
    function = functools.partial(jax_cudnn.matmul, **options)
    shapes = (24, 16), (16, 40)
    return function, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
