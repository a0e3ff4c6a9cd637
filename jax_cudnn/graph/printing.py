# SPDX-License-Identifier: Apache-2.0
"""A graph for people to look at: in a line, as text, as a Mermaid or Graphviz picture.

The text has a line for each node, and one each for operands and results::

    operands a bf16[1,8,16], b bf16[1,16,32], bias bf16[1,1,32]
    matmul_0 f32[1,8,32] = matmul(a, b)
    add_1 f32[1,8,32] = add(matmul_0, bias)
    output bf16[1,8,32] = relu(add_1)
    results output

A role is written where the tensor has another name (but for elementwise operations,
which list their operands in order), an attribute where it differs from its default.
Dims are the logical ones; ``order`` follows where they are stored in another. In the
pictures operands and results are rounded, nodes are boxes, and the tensors that never
reach memory are labels on the arrows.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jax_cudnn.graph.pointwise import PointwiseAttributes
from jax_cudnn.graph.spec import Graph, Node, Tensor


def label(graph: Graph) -> str:
    """Return the graph's operations in a word: kinds, and modes of pointwise nodes."""
    names = (getattr(n.attributes, "mode", n.kind) for n in graph.nodes)
    return "+".join(name for name in names if name not in ("constant", "identity"))


def operand_text(graph: Graph) -> str:
    """Return the dtypes and shapes of a graph's operands, as stored."""
    return ", ".join(
        f"{t.dtype}[{','.join(map(str, t.stored_shape))}]" for t in graph.input_tensors
    )


def summary(graph: Graph) -> str:
    """Return what a graph computes of which operands, in a line."""
    operands = ", ".join(
        f"{t.name} {t.dtype}{list(t.stored_shape)}" for t in graph.input_tensors
    )
    return f"{label(graph)}({operands})"


def to_text(graph: Graph) -> str:
    """Return the graph as text, one line per node."""
    operands = ", ".join(f"{t.name} {describe(t)}" for t in graph.input_tensors)
    lines = [f"operands {operands or '(none)'}"]
    for node in graph.nodes:
        made = ", ".join(
            _role(role, name, f" {describe(graph.tensor(name))}")
            for role, name in node.outputs
        )
        read = ", ".join(_operand(node, role, name) for role, name in node.inputs)
        inside = "; ".join(filter(None, (read, ", ".join(_attributes(node)))))
        lines.append(f"{made} = {_operation(node)}({inside})")
    lines.append(f"results {', '.join(graph.outputs)}")
    return "\n".join(lines)


def to_mermaid(graph: Graph) -> str:
    """Return the graph as a Mermaid flowchart, which GitHub draws."""
    return "\n".join(("flowchart TD", *mermaid_lines(graph)))


def mermaid_lines(graph: Graph, prefix: str = "") -> Iterator[str]:
    """Yield the lines of a flowchart; the prefix keeps several graphs apart."""
    boxes, arrows = _picture(graph)
    for box in boxes:
        label = "<br/>".join(map(in_mermaid, box.lines))
        left, right = ("[", "]") if box.shape == "node" else ("([", "])")
        yield f'  {prefix}{box.id}{left}"{label}"{right}'
    for arrow in arrows:
        label = f'|"{in_mermaid(arrow.label)}"|' if arrow.label else ""
        yield f"  {prefix}{arrow.source} -->{label} {prefix}{arrow.target}"


def to_dot(graph: Graph) -> str:
    """Return the graph in Graphviz's dot language."""
    boxes, arrows = _picture(graph)
    lines = ["digraph cudnn {", "  node [shape=box];"]
    for box in boxes:
        label = r"\n".join(map(_in_dot, box.lines))
        style = "" if box.shape == "node" else ", style=rounded"
        lines.append(f'  {box.id} [label="{label}"{style}];')
    for arrow in arrows:
        label = f' [label="{_in_dot(arrow.label)}"]' if arrow.label else ""
        lines.append(f"  {arrow.source} -> {arrow.target}{label};")
    return "\n".join((*lines, "}"))


def describe(tensor: Tensor) -> str:
    """Return dtype and logical dims, and how they are stored if in another order."""
    text = f"{tensor.dtype}[{_commas(tensor.dims)}]"
    if tensor.order != tuple(range(len(tensor.dims))):
        text += f" order({_commas(tensor.order)})"
    return text


# --- what text and pictures share -----------------------------------------------------


def _operation(node: Node) -> str:
    attributes = node.attributes
    return attributes.mode if isinstance(attributes, PointwiseAttributes) else node.kind


def _attributes(node: Node) -> Iterator[str]:
    for field in dataclasses.fields(node.attributes):
        value = getattr(node.attributes, field.name)
        is_told = field.name == "mode" and _operation(node) == value
        if value != field.default and not is_told:
            yield f"{field.name}={_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace(" ", "")


def _operand(node: Node, role: str, name: str) -> str:
    # The roles a, b, c of elementwise operations are their order and no more.
    is_elementwise = isinstance(node.attributes, PointwiseAttributes)
    return name if is_elementwise else _role(role, name)


def _role(role: str, name: str, shown: str = "") -> str:
    # The sole result of most nodes is in the role "output".
    is_plain = role in (name, "output")
    return f"{name}{shown}" if is_plain else f"{role}={name}{shown}"


def _commas(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Box:
    id: str
    lines: tuple[str, ...]
    shape: Literal["node", "tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrow:
    source: str
    target: str
    label: str


def _picture(graph: Graph) -> tuple[list[_Box], list[_Arrow]]:
    """Return what is drawn: each node, operand and result, and who reads whom."""
    boxes: list[_Box] = []
    arrows: list[_Arrow] = []
    # Where each tensor comes from, and what is written on the arrow from there.
    sources: dict[str, tuple[str, str]] = {}

    def draw_tensor(name: str) -> None:
        tensor = graph.tensor(name)
        lines = (name, describe(tensor))
        boxes.append(_Box(id=f"t_{name}", lines=lines, shape="tensor"))
        sources[name] = (f"t_{name}", "")

    for name in graph.inputs:
        draw_tensor(name)
    for i, node in enumerate(graph.nodes):
        lines = (_operation(node), *_attributes(node))
        boxes.append(_Box(id=f"n{i}", lines=lines, shape="node"))
        for role, name in node.inputs:
            source, shown = sources[name]
            label = shown if role == name else f"{role}: {shown}" if shown else role
            arrows.append(_Arrow(source=source, target=f"n{i}", label=label))
        for role, name in node.outputs:
            if name in graph.outputs:
                draw_tensor(name)
                label = "" if role in (name, "output") else role
                arrows.append(_Arrow(source=f"n{i}", target=f"t_{name}", label=label))
            else:
                sources[name] = (f"n{i}", f"{name} {describe(graph.tensor(name))}")
    return boxes, arrows


def in_mermaid(text: str) -> str:
    """Return a text as Mermaid reads it within quotes."""
    # Inside quotes only these mean something to Mermaid.
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;")


def _in_dot(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
