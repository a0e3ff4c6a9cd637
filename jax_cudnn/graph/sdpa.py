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
    InputFold,
    NodeKind,
    OutputFold,
    Roles,
    register_kind,
    roles_of,
)
from jax_cudnn.graph.spec import Attributes, DTypeName, Graph, Node, Tensor

_PLAIN = (0, 1, 2, 3)
_FLOATS = ("f8_e4m3fn", "f8_e5m2", "bf16", "f16", "f32", "f64")


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
    _expect("sdpa", roles, "output", (b, h, s, roles["value"].dims[3]))
    _expect_dtype("sdpa", roles, "output", roles["query"].dtype)
    _check_stats("sdpa", roles, "stats")


def _check_sdpa_backward(roles: Roles, attributes: Attributes) -> None:
    del attributes
    kind = "sdpa_backward"
    _check_operands(kind, roles)
    b, h, s, _ = roles["query"].dims
    for role in ("output", "grad_output"):
        _expect(kind, roles, role, (b, h, s, roles["value"].dims[3]))
        _expect_dtype(kind, roles, role, roles["query"].dtype)
    for role in ("query", "key", "value", "bias"):
        if f"grad_{role}" in roles:
            if role not in roles:
                raise GraphError(f"{kind}: grad_{role} without {role}")
            _expect(kind, roles, f"grad_{role}", roles[role].dims)
            _expect_dtype(kind, roles, f"grad_{role}", roles[role].dtype)
    _check_stats(kind, roles, "stats")
    _check_stats(kind, roles, "grad_stats")


def _check_operands(kind: str, roles: Roles) -> None:
    query, value = roles["query"], roles["value"]
    for role in ("query", "key", "value"):
        if len(roles[role].dims) != 4:
            raise GraphError(f"{kind}: {role} has rank {len(roles[role].dims)}, not 4")
        _expect_dtype(kind, roles, role, query.dtype)
    if query.dtype not in _FLOATS:
        raise GraphError(f"{kind}: query dtype {query.dtype} is not a float")
    b, h, s, d = query.dims
    _, k, t, e = value.dims
    _expect(kind, roles, "key", (b, k, t, d))
    _expect(kind, roles, "value", (b, k, t, e))
    if (k == 0) != (h == 0) or (k and h % k):
        raise GraphError(f"{kind}: {h} query heads do not divide by {k} key heads")
    for role in ("bias", "mask"):
        if role in roles and not broadcasts_to(roles[role].dims, (b, h, s, t)):
            raise GraphError(
                f"{kind}: {role} dims {list(roles[role].dims)} do not broadcast to "
                f"{[b, h, s, t]}"
            )
    if "bias" in roles and roles["bias"].dtype not in _FLOATS:
        raise GraphError(f"{kind}: bias dtype {roles['bias'].dtype} is not a float")
    _expect_dtype(kind, roles, "mask", "bool")
    for role in ("query_lengths", "key_lengths"):
        _expect(kind, roles, role, (b, 1, 1, 1))
        _expect_dtype(kind, roles, role, "i32")


def broadcasts_to(dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether each of `dims` is 1 or the entry of `shape` at its place."""
    return len(dims) == len(shape) and all(
        dim in (1, full) for dim, full in zip(dims, shape, strict=True)
    )


def _check_stats(kind: str, roles: Roles, role: str) -> None:
    _expect(kind, roles, role, (*roles["query"].dims[:3], 1))
    _expect_dtype(kind, roles, role, stats_dtype(roles["query"].dtype))


def _expect(kind: str, roles: Roles, role: str, dims: tuple[int, ...]) -> None:
    if role in roles and roles[role].dims != dims:
        raise GraphError(
            f"{kind}: {role} has dims {list(roles[role].dims)}, not {list(dims)}"
        )


def _expect_dtype(kind: str, roles: Roles, role: str, dtype: DTypeName) -> None:
    if role in roles and roles[role].dtype != dtype:
        raise GraphError(f"{kind}: {role} is {roles[role].dtype}, not {dtype}")


# --- batching -------------------------------------------------------------------------


def _fold(roles: Roles, batched: frozenset[str]) -> FoldRule:
    """Fold examples into b; a bias or mask shared by all of them is not copied.

    The gradient of a bias is an exception: each example needs its own, so the bias
    takes part with the full batch and the sum over b is made after the call.
    """
    batch = roles["query"].dims[0]
    outputs: dict[str, OutputFold] = {
        role: "fold" for role in roles if role.startswith("grad_")
    }
    outputs |= {"output": "fold", "stats": "fold"}
    inputs: dict[str, InputFold] = {}
    for role, tensor in roles.items():
        shared = tensor.dims[0] == 1 and role not in batched
        if role in ("bias", "mask") and shared and f"grad_{role}" not in roles:
            inputs[role] = "keep"
        elif role not in batched or tensor.dims[0] != batch:
            inputs[role] = "broadcast"
        else:
            inputs[role] = "fold"
    if "grad_bias" in roles and roles["bias"].dims[0] != batch:
        outputs["grad_bias"] = "sum"
    return FoldRule(inputs=inputs, outputs=outputs, batch=batch)


# --- derivative -----------------------------------------------------------------------


def _with_stats(graph: Graph) -> Graph:
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
