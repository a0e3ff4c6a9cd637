# SPDX-License-Identifier: Apache-2.0
"""Lists small changes of a call, or of the GPU, that might let cuDNN run it.

The nearest come first. explanation.py tries them on the planner.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from jax_cudnn.config import Options, PlanOptions
from jax_cudnn.errors import GraphError
from jax_cudnn.graph import (
    DTypeName,
    Graph,
    Node,
    Tensor,
    is_anchor,
)
from jax_cudnn.graph.kinds import roles_in, row_of
from jax_cudnn.graph.shapes import check_tensors, resized
from jax_cudnn.graph.walks import graph_of, read_by, sources
from jax_cudnn.lowering.decision import precision_refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A part of a graph and its options, changed; ``words`` say what to do.

    "{workspace}" in the words stands for the workspace of the plan that is found.
    ``is_for_newer`` says that it is worth trying on newer GPUs, too.
    """

    words: str
    part: Graph
    options: Options
    is_for_newer: bool = False


def changes_of(part: Graph, options: Options) -> Iterator[Change]:
    """Yield changes of the call, from what costs its user least."""
    yield from _of_options(part, options)
    yield from _of_dtypes(part, options)
    yield from _of_results(part, options)
    yield from _of_sizes(part, options)
    yield from by_name(part, options)


def by_name(part: Graph, options: Options) -> Iterator[Change]:
    """Yield the call with cuDNN asked for by name, if it is not."""
    if options.implementation == "auto":
        yield Change(
            words='pass implementation="cudnn"',
            part=part,
            options=replace(options, implementation="cudnn"),
        )


# --- options --------------------------------------------------------------------------


# Options that allow plans, and do not refuse any.
_ALLOWING = ("reduced_precision_reduction",)


def _of_options(part: Graph, options: Options) -> Iterator[Change]:
    default, plan = PlanOptions(), options.plan
    changed = [
        field.name
        for field in fields(PlanOptions)
        if getattr(plan, field.name) != getattr(default, field.name)
        and field.name not in _ALLOWING
    ]
    for name in changed:
        words = f"leave out {name}={getattr(plan, name)!r}"
        if name == "workspace_limit_bytes":
            words = "raise workspace_limit_bytes to {workspace}"
        relaxed = replace(plan, **{name: getattr(default, name)})
        yield Change(words=words, part=part, options=replace(options, plan=relaxed))
    if len(changed) > 1:
        yield Change(
            words=f"leave out {', '.join(changed)}",
            part=part,
            options=replace(options, plan=default),
        )
    if precision_refusal(part, options) is not None:
        yield Change(
            words='allow TF32: jax.default_matmul_precision("tensorfloat32")',
            part=part,
            options=replace(options, matmul_precision="tensorfloat32"),
        )


# --- dtypes ---------------------------------------------------------------------------

_WIDE = ("f32", "f64")
_NARROW = ("f8_e4m3fn", "f8_e5m2", "i8", "u8")


def _is_sum(node: Node, role: str) -> bool:
    """Whether a role is f32 beside 16-bit operands, such as a log-sum-exp."""
    return row_of(node).roles[role].is_sum


def _of_dtypes(part: Graph, options: Options) -> Iterator[Change]:
    operands = _castable(part)
    found = sorted({part.tensor(name).dtype for name in operands})
    for dtype in ("bf16", "f16") if operands else ():
        words = f"cast the operands from {' and '.join(found)} to {dtype}"
        made = _made(words, part, options, _with_dtype(part, dtype))
        yield from (replace(each, is_for_newer=dtype == "bf16") for each in made)


def _castable(part: Graph) -> set[str]:
    """Return the operands that a kernel follows from and are not 16 bits wide."""
    needed = {
        name
        for node in part.nodes
        if is_anchor(node)
        for role, name in node.inputs
        if not _is_sum(node, role)
    }
    for node in reversed(part.nodes):
        if not needed.isdisjoint(name for _, name in node.outputs):
            needed.update(n for role, n in node.inputs if not _is_sum(node, role))
    return {
        name
        for name in needed.intersection(part.inputs)
        if part.tensor(name).dtype in (*_WIDE, *_NARROW)
    }


