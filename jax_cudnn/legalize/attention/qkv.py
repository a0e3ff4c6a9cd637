# SPDX-License-Identifier: Apache-2.0
"""Legalises attention whose queries, keys and values are one array.

It is legalised as attention over three operands. Where all three would enter the kernel
as they are, it gets the one array instead: the C++ builder tells cuDNN where in it each
begins (ffi/nodes/qkv_parts.cc). Otherwise, and where cuDNN has no plan for it, they
are copied out of the array.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.graph import Graph, Node, Target, Tensor
from jax_cudnn.graph.attention.qkv import PARTS, Part, part_tensor, parts_of, with_parts
from jax_cudnn.graph.kinds import roles_in, row_of
from jax_cudnn.legalize.common.legalization import (
    After,
    Arrays,
    Before,
    FastPath,
    Legalization,
    Rewrite,
    Rule,
    around,
)
from jax_cudnn.reference.dtypes import jax_dtype

_ROLES = ("query", "key", "value")
_GRADIENTS = tuple(f"grad_{role}" for role in _ROLES)
_NOTE = "query, key and value are copied out of qkv: "
_PADDED = "the kernel takes them in another form (padded, scaled or packed)"
_NO_PLAN = "cuDNN has no plan that reads them there"


def by_parts(graph: Graph, target: Target | None, rule: Rule) -> Legalization:
    """Legalise a graph by a rule for three operands, if it has one array of them."""
    if "qkv" not in dict(graph.nodes[0].inputs):
        return rule(graph, target)
    divided = _Divided(graph)
    found = rule(divided.graph, target)
    candidates: list[Rewrite] = []
    for rewrite in found.candidates:
        in_place = divided.in_place(rewrite)
        why = _PADDED
        if in_place is not None:
            candidates.append(in_place)
            why = _NO_PLAN
        candidates.append(divided.copied(rewrite, _NOTE + why))
    return replace(found, candidates=tuple(candidates))


class _Divided:
    """A graph with qkv, and the same with its parts as operands."""

    def __init__(self, original: Graph) -> None:
        (node,) = original.nodes
        self.graph = with_parts(original)
        self._roles = roles_in(original, node)
        role_of = {name: role for role, name in (*node.inputs, *node.outputs)}
        self._inputs = tuple(role_of[name] for name in original.inputs)
        self._outputs = tuple(role_of[name] for name in original.outputs)
        self._node = node
        output = self._roles["output"]
        self._parts = parts_of(self._roles["qkv"].dims, output.dims[1])

    # --- arrays -----------------------------------------------------------------------

    def _operands(
        self, operands: Sequence[jax.Array], unread: Collection[str] = ()
    ) -> list[Any]:
        """Return the operands of the divided graph; what nobody reads is not made."""
        found: list[Any] = []
        for role, x in zip(self._inputs, operands, strict=True):
            found += [x] if role != "qkv" else self._divide(role, x, unread)
        return found

    def _divide(self, role: str, x: jax.Array, unread: Collection[str]) -> list[Any]:
        prefix = role.removesuffix("qkv")
        return [
            object() if prefix + name in unread else _part(self._roles[role], part, x)
            for name, part in self._parts.items()
        ]

    def _results(self, results: Mapping[str, Any]) -> Arrays:
        """Return the original graph's results, given those of the divided graph."""
        found = dict(results)
        if "grad_qkv" in self._outputs and "grad_qkv" not in found:
            found["grad_qkv"] = self._joined([found[name] for name in _GRADIENTS])
        return tuple(found[role] for role in self._outputs)

    def _joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        qkv = self._roles["grad_qkv"]
        shaped = [
            jnp.expand_dims(x, qkv.order.index(part.dropped))
            for x, part in zip(parts, self._parts.values(), strict=True)
        ]
        return jnp.concatenate(shaped, axis=qkv.order.index(PARTS))

    # --- candidates -------------------------------------------------------------------

    def copied(self, rewrite: Rewrite, note: str) -> Rewrite:
        """Return the rewriting of the divided graph for the original one."""

        def results(_: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
            return self._results(dict(zip(self.graph.outputs, made, strict=True)))

        return around(rewrite, self._operands, results, notes=(note,))

    def in_place(self, rewrite: Rewrite) -> Rewrite | None:
        """Return the rewriting with qkv for the kernel; None where it cannot be."""
        graph = self._undivided(rewrite.graph)
        if graph is None:
            return None
        given = _structs(self.graph.input_tensors)
        traced = _TracedFunction(rewrite.before, given)
        for role in _ROLES:
            places = self.graph.inputs.index(role), rewrite.graph.inputs.index(role)
            if not traced.passes(*places):
                return None
        unread = traced.unread(self.graph.inputs)
        others = [name for name in rewrite.graph.inputs if name not in _ROLES]

        def before_of(before: Before) -> Before:
            def own(operands: Sequence[jax.Array]) -> Arrays:
                made = before(self._operands(operands, unread))
                values = dict(zip(rewrite.graph.inputs, made, strict=True))
                qkv = operands[self._inputs.index("qkv")]
                return (qkv, *(values[name] for name in others))

            return own

        def after_of(after: After) -> After:
            return self._after_in_place(after, rewrite.graph, graph)

        return replace(
            rewrite,
            graph=graph,
            before=before_of(rewrite.before),
            after=after_of(rewrite.after),
            fast_path=self._fast_path(rewrite, before_of, after_of),
        )

    def _after_in_place(self, after: After, divided: Graph, graph: Graph) -> After:
        """Return what follows a kernel that has qkv, and writes its gradient."""
        count = len(self.graph.inputs)
        structs = [
            *_structs(self.graph.input_tensors),
            *_structs(divided.output_tensors),
        ]
        traced = _TracedFunction(
            lambda each: after(each[:count], each[count:]), structs
        )
        unread = traced.unread((*self.graph.inputs, *divided.outputs))
        # Whether the gradient of qkv is a result as the kernel writes it.
        is_whole = "grad_qkv" in graph.outputs and all(
            traced.passes(
                count + divided.outputs.index(name), self.graph.outputs.index(name)
            )
            for name in _GRADIENTS
        )
        if not is_whole:
            unread = unread.difference(_GRADIENTS)

        def own(operands: Sequence[jax.Array], made: Sequence[jax.Array]) -> Arrays:
            values: dict[str, Any] = dict(zip(graph.outputs, made, strict=True))
            if (whole := values.get("grad_qkv")) is not None:
                parts = self._divide("grad_qkv", whole, unread)
                values |= dict(zip(_GRADIENTS, parts, strict=True))
            results = after(
                self._operands(operands, unread),
                [values[name] for name in divided.outputs],
            )
            found: dict[str, Any] = dict(zip(self.graph.outputs, results, strict=True))
            return self._results(found | {"grad_qkv": whole} if is_whole else found)

        return own

    def _fast_path(
        self,
        rewrite: Rewrite,
        before_of: Callable[[Before], Before],
        after_of: Callable[[After], After],
    ) -> FastPath | None:
        if (fast_path := rewrite.fast_path) is None:
            return None
        traced = _TracedFunction(
            lambda given: (fast_path.applies(given),),
            _structs(self.graph.input_tensors),
        )
        unread = traced.unread(self.graph.inputs)
        return FastPath(
            applies=lambda operands: fast_path.applies(
                self._operands(operands, unread)
            ),
            before=before_of(fast_path.before),
            after=after_of(fast_path.after),
        )

    def _undivided(self, rewrite: Graph) -> Graph | None:
        """Return a rewritten graph with qkv again, if its parts are as they were."""
        (node,) = rewrite.nodes
        tensors = {tensor.name: tensor for tensor in rewrite.tensors}
        for name in (*_ROLES, *_GRADIENTS):
            if name in tensors and tensors.pop(name) != self.graph.tensor(name):
                return None
        if not row_of(self._node).roles.keys() >= tensors.keys():
            return None  # Offsets of packed sequences, for one.
        inputs = ["qkv", *(name for name in rewrite.inputs if name not in _ROLES)]
        outputs = [name for name in rewrite.outputs if name not in _GRADIENTS]
        if "grad_qkv" in self._roles:
            outputs.insert(0, "grad_qkv")
        for name in {"qkv", "grad_qkv"}.intersection((*inputs, *outputs)):
            tensors[name] = replace(self._roles[name], name=name)
        own = Node.make(
            node.kind,
            {name: name for name in inputs},
            {name: name for name in outputs},
            node.attributes,
        )
        return Graph(
            tensors=tuple(tensors.values()),
            nodes=(own,),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )


class _TracedFunction:
    """A traced function, to see what it does with its operands."""

    def __init__(
        self,
        function: Callable[[Sequence[jax.Array]], Arrays],
        operands: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        traced = jax.make_jaxpr(lambda *given: function(given))(*operands).jaxpr
        self._inputs, self._outputs = traced.invars, traced.outvars
        self._read = {id(x) for each in traced.eqns for x in each.invars}

    def passes(self, operand: int, result: int) -> bool:
        """Whether a result is an operand as it was given."""
        return self._outputs[result] is self._inputs[operand]

    def unread(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names of the operands that nothing is computed from."""
        pairs = zip(names, self._inputs, strict=True)
        return frozenset(name for name, x in pairs if id(x) not in self._read)


def _structs(tensors: Sequence[Tensor]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(t.stored_shape, jax_dtype(t.dtype)) for t in tensors]


def _part(qkv: Tensor, part: Part, x: jax.Array) -> jax.Array:
    """Return a part of a stored qkv as an array of its own."""
    place = qkv.order.index(PARTS)
    cut = jax.lax.slice_in_dim(x, part.first, part.first + part.size, axis=place)
    return jnp.reshape(cut, part_tensor(qkv, "part", part).stored_shape)
