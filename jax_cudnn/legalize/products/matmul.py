# SPDX-License-Identifier: Apache-2.0
"""Rewrites matmuls for cuDNN: rows padded to full loads, operands completed."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph, GraphWriter, Node, is_anchor
from jax_cudnn.graph.pointwise import ReductionAttributes, is_max_or_min
from jax_cudnn.graph.rules import EIGHT_BIT
from jax_cudnn.graph.transforms.folding import families
from jax_cudnn.graph.walks import made_by, read_by, readers
from jax_cudnn.legalize.common.editor import GraphEditor
from jax_cudnn.legalize.common.layout import ELEMENTS_PER_LOAD, rounded_up
from jax_cudnn.legalize.common.legalization import Arrays, Rewrite, around

# The rewrite with f8 operands copied so that neighbours in memory are added up.
ALONG_SUM = "along the sum"
_SUM_AXIS = {"a": 2, "b": 1}


def candidates(graph: Graph) -> tuple[Rewrite, ...]:
    """Return the rewrites of a matmul with what surrounds it.

    The engines that take rows which do not fill a load are slow, and some of cuDNN
    9.19's give wrong results on an H200 (tests/products/gpu/test_fusion_numerics.py).

    8-bit weights on the right are also tried on the left, by computing the transposed
    product: the weights' columns are then the rows that its tiles are made of, which is
    faster where the other operand has few.

    f8 operands are also tried as the fast kernels of Hopper read them.
    """
    rewrites = (graph, _transposed(graph)) if narrow_side(graph) == "b" else (graph,)
    edited = (editor for editor in map(_edited, rewrites) if editor is not None)
    found = [_padded(editor) or editor.finish() for editor in edited]
    return (*found, *_along_the_sum(graph))


def copied_for_f8(graph: Graph) -> tuple[str, ...]:
    """Return the roles, "a" and "b", of f8 operands that do not lie along the sum."""
    (node,) = filter(is_anchor, graph.nodes)
    if node.kind != "matmul":
        return ()
    tensors = {role: graph.tensor(name) for role, name in node.inputs}
    is_f8 = all(each.dtype.startswith("f8") for each in tensors.values())
    is_operand = all(name in graph.inputs for _, name in node.inputs)
    if not (is_f8 and is_operand):
        return ()
    return tuple(r for r, each in tensors.items() if each.order[-1] != _SUM_AXIS[r])


def _along_the_sum(graph: Graph) -> tuple[Rewrite, ...]:
    """Return the rewrite with transposed copies of f8 operands, so that both lie so.

    Matrix units of Hopper multiply f8 in this layout alone. A copy takes the time of
    reading and writing a matrix of bytes.
    """
    copied = copied_for_f8(graph)
    editor = _edited(graph) if copied else None
    if editor is None:
        return ()
    names = dict(editor.main.inputs)
    for role in copied:
        editor.reorder(names[role], (0, 1, 2) if role == "a" else (0, 2, 1))
        editor.notes.append(f"{role} is transposed: f8 kernels read along the sum")
    rewrite = _padded(editor) or editor.finish()
    return (rewrite.named(ALONG_SUM),)


def with_reductions(graph: Graph) -> tuple[Rewrite, ...]:
    """Return the rewrite in which reductions are the last operations of a matmul.

    None where rows or columns are padded: what is in the padding would count. Nothing
    may read a sum. cuDNN keeps them in f32.
    """
    (node,) = filter(is_anchor, graph.nodes)
    (result,) = (name for _, name in node.outputs)
    made = made_by(each for each in graph.nodes if each.kind == "reduction")
    is_last = made <= {*graph.outputs} and made.isdisjoint(read_by(graph.nodes))
    if node.kind != "matmul" or not is_last:
        return ()
    counted, counts = _with_counts(graph)
    editor = _edited(counted)
    if editor is None:
        return ()
    for name in made:
        if editor.tensors[name].dtype != "f32":
            editor.convert(name, "f32")
    rewrite = _padded(editor) or editor.finish()
    if editor.tensors[result].dims != graph.tensor(result).dims:
        return ()

    def results(_: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
        found = dict(zip(counted.outputs, made, strict=True))
        for name, (count, empty) in counts.items():
            number, dtype = found[count], found[name].dtype
            fill = jnp.where(jnp.isnan(number), jnp.nan, empty).astype(dtype)
            found[name] = jnp.where(number > 0, found[name], fill)
        return tuple(found[name] for name in graph.outputs)

    return (around(rewrite, results=results),)


_LARGEST = float(np.finfo(np.float32).max)


def _with_counts(graph: Graph) -> tuple[Graph, dict[str, tuple[str, float]]]:
    """Return the graph with a count for each max or min: of the elements that it is of.

    cuDNN's max and min ignore NaN, and begin with the largest finite numbers
    (9.19 on an H100). So what is NaN counts as NaN, and what is beyond these numbers as
    nothing. Of each max or min, return the name of its count, and what it is where that
    is 0.
    """
    # The count of max(3, nan) is 1 + nan, so the result is NaN. The count of
    # max(-inf, -inf) is 0, so the result is -inf, where cuDNN has -3.4e38. Where the
    # count is positive, cuDNN's result holds.
    found = [node for node in graph.nodes if is_max_or_min(node)]
    if not found:
        return graph, {}
    writer = GraphWriter("f32", prefix="counted_")
    names = {t.name: writer.input(t) for t in graph.input_tensors}
    for node in graph.nodes:
        ((_, made),) = node.outputs
        tensor = graph.tensor(made)
        names[made] = writer.result(writer.copy(node, tensor, names), tensor)
    counts: dict[str, tuple[str, float]] = {}
    for node in found:
        assert isinstance(node.attributes, ReductionAttributes)
        ((_, x),), ((_, made),) = node.inputs, node.outputs
        is_max, value = node.attributes.mode == "max", names[x]
        tensor = graph.tensor(made)
        one, zero, bound = (
            writer.constant(number, len(tensor.dims))
            for number in (1.0, 0.0, -_LARGEST if is_max else _LARGEST)
        )
        is_beyond = writer.pointwise("lt" if is_max else "gt", value, bound)
        is_within = writer.pointwise("ge" if is_max else "le", value, bound)
        other = writer.pointwise("select", zero, value, is_beyond)
        counted = writer.pointwise("select", one, other, is_within)
        named = replace(tensor, name=f"count_of_{made}", dtype="f32")
        count = writer.result(writer.reduce_to(counted, tensor.dims), named)
        counts[made] = count, -math.inf if is_max else math.inf
    outputs = [*graph.outputs, *(count for count, _ in counts.values())]
    return writer.finish(outputs), counts


def narrow_side(graph: Graph) -> str | None:
    """Return the operand, "a" or "b", that alone has 8 bits: weights, for most."""
    family = families(graph)
    narrow = {family.get(t.name) for t in graph.input_tensors if t.dtype in EIGHT_BIT}
    sides = narrow & {"a", "b"}
    return sides.pop() if len(sides) == 1 else None


def _transposed(graph: Graph) -> Graph:
    """Return the graph of the transposed matrices, which are the same arrays."""
    swap = (0, 2, 1)
    tensors = (
        replace(
            tensor,
            dims=tuple(tensor.dims[axis] for axis in swap),
            order=tuple(swap[axis] for axis in tensor.order),
        )
        for tensor in graph.tensors
    )
    return replace(
        graph,
        tensors=tuple(tensors),
        nodes=tuple(map(_with_sides_swapped, graph.nodes)),
    )


def _with_sides_swapped(node: Node) -> Node:
    if not is_anchor(node):
        return node
    inputs = dict(node.inputs)
    sides = {"a": inputs["b"], "b": inputs["a"]}
    return Node.make(node.kind, sides, dict(node.outputs), node.attributes)


def _edited(graph: Graph) -> GraphEditor | None:
    """Broadcast operands of the epilogue along the batch, unless one serves all.

    None where such an operand meets a sum of the result, which it would not fit then.
    """
    editor = GraphEditor.of(graph)
    (result,) = (editor.tensors[name] for _, name in editor.main.outputs)
    b, m, n = full = result.dims
    family = families(graph)
    for name in editor.inputs:
        dims = editor.tensors[name].dims
        taken = (full, (1, 1, n), (1, m, 1), (b, m, 1), (1, 1, 1))
        if family.get(name) == "output" and dims not in taken:
            met = made_by(readers(graph.nodes, name))
            if any(graph.tensor(each).dims != full for each in met):
                return None
            editor.expand(name, full)
    _batch_first(editor)
    return editor


def _batch_first(editor: GraphEditor) -> None:
    """Transpose what is stored with the batch fastest, which cuDNN computes wrongly.

    Seen in a gradient of that layout (9.19 on an H200).
    """
    for name, tensor in list(editor.tensors.items()):
        if tensor.order[-1] == 0 and tensor.dims[0] > 1:
            editor.reorder(name, (0, 1, 2))
            if name in (*editor.inputs, *editor.outputs):
                editor.notes.append(f"{name} is transposed: its batch was stored last")


def _padded(editor: GraphEditor) -> Rewrite | None:
    """Return the rewrite with matrices padded to full loads; None where they are."""
    graph = editor.graph
    # Sixteen bytes hold 8 elements of bf16: (7, 13) @ (13, 30) becomes (7, 16) @
    # (16, 32), and the result is cut to 30 columns. The 7 rows are padded only where
    # the rows are the fastest axis of some tensor.
    a, b = (editor.tensors[name] for _, name in editor.main.inputs)
    narrow = [t for t in graph.input_tensors if t.dtype in ELEMENTS_PER_LOAD]
    unit = max(ELEMENTS_PER_LOAD[t.dtype] for t in narrow)
    m, r, n = a.dims[1], a.dims[2], b.dims[2]
    family = families(graph)
    shared = editor.constants
    # Along m: what is stored so is the operand, or the results of a transposed product.
    columns_are_loaded = any(
        tensor.order[-1] == 1 and tensor.dims[1] == m and family.get(name) != "b"
        for name, tensor in editor.tensors.items()
        if name not in shared
    )
    grown = {
        "a": {1: m if columns_are_loaded else 0, 2: r},
        "b": {1: r, 2: n},
        "output": {1: m if columns_are_loaded else 0, 2: n},
    }
    changed = False
    for name, tensor in list(editor.tensors.items()):
        if name in shared or name not in family:
            continue
        sizes = {
            axis: rounded_up(size, unit)
            for axis, size in grown[family[name]].items()
            if tensor.dims[axis] == size and size % unit
        }
        if sizes:
            changed = True
            editor.pad(name, sizes)
    if not changed:
        return None
    editor.notes.append(f"matrices are padded to multiples of {unit} elements")
    return editor.finish()
