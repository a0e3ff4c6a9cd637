# SPDX-License-Identifier: Apache-2.0
"""Defines the graph primitive and its linear companion: results and their types.

``graph_p`` computes a graph, and ``linear_p`` its tangents. differentiation.py has
their derivatives, batching.py their examples.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jax_cudnn.config import Options
from jax_cudnn.errors import UnsupportedError
from jax_cudnn.graph import Graph
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.sharding.array_types import (
    gathered,
    is_explicitly_sharded,
    partial_axes,
    typed_as,
)
from jax_cudnn.lowering.sharding.explicit import is_one_kernel, run_explicit
from jax_cudnn.lowering.sharding.parts import is_divided_by_xla, run_parts
from jax_cudnn.lowering.sharding.subaxes import (
    as_results,
    merged,
    result_shapes,
    unmerged,
)
from jax_cudnn.lowering.sharding.typed import (
    Types,
    gathered_to_merge,
    operation_in,
    types_of,
    would_gather,
)
from jax_cudnn.lowering.undivided import undivided
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import AtConv, Keep

graph_p = _jax.Primitive("cudnn_graph")
linear_p = _jax.Primitive("cudnn_graph_jvp")
graph_p.multiple_results = True
linear_p.multiple_results = True


def run_graph(
    graph: Graph,
    operands: Sequence[jax.Array],
    options: Options,
    *,
    may_gather: bool = False,
    movable: Collection[str] = (),
    wanted: Sequence[Any] | None = None,
) -> list[jax.Array]:
    """Return the graph's results; differentiable, batchable, on any platform.

    An operand may have several axes in place of one of its tensor's (subaxes.py). The
    results then have them as well. Operands whose types contradict each other in how
    they are sharded are refused, or gathered in a graph that no user has written.
    What decides between them, if it is given, is how the result is `wanted`: the
    entries of its sharding, for its axes that are not of size 1. The ``movable`` inputs
    are sent to where the others need them: a few numbers each.
    """
    for name, x in zip(graph.inputs, operands, strict=True):
        if axes := ", ".join(sorted(partial_axes(x))):
            raise UnsupportedError(
                f"{operation_in(graph)}: {name} is {jax.typeof(x)}, reduced or "
                f"unreduced along {axes} of the mesh. Only the two factors of matmul "
                "and dot_general may be reduced, and none unreduced. Pass "
                "jax.sharding.reshard(x, PartitionSpec(...)), which is neither."
            )
    if graph.has_empty_tensor:
        # Each device computes nothing, or zeros.
        operands = [gathered(x) for x in operands]
    operands = _jax.align_varying(unmerged(graph, operands))
    around = functools.partial(run_reference, options=options)

    def typed(
        graph: Graph,
        operands: Sequence[jax.Array],
        types: Types,
        names: Collection[str],
    ) -> list[jax.Array]:
        """Return operands, those of some names sharded as their kernel needs them."""
        pairs = zip(graph.inputs, operands, strict=True)
        return [
            typed_as(x, types.spec(name), like=operands) if name in names else x
            for name, x in pairs
        ]

    def bind(graph: Graph, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if movable and any(map(is_explicitly_sharded, operands)):
            types = types_of(graph, operands, may_gather=True)
            operands = typed(graph, operands, types, movable)
        may_be_xlas = options.implementation != "cudnn" and is_divided_by_xla(graph)
        if may_be_xlas and would_gather(graph, operands):
            # As XLA's partitioner does, where types say nothing of devices.
            return around(graph, gathered_to_merge(graph, operands))
        may_reshard = may_gather or wanted is not None
        if may_reshard and any(map(is_explicitly_sharded, operands)):
            types = types_of(graph, operands, may_gather=may_gather, wanted=wanted)
            if may_gather or types.is_settled:
                operands = typed(graph, operands, types, graph.inputs)
        return graph_p.bind(*operands, graph=graph, options=options)

    is_explicit = any(map(is_explicitly_sharded, operands))
    if is_explicit and not is_one_kernel(graph):
        # The types of each kernel's results follow from those of its operands.
        return run_parts(graph, operands, bind, around)
    return [*bind(graph, operands)]


def run_reference(
    graph: Graph,
    operands: Sequence[jax.Array],
    options: Options,
    *,
    narrow_sums: bool = False,
    kept: Mapping[str, Keep] | None = None,
    at_conv: AtConv | None = None,
) -> tuple[jax.Array, ...]:
    """Return the graph's results by the reference, in the precision asked for."""
    precision: Any = options.matmul_precision
    # The context takes names only, and is for the products of attention.
    name = precision if isinstance(precision, str) else None
    # Without it, f64 would be f32 here where it is not in force for all of the program.
    is_double = any(tensor.dtype == "f64" for tensor in graph.tensors)
    with (
        jax.default_matmul_precision(name),
        jax.enable_x64(True) if is_double else contextlib.nullcontext(),
    ):
        results = evaluate(
            graph,
            merged(graph, operands),
            narrow_sums=narrow_sums,
            kept=kept,
            at_conv=at_conv,
            precision=precision,
            exact_dtypes=options.exact_dtypes,
        )
        return tuple(as_results(graph, operands, results))


