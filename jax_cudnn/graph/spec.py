# SPDX-License-Identifier: Apache-2.0
"""Graphs as data: tensors, nodes and graphs, frozen, hashable and checked when made.

Knows nothing of JAX's tracing, of the C++ extension or of how any node computes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, Self, get_args

from jax_cudnn.errors import GraphError

# The version of the JSON form; see codec.py. A change of meaning raises it.
SCHEMA = 1

# Dtypes as JAX prints them.
DTypeName = Literal[
    "bool",
    "u8",
    "i8",
    "i32",
    "i64",
    "f4_e2m1fn",
    "f8_e4m3fn",
    "f8_e5m2",
    "f8_e8m0fnu",
    "bf16",
    "f16",
    "f32",
    "f64",
]
DTYPE_NAMES: tuple[DTypeName, ...] = get_args(DTypeName)

# XLA and cuDNN count elements in signed 64-bit integers.
_MAX_ELEMENTS = 2**63 - 1
# The most dimensions that a cuDNN backend tensor takes (CUDNN_DIM_MAX in cudnn.h).
MAX_RANK = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A named tensor: logical dimensions in cuDNN's order and how they are stored.

    ``order`` lists the logical axes from the slowest to the fastest varying one; the
    array that JAX sees has the shape ``stored_shape`` in row-major layout. An attention
    query ``(b, s, h, d)`` in memory is ``dims=(b, h, s, d), order=(0, 2, 1, 3)``.
    Strides follow from both, so size-1 axes cannot make two spellings of one tensor.
    """

    name: str
    dtype: DTypeName
    dims: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        where = f"tensor {self.name!r}"
        if not self.name or not self.name.isidentifier() or not self.name.isascii():
            raise GraphError(f"tensor name {self.name!r} is not an ASCII identifier")
        if self.dtype not in DTYPE_NAMES:
            raise GraphError(
                f"{where}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_NAMES)}"
            )
        if not 1 <= len(self.dims) <= MAX_RANK:
            raise GraphError(f"{where}: rank {len(self.dims)} is not 1 to {MAX_RANK}")
        if any(dim < 0 for dim in self.dims):
            raise GraphError(f"{where}: dims {list(self.dims)} has a negative entry")
        if math.prod(max(dim, 1) for dim in self.dims) > _MAX_ELEMENTS:
            raise GraphError(f"{where}: dims {list(self.dims)} overflow 64 bits")
        if sorted(self.order) != list(range(len(self.dims))):
            raise GraphError(
                f"{where}: order {list(self.order)} is not a permutation of the "
                f"{len(self.dims)} axes"
            )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the row-major array that holds this tensor."""
        return tuple(self.dims[axis] for axis in self.order)

    @property
    def is_empty(self) -> bool:
        """Whether the tensor has no elements."""
        return 0 in self.dims


# What an attribute of a node may hold.
AttributeValue = bool | int | float | str | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """Base of every node kind's static configuration.

    -0.0 becomes 0.0, which it equals: equal graphs mean the same.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and value == 0.0:
                object.__setattr__(self, field.name, 0.0)

    def folded(self, letter: str) -> Self:
        """Return the attributes where examples are the slower part of a letter."""
        del letter
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One cuDNN operation: its kind, its tensors by role, its attributes.

    ``inputs`` and ``outputs`` are (role, tensor name) pairs sorted by role; an absent
    optional operand is simply not there.
    """

    kind: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    attributes: Attributes

    @classmethod
    def make(
        cls,
        kind: str,
        inputs: Mapping[str, str | None],
        outputs: Mapping[str, str | None],
        attributes: Attributes,
    ) -> "Node":
        """Build a node from role mappings; roles that map to None are left out."""
        return cls(
            kind=kind,
            inputs=_present_roles(inputs),
            outputs=_present_roles(outputs),
            attributes=attributes,
        )

    def renamed(self, names: Mapping[str, str]) -> "Node":
        """Return the node with tensors of other names, for those that are listed."""

        def pairs(given: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
            return tuple((role, names.get(name, name)) for role, name in given)

        return replace(self, inputs=pairs(self.inputs), outputs=pairs(self.outputs))


def _present_roles(roles: Mapping[str, str | None]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((r, name) for r, name in roles.items() if name is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A checked graph: tensors, nodes in execution order, ordered inputs and outputs.

    ``inputs`` is the order of the operands, ``outputs`` that of the results. A tensor
    in neither is virtual: it never reaches memory.
    """

    tensors: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        # Kinds live above this module, which only needs their check.
        from jax_cudnn.graph.kinds import check_node

        object.__setattr__(
            self, "tensors", tuple(sorted(self.tensors, key=lambda t: t.name))
        )
        table = {tensor.name: tensor for tensor in self.tensors}
        if len(table) != len(self.tensors):
            raise GraphError("two tensors have the same name")
        for label, names in (("inputs", self.inputs), ("outputs", self.outputs)):
            if len(set(names)) != len(names):
                raise GraphError(f"graph {label} {list(names)} name a tensor twice")
            for name in names:
                if name not in table:
                    raise GraphError(f"graph {label} name an unknown tensor {name!r}")
        if not self.nodes or not self.outputs:
            raise GraphError("a graph needs at least one node and one output")
        known = set(self.inputs)
        for node in self.nodes:
            check_node(node, table)
            for role, name in node.inputs:
                if name not in known:
                    raise GraphError(
                        f"{node.kind} reads {role}={name!r} before it is made"
                    )
            for role, name in node.outputs:
                if name in known:
                    raise GraphError(f"{node.kind} makes {role}={name!r} a second time")
                known.add(name)
        if unused := sorted(set(table) - known):
            raise GraphError(f"tensors {unused} are neither inputs nor made by a node")
        for name in self.outputs:
            if name in self.inputs:
                raise GraphError(f"{name!r} is both an input and an output")

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of that name."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    @property
    def input_tensors(self) -> tuple[Tensor, ...]:
        """The operands, in order."""
        return tuple(self.tensor(name) for name in self.inputs)

    @property
    def output_tensors(self) -> tuple[Tensor, ...]:
        """The results, in order."""
        return tuple(self.tensor(name) for name in self.outputs)

    @property
    def has_empty_tensor(self) -> bool:
        """Whether any tensor has no elements; such a graph never reaches cuDNN."""
        return any(tensor.is_empty for tensor in self.tensors)

    def sole_node(self) -> Node | None:
        """Return the only node, or None where there are several."""
        return self.nodes[0] if len(self.nodes) == 1 else None

    # How a graph is drawn lives above this module, as kinds do.

    def __str__(self) -> str:
        from jax_cudnn.graph.printing import to_text

        return to_text(self)

    def mermaid(self) -> str:
        """Return a Mermaid flowchart, which GitHub draws in a ``mermaid`` block."""
        from jax_cudnn.graph.printing import to_mermaid

        return to_mermaid(self)

    def dot(self) -> str:
        """Return a drawing in Graphviz's dot language, for ``dot -Tsvg``."""
        from jax_cudnn.graph.printing import to_dot

        return to_dot(self)
