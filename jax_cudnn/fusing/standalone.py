# SPDX-License-Identifier: Apache-2.0
"""Finds the kernels of a function that nothing around them is fused into.

These are the norms that it has written out, and its calls of this package's own
operations, which are graphs already.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cudnn import choices
from jax_cudnn.config import Implementation, Options, PlanOptions
from jax_cudnn.fusing.norms import Norm
from jax_cudnn.fusing.program import Arrays, Operation, Value
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import (
    TracedGraph,
    graph_of,
    is_tuning,
    subprograms,
    typed_like,
)
from jax_cudnn.ops.common.arguments import Precision, options, strongly_typed
from jax_cudnn.ops.norms.rows import layer_norm, rms_norm


class Settings(NamedTuple):
    """The user's settings for all kernels."""

    implementation: Implementation | None
    plan: PlanOptions | None

    def options(self, precision: Precision = None) -> Options:
        """Return the options of a kernel."""
        return options("fuse", self.implementation, self.plan, precision)


@dataclass(frozen=True, eq=False)
class StandaloneKernel:
    """A kernel of its own: ``work`` is a norm, or a call of an operation of ours."""

    work: Operation | Norm
    settings: Settings

    @property
    def works(self) -> tuple[Operation, ...]:
        """The operations that it was found as."""
        return self.work.parts if isinstance(self.work, Norm) else (self.work,)

    @property
    def reads(self) -> tuple[Value, ...]:
        """The arrays that it reads."""
        return tuple(dict.fromkeys(self.work.reads))

    @property
    def made(self) -> Mapping[Value, None]:
        """The values that it makes, also those that nobody else reads."""
        return dict.fromkeys(x for each in self.works for x in each.outputs)

    @property
    def traced(self) -> TracedGraph:
        """The graph that it runs, with its options."""
        if isinstance(self.work, Operation):
            found = graph_of(self.work.equation)
            assert found is not None, "only calls of graphs are whole kernels"
            return found
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.reads]
        (found,) = subprograms(jax.make_jaxpr(self._norm)(*like).jaxpr)
        return found

    @property
    def graph(self) -> Graph:
        """The graph that it is."""
        return self.traced.graph

    @property
    def options(self) -> Options:
        """The options of its call."""
        return self.traced.options

    def run(self, arrays: Arrays) -> None:
        """Run it, and add its results to the arrays."""
        if isinstance(self.work, Operation):
            self.work.run(arrays)
            return
        (output,) = self.work.outputs
        result = self._norm(*(arrays[x] for x in self.reads))
        arrays[output] = typed_like(result, output.aval)

    def _norm(self, *arrays: jax.Array) -> jax.Array:
        norm = self.work
        assert isinstance(norm, Norm), "calls are run as they are"
        known = dict(zip(self.reads, map(strongly_typed, arrays), strict=True))
        sizes = tuple(norm.x.shape[axis] for axis in norm.axes)
        scale, bias = (
            None if x is None else jnp.reshape(known[x], sizes)
            for x in (norm.scale, norm.bias)
        )
        run = layer_norm if norm.kind == "layer_norm" else rms_norm
        return run(
            known[norm.x],
            scale,
            bias,
            axis=norm.axes,
            epsilon=norm.epsilon,
            preferred_element_type=norm.outputs[0].dtype,
            implementation=self.settings.implementation,
            plan=self.settings.plan,
        )


def standalone_kernel(work: object, settings: Settings) -> StandaloneKernel | None:
    """Return the kernel that an operation is without others, if it is one."""
    if isinstance(work, Operation) and graph_of(work.equation) is None:
        return None
    return (
        StandaloneKernel(work, settings) if isinstance(work, Operation | Norm) else None
    )


def why_left(norm: Norm, settings: Settings) -> str:
    """Return why the operations of a norm are XLA's, where the program is for any GPU.

    They are a graph, and the reason "", where cuDNN was asked for, while plans are
    measured, and where a norm of as many features was measured to be faster: the rows
    of a device, and the examples of a vmap, are not known here. Whether cuDNN runs the
    graph is decided where it is compiled.
    """
    implementation = settings.options().implementation
    if implementation == "xla":
        return _XLA
    features = math.prod(norm.x.shape[axis] for axis in norm.axes)
    table = choices.table()
    is_graph = (
        implementation == "cudnn"
        or is_tuning()
        or (norm.kind, features) in _measured_faster(table, table.version)
    )
    return "" if is_graph else _UNMEASURED


_UNMEASURED = "a norm, which is XLA's until cuDNN was measured to be faster"
_XLA = 'a norm, and implementation="xla" was asked for'


@functools.lru_cache(maxsize=4)
def _measured_faster(
    table: choices.ChoiceTable, version: int
) -> frozenset[tuple[str, int]]:
    """Return the norms that XLA was measured to run slower, by kind and features."""
    del version  # What was added since may say otherwise.
    found: set[tuple[str, int]] = set()
    for choice in table.all().values():
        rows = _ROWS.match(choice.operands)
        if rows is not None and choice.implementation != "xla":
            found.add((choice.op.removesuffix("_backward"), int(rows[1])))
    return frozenset(found)


# The first operand of a norm, or of its gradient: so many rows of features.
_ROWS = re.compile(r"\w+\[\d+,(\d+)\]")