def reference_program(
    graph: Graph, options: Options
) -> Callable[..., Sequence[jax.Array]]:
    """Return what computes the graph's results by the reference, from arrays."""
    return lambda *operands: run_reference(graph, operands, options)


def run_by_reference(
    graph: Graph, operands: Sequence[jax.Array], options: Options
) -> tuple[jax.Array, ...]:
    """Return the graph's results by the reference, divided as operands' types say."""
    run = functools.partial(run_reference, options=options)

    def kernel(graph: Graph, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        # So that its derivative reads operands only. JAX's `shard_map` within another
        # one that is manual along some axes does not hand over other residuals.
        function = functools.partial(run, graph)
        return jax.checkpoint(function, prevent_cse=False)(operands)

    if any(map(is_explicitly_sharded, operands)):
        results = run_explicit(graph, unmerged(graph, operands), kernel, run, options)
    else:
        results = run(graph, operands, at_conv=undivided)
    # Results that are empty, or sums of nothing, read no operand.
    return tuple(_jax.align_varying([*results, *operands])[: len(results)])


# --- evaluation and types -------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Any, **params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **params))


def _eager(primitive: Any) -> Callable[..., Any]:
    def run(*operands: Any, **params: Any) -> Any:
        # Within `jax.disable_jit` a primitive is compiled all the same, by itself, as
        # JAX's own are. The jitted function would call this one again.
        with jax.disable_jit(disable=False):
            return _jitted(primitive, **params)(*operands)

    return run


def graph_avals(*operands: Any, graph: Graph, **_: Any) -> list[Any]:
    """Return the types of the results, given operands that the graph's come first."""
    primals = operands[: len(graph.inputs)]
    for tensor, aval in zip(graph.input_tensors, primals, strict=True):
        expected = (math.prod(tensor.dims), jax_dtype(tensor.dtype))
        assert (aval.size, aval.dtype) == expected, (tensor, aval)
    specs: dict[str, Any] = {}
    if any(map(is_explicitly_sharded, primals)):
        types = types_of(graph, primals)
        specs = {name: types.spec(name) for name in graph.outputs}
    return [
        _jax.output_aval(
            shape, jax_dtype(tensor.dtype), operands, specs.get(tensor.name)
        )
        for shape, tensor in zip(
            result_shapes(graph, [x.shape for x in primals]),
            graph.output_tensors,
            strict=True,
        )
    ]


graph_p.def_impl(_eager(graph_p))
graph_p.def_abstract_eval(graph_avals)
_jax.set_lowering(
    graph_p,
    _jax.lower_function(
        lambda *operands, graph, options: run_by_reference(graph, operands, options)
    ),
)
linear_p.def_impl(_eager(linear_p))
linear_p.def_abstract_eval(graph_avals)
