# SPDX-License-Identifier: Apache-2.0
"""Which small changes of a call, or of the GPU, might let cuDNN run it?

Only lists them, nearest first; explanation.py tries them on the planner.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from jax_cudnn.config import Options, PlanOptions
from jax_cudnn.errors import GraphError
from jax_cudnn.graph import DTypeName, Graph, Node, Tensor
from jax_cudnn.legalize import is_contraction
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


def _of_options(part: Graph, options: Options) -> Iterator[Change]:
    default, plan = PlanOptions(), options.plan
    changed = [
        field.name
        for field in fields(PlanOptions)
        if getattr(plan, field.name) != getattr(default, field.name)
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
# Roles that are f32 beside 16-bit operands: the log-sum-exp of attention.
_IN_F32 = ("stats", "grad_stats")


def _of_dtypes(part: Graph, options: Options) -> Iterator[Change]:
    operands = _castable(part)
    found = sorted({part.tensor(name).dtype for name in operands})
    for dtype in ("bf16", "f16") if operands else ():
        words = f"cast the operands from {' and '.join(found)} to {dtype}"
        made = _made(words, part, options, _with_dtype(part, dtype))
        yield from (replace(each, is_for_newer=dtype == "bf16") for each in made)


def _castable(part: Graph) -> set[str]:
    """Return the operands that a contraction follows from and are not 16 bits wide."""
    needed = {
        name
        for node in part.nodes
        if is_contraction(node)
        for role, name in node.inputs
        if role not in _IN_F32
    }
    for node in reversed(part.nodes):
        if not needed.isdisjoint(name for _, name in node.outputs):
            needed.update(name for role, name in node.inputs if role not in _IN_F32)
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
        if role in _IN_F32
    }
    products = (node for node in part.nodes if is_contraction(node))
    read = {name for node in products for _, name in node.inputs}

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
            part=Graph(
                tensors=tuple(t for t in part.tensors if t.name != name),
                nodes=(
                    Node.make(node.kind, dict(node.inputs), names, node.attributes),
                ),
                inputs=part.inputs,
                outputs=tuple(n for n in part.outputs if n != name),
            ),
            options=options,
        )


# --- sizes ----------------------------------------------------------------------------

# What cuDNN loads at once: 16 bytes, of 2 or of 1 byte an element.
_MULTIPLES = (8, 16)
# Of head sizes, which are padded to multiples of 8 by themselves. On sm_100 gradients
# take up to 128, and then 256 again (9.27, tests/gpuless/test_explain.py).
_HEAD_MULTIPLES = (128, 256)
_Dims = tuple[int, ...]


def _of_sizes(part: Graph, options: Options) -> Iterator[Change]:
    contractions = [node for node in part.nodes if is_contraction(node)]
    if len(contractions) != 1:
        return
    (node,) = contractions
    names = dict((*node.inputs, *node.outputs))
    roles = {role: part.tensor(name).dims for role, name in names.items()}
    multiples = _HEAD_MULTIPLES if node.kind.startswith("sdpa") else _MULTIPLES
    for multiple in multiples:
        words, sizes = _rounded(node.kind, roles, multiple)
        if any(sizes[role] != dims for role, dims in roles.items()):
            by_name = {names[role]: dims for role, dims in sizes.items()}
            made = _made(words, part, options, _resized(part, node, by_name))
            is_first = multiple == multiples[0]
            yield from (replace(each, is_for_newer=is_first) for each in made)


def _rounded(
    kind: str, roles: Mapping[str, _Dims], multiple: int
) -> tuple[str, dict[str, _Dims]]:
    """Return the dims of each role with sizes in multiples, and what that is."""

    def up(size: int) -> int:
        return -(-size // multiple) * multiple

    new = dict(roles)
    if kind.startswith("conv"):
        x = next(role for role in ("x", "grad_x") if role in roles)
        w = next(role for role in ("w", "grad_w") if role in roles)
        y = next(role for role in ("output", "grad_output") if role in roles)
        groups = roles[x][1] // roles[w][1]
        c, o = up(roles[w][1]), up(roles[w][0] // groups)
        new[x] = (roles[x][0], groups * c, *roles[x][2:])
        new[w] = (groups * o, c, *roles[w][2:])
        new[y] = (roles[y][0], groups * o, *roles[y][2:])
        what = "channels of a group" if groups > 1 else "channels"
        before = f"{roles[w][1]} in and {roles[w][0] // groups} out"
        return f"make the {what} {c} in and {o} out, not {before}", new
    if kind == "matmul":
        for role, dims in roles.items():
            new[role] = (dims[0], *map(up, dims[1:]))
        (_, m, r), n = new["a"], new["b"][2]
        return f"make the matrices {m} x {r} and {r} x {n}", new
    for role, dims in roles.items():
        if role in _HEADED:
            new[role] = (*dims[:3], up(dims[3]))
    d, e = new["query"][3], new["value"][3]
    words = (
        f"pad the head sizes with zeros to {d} (query, key) and {e} (value), and pass "
        "the scale of the old ones"
    )
    return words, new


# Roles of attention whose last axis is a head.
_HEADED = (
    *("query", "key", "value", "output"),
    *("grad_query", "grad_key", "grad_value", "grad_output"),
)


def _resized(part: Graph, node: Node, sizes: Mapping[str, _Dims]) -> dict[str, Tensor]:
    """Return the tensors with those of the contraction in other sizes.

    What leads to an operand follows it, all else follows the result.
    """
    like: dict[str, str] = {}
    for _, operand in node.inputs:
        sources = {operand}
        for each in reversed(part.nodes):
            if not sources.isdisjoint(name for _, name in each.outputs):
                sources.update(name for _, name in each.inputs)
        like.update(dict.fromkeys(sources, operand))
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