def _with_dtype(part: Graph, dtype: DTypeName) -> dict[str, Tensor]:
    """Return the tensors, those in memory in a dtype, and sums in f32."""
    in_f32 = {
        name
        for node in part.nodes
        for role, name in (*node.inputs, *node.outputs)
        if _is_sum(node, role)
    }
    read = read_by(node for node in part.nodes if is_anchor(node))

    def changed(tensor: Tensor) -> DTypeName:
        is_virtual = tensor.name not in (*part.inputs, *part.outputs)
        is_sum = tensor.dtype == "i32" and tensor.name in part.outputs
        if tensor.name in in_f32:
            return "f32"
        if tensor.dtype in (*_WIDE, *_NARROW) and (
            not is_virtual or tensor.name in read
        ):
            return dtype
        if is_virtual and tensor.dtype in ("f64", "i32"):
            return "f32"
        return dtype if is_sum else tensor.dtype

    return {t.name: replace(t, dtype=changed(t)) for t in part.tensors}


# --- results --------------------------------------------------------------------------


def _of_results(part: Graph, options: Options) -> Iterator[Change]:
    node = part.sole_node()
    names = {} if node is None else dict(node.outputs)
    if node is not None and "grad_bias" in names and len(names) > 1:
        name = names.pop("grad_bias")
        yield Change(
            words="do without the gradient of the bias (jax.lax.stop_gradient)",
            part=graph_of(
                part.tensors,
                [Node.make(node.kind, dict(node.inputs), names, node.attributes)],
                [each for each in part.outputs if each != name],
                part.inputs,
            ),
            options=options,
        )


# --- sizes ----------------------------------------------------------------------------

_Dims = tuple[int, ...]


def _of_sizes(part: Graph, options: Options) -> Iterator[Change]:
    anchors = [node for node in part.nodes if is_anchor(node)]
    if len(anchors) != 1 or (pads := row_of(anchors[0]).pads) is None:
        return
    (node,) = anchors
    names = dict((*node.inputs, *node.outputs))
    for multiple in pads.multiples:
        words, sizes = _rounded(part, node, multiple)
        if words:
            by_name = {names[role]: dims for role, dims in sizes.items()}
            made = _made(words, part, options, _resized(part, node, by_name))
            is_first = multiple == pads.multiples[0]
            yield from (replace(each, is_for_newer=is_first) for each in made)


def _rounded(part: Graph, node: Node, multiple: int) -> tuple[str, dict[str, _Dims]]:
    """Return the dims of each role with sizes in multiples, and what that is.

    The words are empty where all sizes are such multiples.
    """
    row = row_of(node)
    assert row.pads is not None
    roles = roles_in(part, node)
    sizes = check_tensors(row, roles, node.attributes)
    changed = {
        letter: -(-sizes[letter] // multiple) * multiple
        for letter in row.pads.letters
        if sizes[letter] % multiple
    }
    texts = [
        f"{row.letters[letter]} from {sizes[letter]} to {size}"
        for letter, size in changed.items()
    ]
    words = ", ".join(filter(None, [" and ".join(texts), row.pads.advice]))
    dims = resized(row, roles, node.attributes, changed)
    return f"pad {words}" if changed else "", dims


def _resized(part: Graph, node: Node, sizes: Mapping[str, _Dims]) -> dict[str, Tensor]:
    """Return the tensors with those of the kernel's node in other sizes.

    What leads to an operand follows it, all else follows the result.
    """
    like: dict[str, str] = {}
    for _, operand in node.inputs:
        like.update(dict.fromkeys(sources(part.nodes, [operand]), operand))
    result = node.outputs[0][1]
    changed: dict[str, Tensor] = {}
    for tensor in part.tensors:
        model = tensor.name if tensor.name in sizes else like.get(tensor.name, result)
        old, new = part.tensor(model).dims, sizes[model]
        dims = tensor.dims
        if len(dims) == len(old):
            dims = tuple(
                b if dim == a else dim for dim, a, b in zip(dims, old, new, strict=True)
            )
        changed[tensor.name] = replace(tensor, dims=dims)
    return changed


def _made(
    words: str, part: Graph, options: Options, tensors: Mapping[str, Tensor]
) -> Iterator[Change]:
    """Yield the part with other tensors, where they still make a graph."""
    try:
        changed = replace(part, tensors=tuple(tensors.values()))
    except GraphError:
        return  # no such call can be made
    yield Change(words=words, part=changed, options=options)
