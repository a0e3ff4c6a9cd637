# SPDX-License-Identifier: Apache-2.0
"""Reads the custom calls of programs for CUDA, and compares them with their graphs."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jax_cudnn.graph import Graph, from_json, to_json

_TYPES = {"bf16": "bf16", "f16": "f16", "f32": "f32", "bool": "i1", "i32": "i32"}


@dataclass(frozen=True)
class Call:
    """One custom call: its target, attributes, operand and result types."""

    target: str
    graph: Graph
    request: str
    op: str
    sm_version: int
    cudnn_version: int
    operands: list[str]
    operand_types: list[str]
    result_types: list[str]
    layouts: list[str]


_CALL = re.compile(
    r"stablehlo\.custom_call @(?P<target>jax_cudnn\.\w+)\((?P<operands>[^)]*)\) "
    r"\{.*?cudnn_version = (?P<cudnn>\d+) : i64, "
    r'graph = "(?P<graph>[^"]*)", op = "(?P<op>[^"]*)", '
    r'request = "(?P<request>[^"]*)", '
    r"sm_version = (?P<sm>\d+) : i64\}, operand_layouts = \[(?P<layouts>.*?)\], "
    r"result_layouts = \[(?P<more>.*?)\]\} : "
    r"\((?P<types>[^)]*)\) -> \(?(?P<results>[^)\n]*)\)?"
)


def text_of(function: Callable[..., Any], *args: Any, platform: str = "cuda") -> str:
    # A function of its own, so that nothing lowered before is taken again.
    fresh = jax.jit(lambda *args: function(*args))
    lowered = fresh.trace(*args).lower(lowering_platforms=(platform,))
    return lowered.as_text()


def calls_in(text: str) -> list[Call]:
    found = []
    for match in _CALL.finditer(text):
        json = match["graph"].replace(r"\22", '"')
        found.append(
            Call(
                target=match["target"],
                graph=from_json(json),
                request=match["request"],
                op=match["op"],
                sm_version=int(match["sm"]),
                cudnn_version=int(match["cudnn"]),
                operands=match["operands"].split(", "),
                operand_types=match["types"].split(", "),
                result_types=match["results"].split(", "),
                layouts=re.findall(
                    r"dense<(.*?)> ", f"{match['layouts']} {match['more']} "
                ),
            )
        )
        assert to_json(found[-1].graph) == json, "canonical text"
    assert len(found) == text.count("stablehlo.custom_call @jax_cudnn")
    return found


def _types(graph: Graph, names: tuple[str, ...]) -> list[str]:
    return [
        f"tensor<{'x'.join(map(str, t.stored_shape))}x{_TYPES[t.dtype]}>"
        for t in map(graph.tensor, names)
    ]


def check_call(call: Call, workspace_bytes: int | None = None) -> None:
    """Assert that operands, results and layouts are those that the graph names."""
    assert call.request == ""
    assert call.op == call.graph.nodes[0].kind
    assert call.operand_types == _types(call.graph, call.graph.inputs)
    results = _types(call.graph, call.graph.outputs)
    if workspace_bytes is None:
        assert call.target == "jax_cudnn.graph_scratch"
        assert (call.sm_version, call.cudnn_version) == (0, 0)
    else:
        assert call.target == "jax_cudnn.graph"
        assert (call.sm_version, call.cudnn_version) == (90, 91900)
        results.append(f"tensor<{workspace_bytes}xui8>")
    assert call.result_types == results
    for layout in call.layouts:
        axes = [int(axis) for axis in re.findall(r"\d+", layout)]
        assert axes == sorted(axes, reverse=True), "row-major"
