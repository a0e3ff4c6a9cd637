# SPDX-License-Identifier: Apache-2.0
"""The attention nodes, `sdpa` and `sdpa_backward`: shapes, batching, derivative.

Axis letters: b batch, s query length, t key length, h query heads, k key heads,
d head size of query and key, e head size of value.

==================  ==================  =========================================
role                dims                meaning
==================  ==================  =========================================
query               (b, h, s, d)        any float dtype; key, value, output alike
key, value          (b, k, t, d | e)    h is a multiple of k
bias                each 1 or (b,h,s,t) added to the scaled scores; a float dtype
mask                each 1 or (b,h,s,t) bool, False hides a key from a query
query_lengths       (b, 1, 1, 1)        i32, rows at or past it are hidden
key_lengths         (b, 1, 1, 1)        i32, keys at or past it are hidden
output              (b, h, s, e)
stats               (b, h, s, 1)        log-sum-exp of the scores, f32 (f64 for f64)
==================  ==================  =========================================
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax_cudnn.errors import GraphError
from jax_cudnn.graph.kinds import (
    BackwardGraph,
    Derivative,
    FoldRule,
    NodeKind,
    Roles,
    register_kind,
    roles_of,
)
from jax_cudnn.graph.rules import FLOATS, broadcasts_to, expect_dims, expect_dtype
from jax_cudnn.graph.spec import Attributes, DTypeName, Graph, Node, Tensor

_PLAIN = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class SdpaAttributes(Attributes):
    """Static configuration of attention, forward and backward.

    ``scale`` multiplies query-key products before the bias is added; with
    ``is_causal`` a query at position i sees keys 0 to i (top-left alignment).
    """

    scale: float
    is_causal: bool

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise GraphError(f"sdpa: scale {self.scale} is not finite")


def stats_dtype(dtype: DTypeName) -> DTypeName:
    """Return the dtype in which sums over keys and the log-sum-exp are kept."""
    return "f64" if dtype == "f64" else "f32"


def sdpa_graph(
    inputs: Mapping[str, Tensor],
    *,
    attributes: SdpaAttributes,
    output_order: tuple[int, ...] = _PLAIN,
    with_stats: bool = False,
) -> Graph:
    """Build the one-node forward graph; tensors are named by their roles.

    ``inputs`` maps roles to tensors of the same name, in operand order.
    """
    query, value = inputs["query"], inputs["value"]
    b, h, s, _ = query.dims
    output = Tensor(
        name="output",
        dtype=query.dtype,
        dims=(b, h, s, value.dims[3]),
        order=output_order,
    )
    outputs = {"output": output}
    if with_stats:
        outputs["stats"] = _stats_like(query)
    return _one_node_graph("sdpa", inputs, outputs, attributes)


def _stats_like(query: Tensor) -> Tensor:
    return Tensor(
        name="stats",
        dtype=stats_dtype(query.dtype),
        dims=(*query.dims[:3], 1),
        order=_PLAIN,
    )


def _one_node_graph(
    kind: str,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    attributes: SdpaAttributes,
) -> Graph:
    for role, tensor in (*inputs.items(), *outputs.items()):
        if tensor.name != role:
            raise GraphError(f"{kind}: tensor {tensor.name!r} is given as {role!r}")
    return Graph(
        tensors=(*inputs.values(), *outputs.values()),
        nodes=(
            Node.make(
                kind, {r: r for r in inputs}, {r: r for r in outputs}, attributes
            ),
        ),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


# --- shape rules ----------------------------------------------------------------------


def _check_sdpa(roles: Roles, attributes: Attributes) -> None:
    del attributes
    _check_operands("sdpa", roles)
    b, h, s, _ = roles["query"].dims
    expect_dims("sdpa", roles, "output", (b, h, s, roles["value"].dims[3]))
    expect_dtype("sdpa", roles, "output", roles["query"].dtype)
    _check_stats("sdpa", roles, "stats")


def _check_sdpa_backward(roles: Roles, attributes: Attributes) -> None:
    del attributes
    kind = "sdpa_backward"
    _check_operands(kind, roles)
    b, h, s, _ = roles["query"].dims
    for role in ("output", "grad_output"):
        expect_dims(kind, roles, role, (b, h, s, roles["value"].dims[3]))
        expect_dtype(kind, roles, role, roles["query"].dtype)
    for role in ("query", "key", "value", "bias"):
        if f"grad_{role}" in roles:
            if role not in roles:
                raise GraphError(f"{kind}: grad_{role} without {role}")
            expect_dims(kind, roles, f"grad_{role}", roles[role].dims)
            expect_dtype(kind, roles, f"grad_{role}", roles[role].dtype)
    _check_stats(kind, roles, "stats")
    _check_stats(kind, roles, "grad_stats")


def _check_operands(kind: str, roles: Roles) -> None:
    query, value = roles["query"], roles["value"]
    for role in ("query", "key", "value"):
        if len(roles[role].dims) != 4:
            raise GraphError(f"{kind}: {role} has rank {len(roles[role].dims)}, not 4")
        expect_dtype(kind, roles, role, query.dtype)
    if query.dtype not in FLOATS:
        raise GraphError(f"{kind}: query dtype {query.dtype} is not a float")
    b, h, s, d = query.dims
    _, k, t, e = value.dims
    expect_dims(kind, roles, "key", (b, k, t, d))
    expect_dims(kind, roles, "value", (b, k, t, e))
    if (k == 0) != (h == 0) or (k and h % k):
        raise GraphError(f"{kind}: {h} query heads do not divide by {k} key heads")
    for role in ("bias", "mask"):
        if role in roles and not broadcasts_to(roles[role].dims, (b, h, s, t)):
            raise GraphError(
                f"{kind}: {role} dims {list(roles[role].dims)} do not broadcast to "
                f"{[b, h, s, t]}"
            )
    if "bias" in roles and roles["bias"].dtype not in FLOATS:
        raise GraphError(f"{kind}: bias dtype {roles['bias'].dtype} is not a float")
    expect_dtype(kind, roles, "mask", "bool")
    for role in ("query_lengths", "key_lengths"):
        expect_dims(kind, roles, role, (b, 1, 1, 1))
        expect_dtype(kind, roles, role, "i32")


def _check_stats(kind: str, roles: Roles, role: str) -> None:
    expect_dims(kind, roles, role, (*roles["query"].dims[:3], 1))
    expect_dtype(kind, roles, role, stats_dtype(roles["query"].dtype))


# --- batching -------------------------------------------------------------------------


def _fold(graph: Graph, batched: frozenset[str]) -> FoldRule | None:
    """Fold examples into b; a bias or mask shared by all of them is not copied.

    The gradient of a bias is an exception: each example needs its own, so the bias
    takes part with the full batch and the sum over b is made after the call.
    """
    node = graph.sole_node()
    if node is None:
        return None
    roles = roles_of(node, {t.name: t for t in graph.tensors})
    batch = roles["query"].dims[0]
    sizes = {tensor.name: batch for tensor in graph.tensors}
    for role in ("bias", "mask"):
        if role in roles and f"grad_{role}" not in roles:
            tensor = roles[role]
            if tensor.dims[0] == 1 and tensor.name not in batched:
                del sizes[tensor.name]
    sums = set[str]()
    if "grad_bias" in roles and roles["bias"].dims[0] != batch:
        sums.add(roles["grad_bias"].name)
    return FoldRule(axes=dict.fromkeys(sizes, 0), sizes=sizes, sums=frozenset(sums))


# --- derivative -----------------------------------------------------------------------


def _with_stats(graph: Graph, wanted: tuple[bool, ...] = ()) -> Graph:
    del wanted  # Every gradient needs the log-sum-exp.
    node = graph.nodes[0]
    if "stats" in dict(node.outputs):
        return graph
    stats = _stats_like(graph.tensor(dict(node.inputs)["query"]))
    return Graph(
        tensors=(*graph.tensors, stats),
        nodes=(
            Node.make(
                node.kind,
                dict(node.inputs),
                {**dict(node.outputs), "stats": stats.name},
                node.attributes,
            ),
        ),
        inputs=graph.inputs,
        outputs=(*graph.outputs, stats.name),
    )


def _backward(
    graph: Graph, wanted: tuple[bool, ...], nonzero: tuple[bool, ...]
) -> BackwardGraph:
    node = graph.nodes[0]
    full = _with_stats(graph)
    by_role = roles_of(full.nodes[0], {t.name: t for t in full.tensors})
    attributes = node.attributes
    assert isinstance(attributes, SdpaAttributes)

    input_role = {name: role for role, name in node.inputs}
    output_role = {name: role for role, name in full.nodes[0].outputs}
    inputs: dict[str, Tensor] = {}
    operands: list[tuple[str, int]] = []

    def add(role: str, like: Tensor, source: str, index: int) -> None:
        inputs[role] = _renamed(like, role)
        operands.append((source, index))

    for i, name in enumerate(graph.inputs):
        add(input_role[name], graph.tensor(name), "input", i)
    for i, name in enumerate(full.outputs):
        add(output_role[name], full.tensor(name), "output", i)
    for i, name in enumerate(graph.outputs):
        role = output_role[name]
        if role == "output" or nonzero[i]:
            add(f"grad_{role}", full.tensor(name), "cotangent", i)

    gradients = [graph.inputs.index(_name_of(node, r)) for r in _QKV]
    outputs = {f"grad_{r}": _renamed(by_role[r], f"grad_{r}") for r in _QKV}
    if "bias" in by_role:
        index = graph.inputs.index(_name_of(node, "bias"))
        if wanted[index]:
            outputs["grad_bias"] = _renamed(by_role["bias"], "grad_bias")
            gradients.append(index)
    return BackwardGraph(
        graph=_one_node_graph("sdpa_backward", inputs, outputs, attributes),
        operands=tuple(operands),  # type: ignore[arg-type]
        gradients=tuple(gradients),
    )


_QKV = ("query", "key", "value")


def _name_of(node: Node, role: str) -> str:
    return dict(node.inputs)[role]


def _renamed(tensor: Tensor, name: str) -> Tensor:
    return Tensor(name=name, dtype=tensor.dtype, dims=tensor.dims, order=tensor.order)


_OPTIONAL = ("bias", "mask", "query_lengths", "key_lengths")

SDPA = register_kind(
    NodeKind(
        name="sdpa",
        attributes=SdpaAttributes,
        required_inputs=_QKV,
        optional_inputs=_OPTIONAL,
        required_outputs=("output",),
        optional_outputs=("stats",),
        check=_check_sdpa,
        fold=_fold,
        derivative=Derivative(with_residuals=_with_stats, backward=_backward),
    )
)

SDPA_BACKWARD = register_kind(
    NodeKind(
        name="sdpa_backward",
        attributes=SdpaAttributes,
        required_inputs=(*_QKV, "output", "stats", "grad_output"),
        optional_inputs=(*_OPTIONAL, "grad_stats"),
        required_outputs=("grad_query", "grad_key", "grad_value"),
        optional_outputs=("grad_bias",),
        check=_check_sdpa_backward,
        fold=_fold,
    )
)
