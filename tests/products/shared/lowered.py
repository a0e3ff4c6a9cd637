# SPDX-License-Identifier: Apache-2.0
"""Programs of conv and matmul for an H200 whose planner is a stand-in."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import UnsupportedError, choices, conv, native
from jax_cudnn.graph import Graph, Target, from_json
from jax_cudnn.lowering import cuda, decision, devices
from jax_cudnn.native import PlanInfo
from tests.common.planner import made_plan

H200 = Target(name="NVIDIA H200", sm_version=90, sm_count=132, cudnn_version=91900)

BF16 = jnp.bfloat16


class Planner:
    """Stands for cuDNN's planner: refuses some kinds, remembers what it was asked."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.engine: int | None = None
        self.asked: list[tuple[Graph, str]] = []

    def plan(self, text: str, *, request: str = "", device: int) -> PlanInfo:
        assert device == 0
        graph = from_json(text)
        self.asked.append((graph, request))
        for node in graph.nodes:
            if node.kind in self.refused:
                raise UnsupportedError("no plan", [f"no engine for {node.kind}"], "")
        made = made_plan(request)
        return made if self.engine is None else replace(made, engine=self.engine)


def with_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[Planner]:
    """Lower as on a machine with an H200, with no choices but the test's own."""
    fake = Planner()
    table = choices.ChoiceTable()
    decision._decide.cache_clear()
    cuda._say_once.cache_clear()
    decision._say_stale_once.cache_clear()
    monkeypatch.setattr(devices, "local_target", lambda: (0, H200))
    monkeypatch.setattr(native, "plan", fake.plan)
    monkeypatch.setattr(choices, "table", lambda: table)
    yield fake
    decision._decide.cache_clear()


def conv_layer(x: Any, w: Any, bias: Any, **options: Any) -> jax.Array:
    return conv(
        x,
        w,
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        bias=bias,
        activation="silu",
        **options,
    )


def operands_of(dtype: Any = BF16) -> tuple[jax.Array, ...]:
    return (
        jnp.ones((2, 9, 7, 8), dtype),
        jnp.ones((3, 3, 8, 16), dtype),
        jnp.ones(16, dtype),
    )


def calls_of(function: Callable[..., Any], *args: Any) -> list[tuple[list[str], str]]:
    """Return for each custom call of the lowered text its nodes and its request."""
    fresh = jax.jit(lambda *args: function(*args))
    text = fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    text_of = r'"((?:[^"\\]|\\.)*)"'
    pattern = rf"graph = {text_of}, op = {text_of}, request = {text_of}"
    found = re.findall(pattern, text)
    assert len(found) == text.count("custom_call @jax_cudnn")
    return [
        (
            [
                getattr(node.attributes, "mode", node.kind)
                for node in from_json(graph.replace(r"\22", '"')).nodes
            ],
            request.replace(r"\22", '"'),
        )
        for graph, _, request in found
    ]


def gradient_of(*operands: Any, **options: Any) -> Any:
    def total(*operands: Any) -> jax.Array:
        return conv_layer(*operands, **options).astype(jnp.float32).sum()

    return jax.grad(total, (0, 1, 2))(*operands)
