# SPDX-License-Identifier: Apache-2.0
"""One contraction with its prologue and epilogue as cuDNN takes it, or why it does not."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jax_cudnn.graph import Graph, Node, Target
from jax_cudnn.legalize import conv, matmul
from jax_cudnn.legalize.partition import is_contraction
from jax_cudnn.legalize.rules import Legal, Legalization
from jax_cudnn.reference import evaluate

_CANDIDATES: dict[str, Callable[[Graph], tuple[Legal, ...]]] = {
    "conv_dgrad": conv.candidates,
    "conv_fprop": conv.candidates,
    "conv_wgrad": conv.candidates,
    "matmul": matmul.candidates,
}

# Below Ampere cuDNN has no engines that compile a fusion at run time.
_OLDEST_SM = 80
_OLDEST_CUDNN = 90800


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one contraction."""
    contractions = [node for node in graph.nodes if is_contraction(node)]
    kinds = [node.kind for node in contractions]
    if len(kinds) != 1:
        return Legalization(
            reasons=(f"cuDNN has no kernel for {len(kinds)} contractions: {kinds}",)
        )
    reasons = _refusals(graph, target)
    if reasons:
        return Legalization(
            reasons=tuple(reasons), advice='Pass implementation="xla" or "auto".'
        )
    ways = _CANDIDATES[kinds[0]]
    fused = ways(graph)
    alone = _alone(graph, contractions[0], ways) if len(graph.nodes) > 1 else ()
    # cuDNN's engines for groups are fast without an epilogue and slow with one (an
    # H200 with 9.19: docs/benchmarks/fusion.md).
    if _is_grouped(graph, contractions[0]):
        return Legalization(candidates=(*alone, *fused))
    return Legalization(candidates=(*fused, *alone))


def _is_grouped(graph: Graph, node: Node) -> bool:
    if node.kind != "conv_fprop":
        return False
    x, w = (graph.tensor(dict(node.inputs)[role]) for role in ("x", "w"))
    return x.dims[1] != w.dims[1]


def _alone(
    graph: Graph, node: Node, ways: Callable[[Graph], tuple[Legal, ...]]
) -> tuple[Legal, ...]:
    """Return the ways to run the contraction in cuDNN and all else in XLA.

    The sums are rounded to the operands' dtype on their way.
    """
    before, after = _around(graph, node)
    operands = [graph.tensor(name) for _, name in node.inputs]
    (sums,) = (graph.tensor(name) for _, name in node.outputs)
    if sums.dtype == "f32" and sums.name not in graph.outputs:
        sums = replace(sums, dtype=operands[0].dtype)
    middle = Graph(
        tensors=(*operands, sums),
        nodes=(node,),
        inputs=tuple(tensor.name for tensor in operands),
        outputs=(sums.name,),
    )
    return tuple(_wrap(graph, legal, before, middle, after) for legal in ways(middle))


def _around(graph: Graph, node: Node) -> tuple[list[Node], list[Node]]:
    """Return the nodes that the contraction follows from, and the others."""
    needed = {name for _, name in node.inputs}
    before: list[Node] = []
    for each in reversed(graph.nodes):
        if needed.intersection(name for _, name in each.outputs):
            before.insert(0, each)
            needed.update(name for _, name in each.inputs)
    rest = [each for each in graph.nodes if each not in before and each is not node]
    return before, rest


def _wrap(
    graph: Graph, legal: Legal, first: list[Node], middle: Graph, last: list[Node]
) -> Legal:
    def run(nodes: list[Node], values: dict[str, jax.Array]) -> None:
        tensors = {t.name: t for t in graph.tensors}
        tensors |= {t.name: t for t in middle.tensors}
        made = [name for node in nodes for _, name in node.outputs]
        read = {name for node in nodes for _, name in node.inputs} - {*made}
        if not nodes:
            return
        inputs = sorted(read)
        part = Graph(
            tensors=tuple(tensors[name] for name in (*inputs, *made)),
            nodes=tuple(nodes),
            inputs=tuple(inputs),
            outputs=tuple(made),
        )
        results = evaluate(part, [values[name] for name in inputs])
        values |= dict(zip(made, results, strict=True))

    def before(operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        values = dict(zip(graph.inputs, operands, strict=True))
        run(first, values)
        return legal.before([values[name] for name in middle.inputs])

    def after(
        operands: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> tuple[jax.Array, ...]:
        values = dict(zip(graph.inputs, operands, strict=True))
        constants = [node for node in first if node.kind == "constant"]
        (sums,) = legal.after((), results)
        values[middle.outputs[0]] = sums
        run([*constants, *last], values)
        return tuple(values[name] for name in graph.outputs)

    note = "what surrounds the contraction is computed by XLA, from rounded sums"
    return replace(legal, before=before, after=after, notes=(*legal.notes, note))


def _refusals(graph: Graph, target: Target | None) -> list[str]:
    reasons: list[str] = []
    if any(t.dtype == "f64" for t in graph.tensors):
        reasons.append("f64: cuDNN's fusions take bf16, f16, f32 and 8-bit operands")
    if target is None:
        return reasons
    if target.sm_version < _OLDEST_SM:
        reasons.append(
            f"sm_{target.sm_version} ({target.name}): fusions need sm_{_OLDEST_SM} "
            "(Ampere) or newer"
        )
    if target.cudnn_version < _OLDEST_CUDNN:
        reasons.append(f"cuDNN {target.cudnn_version} is older than 9.8")
    eight_bit_float = [t for t in graph.tensors if t.dtype.startswith("f8")]
    if eight_bit_float and target.sm_version < 89:
        reasons.append(f"sm_{target.sm_version} has no f8 tensor cores; sm_89 has")
    return reasons
