# SPDX-License-Identifier: Apache-2.0
"""Rewrites a contraction with its prologue and epilogue for cuDNN, or says why not."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jax_cudnn.graph import Graph, Node, Target, Tensor, is_anchor
from jax_cudnn.graph.pointwise import copying, is_max_or_min
from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.graph.walks import following, graph_of, leading_to, made_by, read_by
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.legalization import (
    XLA_ADVICE,
    Arrays,
    Legalization,
    Rewrite,
    around,
)
from jax_cudnn.legalize.products import conv, matmul, reduction
from jax_cudnn.legalize.products.pointwise import rewrite_pointwise
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.dtypes import jax_dtype

_CANDIDATES: dict[str, Callable[[Graph], tuple[Rewrite, ...]]] = {
    "conv_dgrad": conv.candidates,
    "conv_fprop": conv.candidates,
    "conv_wgrad": conv.candidates,
    "matmul": matmul.candidates,
}

# The names of rewrites: what surrounds the contraction is computed by XLA, or the sums
# of its result within the kernel.
ALONE, WITHIN = "alone", "sums within"


def legalize(graph: Graph, target: Target | None) -> Legalization:
    """Return how cuDNN can run a graph of one contraction.

    What is decided by a kernel's operations goes by the graph as it was asked for. How
    many there may be of what is no contraction goes by what is written.
    """
    del target  # What a GPU or a version lacks is a limit.
    if not any(map(is_anchor, graph.nodes)):
        return reduction.legalize(rewrite_pointwise(graph))
    found = _legalize(graph)
    written = (
        replace(rewrite, graph=rewrite_pointwise(rewrite.graph))
        for rewrite in found.candidates
    )
    return replace(found, candidates=tuple(written))


def _legalize(graph: Graph) -> Legalization:
    contractions = [node for node in graph.nodes if is_anchor(node)]
    kinds = [node.kind for node in contractions]
    if len(kinds) != 1:
        return Legalization(
            reasons=(f"cuDNN has no kernel for {len(kinds)} contractions: {kinds}",)
        )
    if reasons := _refusals(graph):
        return Legalization(reasons=tuple(reasons), advice=XLA_ADVICE)
    if kinds[0] not in _CANDIDATES:
        # A kind with no rule here goes to cuDNN as it is.
        return Legalization(candidates=(GraphEditor.of(graph).finish(),))
    rewrites, node = _CANDIDATES[kinds[0]], contractions[0]
    if _reduces_rows(graph, node):
        return _with_reductions(graph)
    if narrow := _f8_results_of_f32(graph, node):
        return _converted_by_xla(graph, _in_f32(graph, narrow))
    if (exact := _i32_result(graph, node)) is not None:
        if reason := _too_large_for_f32(graph, node):
            return Legalization(reasons=(reason,))
        return _converted_by_xla(graph, _cast_in_kernel(graph, node, exact))
    fused = [*rewrites(graph), *_converted_first(graph, node, rewrites)]
    alone = _alone(graph, node, rewrites)
    return Legalization(
        candidates=tuple(
            replace(rewrite, problem=graph, core=rewrite.core or graph)
            for rewrite in (*fused, *alone)
        )
    )


def _reduces_rows(graph: Graph, node: Node) -> bool:
    """Whether there is a max or min, or a sum along more than the batch of a matmul.

    The sum of an operand's gradient along the batch is all that becomes of the product.
    """
    sums = made_by(each for each in graph.nodes if each.kind == "reduction")
    (result,) = (graph.tensor(name) for _, name in node.outputs)
    is_along_more = any(graph.tensor(x).dims[1:] != result.dims[1:] for x in sums)
    return is_along_more or any(map(is_max_or_min, graph.nodes))


def _with_reductions(graph: Graph) -> Legalization:
    """Return the rewrites that compute reductions of a contraction's result.

    cuDNN has them at the end of a product's kernel. That comes first where nothing else
    is to be written of the product. Otherwise XLA reads the result.
    """
    reductions = [each for each in graph.nodes if each.kind == "reduction"]
    after_sums = following(graph.nodes, made_by(reductions))
    last = [each for each in graph.nodes if not after_sums.isdisjoint(made_by([each]))]
    last = _with_what_leads_there(graph, last)
    rest = [each for each in graph.nodes if each not in last]
    made, read = made_by(rest), read_by(last)
    needed = [name for name in graph.outputs if name in made]
    needed += sorted((read & made).difference(needed))
    middle = graph_of(graph.tensors, _with_constants(graph, rest), needed)
    without = _legalize(middle)
    last = _with_constants(graph, last)
    note = "sums of the kernel's result are computed by XLA"
    by_xla = [
        _wrap(graph, rewrite, [], middle, last, note) for rewrite in without.candidates
    ]
    is_alone = made.isdisjoint(graph.outputs)
    within = [rewrite.named(WITHIN) for rewrite in matmul.with_reductions(graph)]
    rewrites = [*within, *by_xla] if is_alone else [*by_xla, *within]
    return replace(without, candidates=tuple(rewrites))


def _with_what_leads_there(graph: Graph, nodes: list[Node]) -> list[Node]:
    """Return the nodes with the elementwise ones that lead to nothing else.

    XLA computes these while it reads the product, in the dtype that the product has.
    """
    found = list(nodes)
    for each in reversed(graph.nodes):
        made = made_by([each])
        is_inner = each.kind == "pointwise" and made.isdisjoint(graph.outputs)
        reading = [other for other in graph.nodes if read_by([other]) & made]
        if each not in found and is_inner and all(x in found for x in reading):
            found.append(each)
    return [each for each in graph.nodes if each in found]


def _f8_results_of_f32(graph: Graph, node: Node) -> frozenset[str]:
    """Return the f8 results of f32 operands: cuDNN 9.19 wrote NaN into some (H200)."""
    if any(graph.tensor(name).dtype != "f32" for _, name in node.inputs):
        return frozenset()
    return frozenset(t.name for t in graph.output_tensors if t.dtype.startswith("f8"))


def _in_f32(graph: Graph, names: frozenset[str]) -> Graph:
    """Return the graph with the named results in f32."""
    return replace(
        graph,
        tensors=tuple(
            replace(t, dtype="f32") if t.name in names else t for t in graph.tensors
        ),
    )


def _i32_result(graph: Graph, node: Node) -> Tensor | None:
    """Return the sums of a convolution of 8 bits where they are a result.

    cuDNN 9.19 plans that and writes the bits of f32 (an H200,
    tests/products/gpu/test_launch_matrix.py).
    """
    if node.kind != "conv_fprop":
        return None
    made = graph.tensor(dict(node.outputs)["output"])
    return made if made.dtype == "i32" and made.name in graph.outputs else None


def _too_large_for_f32(graph: Graph, node: Node) -> str:
    """Return why f32 may not hold the sums of an 8-bit convolution, or nothing."""
    window = graph.tensor(dict(node.inputs)["w"]).dims[1:]
    # The largest product is that of -128 with itself, or of 255 with -128.
    is_unsigned = any(graph.tensor(name).dtype == "u8" for _, name in node.inputs)
    largest = math.prod(window) * (255 if is_unsigned else 128) * 128
    if largest <= 2**24:
        return ""
    return (
        f"i32 sums of {math.prod(window)} products of 8 bits: cuDNN writes them as "
        "f32, which represents integers up to 2^24 only"
    )


def _cast_in_kernel(graph: Graph, node: Node, sums: Tensor) -> Graph:
    """Return the graph with the i32 sums kept inside, and an f32 copy as the result."""
    inner = replace(sums, name=f"{sums.name}_i32")
    copy = copying(inner.name, sums.name)
    others = tuple(t for t in graph.tensors if t.name != sums.name)
    return replace(
        graph,
        tensors=(*others, inner, replace(sums, dtype="f32")),
        nodes=(*(each.renamed({sums.name: inner.name}) for each in graph.nodes), copy),
    )


def _converted_by_xla(graph: Graph, wide: Graph) -> Legalization:
    """Return the rewrites that compute `wide`, the graph with some results in f32.

    XLA converts these to what the graph says.
    """
    legalization = _legalize(wide)
    pairs = zip(graph.output_tensors, wide.output_tensors, strict=True)
    converted = [tensor for tensor, other in pairs if tensor.dtype != other.dtype]

    def results(_: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
        dtypes = (jax_dtype(tensor.dtype) for tensor in graph.output_tensors)
        return tuple(x.astype(dtype) for x, dtype in zip(made, dtypes, strict=True))

    notes = tuple(f"{t.name} is converted to {t.dtype} by XLA" for t in converted)
    rewrites = (
        around(rewrite, results=results, notes=notes)
        for rewrite in legalization.candidates
    )
    return replace(legalization, candidates=tuple(rewrites))


_Rewrites = Callable[[Graph], tuple[Rewrite, ...]]


def _converted_first(
    graph: Graph, node: Node, rewrites: _Rewrites
) -> tuple[Rewrite, ...]:
    """Return the rewrites in which XLA makes the operands and cuDNN does the rest.

    With many rows, converting 8-bit weights once is faster than in every tile.
    """
    first = leading_to(graph.nodes, read_by([node]))
    if not first:
        return ()
    rest = [each for each in graph.nodes if each not in first]
    middle = graph_of(graph.tensors, _with_constants(graph, rest), graph.outputs)
    is_conversion = any(
        graph.tensor(name).dtype in EIGHT_BIT for name in read_by(first)
    )
    done = "8-bit operands are converted" if is_conversion else "operands are computed"
    note = f"{done} by XLA before the kernel"
    return tuple(
        replace(_wrap(graph, rewrite, first, middle, [], note), core=middle)
        for rewrite in rewrites(middle)
    )


def _alone(graph: Graph, node: Node, rewrites: _Rewrites) -> tuple[Rewrite, ...]:
    """Return the rewrites that run the contraction in cuDNN and all else in XLA.

    The sums are rounded to the operands' dtype on their way.
    """
    first = leading_to(graph.nodes, read_by([node]))
    last = [each for each in graph.nodes if each not in first and each is not node]
    if not last:
        return ()  # That is the whole graph, or what _converted_first leaves of it.
    operands = [graph.tensor(name) for _, name in node.inputs]
    (sums,) = (graph.tensor(name) for _, name in node.outputs)
    rounds_sums = False
    if sums.dtype == "f32" and sums.name not in graph.outputs:
        dtype = operands[0].dtype
        finest = any(t.dtype in ("f32", "f64") for t in graph.output_tensors)
        if dtype in ("f8_e4m3fn", "f8_e5m2") or (dtype != "f32" and finest):
            return ()  # Rounding the sums would cost what the result is to show.
        sums, rounds_sums = replace(sums, dtype=dtype), dtype != "f32"
    middle = graph_of((*operands, sums), [node], (sums.name,))
    last = _with_constants(graph, last)
    note = "what surrounds the contraction is computed by XLA, from rounded sums"
    return tuple(
        replace(
            _wrap(graph, rewrite, first, middle, last, note).named(ALONE),
            core=middle,
            rounds_sums=rounds_sums,
        )
        for rewrite in rewrites(middle)
    )


def _with_constants(graph: Graph, nodes: list[Node]) -> list[Node]:
    """Return the nodes with the constants that they read."""
    read = read_by(nodes)
    return [
        node
        for node in graph.nodes
        if node in nodes or (node.kind == "constant" and node.outputs[0][1] in read)
    ]


def _wrap(
    graph: Graph,
    rewrite: Rewrite,
    first: list[Node],
    middle: Graph,
    last: list[Node],
    note: str,
) -> Rewrite:
    """Return a rewrite of the middle of a graph, with other nodes left to XLA."""
    table = {t.name: t for t in (*graph.tensors, *middle.tensors)}
    by_name = tuple(table.values())
    middle_results = [name for node in first for _, name in node.outputs]
    head = graph_of(by_name, first, middle_results) if first else None
    # Sums that are a result themselves are the middle's.
    wanted = [name for name in graph.outputs if name not in middle.outputs]
    tail = graph_of(by_name, last, wanted) if wanted else None

    def before(operands: Sequence[jax.Array]) -> Arrays:
        values = dict(zip(graph.inputs, operands, strict=True))
        _run(head, values)
        return rewrite.before([values[name] for name in middle.inputs])

    def after(operands: Sequence[jax.Array], results: Sequence[jax.Array]) -> Arrays:
        values = dict(zip(graph.inputs, operands, strict=True))
        # After `first`, a rewrite is an editor's, whose steps read no operands.
        given = () if first else [values[name] for name in middle.inputs]
        values |= dict(zip(middle.outputs, rewrite.after(given, results), strict=True))
        _run(tail, values)
        return tuple(values[name] for name in graph.outputs)

    return replace(rewrite, before=before, after=after, notes=(*rewrite.notes, note))


def _run(part: Graph | None, values: dict[str, jax.Array]) -> None:
    """Compute a part by the reference, its tensors found and put by name."""
    if part is not None:
        results = evaluate(part, [values[name] for name in part.inputs])
        values |= dict(zip(part.outputs, results, strict=True))


def _refusals(graph: Graph) -> list[str]:
    if all(tensor.dtype != "f64" for tensor in graph.tensors):
        return []
    return ["f64: cuDNN's fusions take bf16, f16, f32 and 8-bit operands"]
