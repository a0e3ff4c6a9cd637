# SPDX-License-Identifier: Apache-2.0
"""The graph primitive and its linear companion: differentiation and batching.

``graph_p`` computes a graph. Its jvp rule binds the graph with residuals and
``linear_p``, which maps tangents to tangents and is linear in them. Transposing
``linear_p`` binds the gradient graph, again under ``graph_p``: a reverse-mode gradient
is two cuDNN graphs. Every other derivative (forward mode, second order) comes from the
reference, through ``linear_p``'s own lowering and jvp rule.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, added_first, derivative_of, is_apart
from jax_cudnn.graph.kinds import Derivative
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.explicit import is_one_kernel, run_explicit
from jax_cudnn.lowering.fold import Fold, fold_graph
from jax_cudnn.lowering.members import (
    as_results,
    merged,
    result_shapes,
    unmerged,
)
from jax_cudnn.lowering.parts import run_parts
from jax_cudnn.lowering.typed import placed, spec_of, typed_division
from jax_cudnn.reference import evaluate
from jax_cudnn.reference.dtypes import jax_dtype
from jax_cudnn.reference.interpreter import Keep

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
) -> list[jax.Array]:
    """Return the graph's results; differentiable, batchable, on any platform.

    An operand may have several axes in place of one of its tensor's (members.py). The
    results then have them as well. Operands whose types contradict each other in how
    they are sharded are refused, or gathered in a graph that no user has written.
    """
    operands = _jax.align_varying(unmerged(graph, operands))

    def bind(graph: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
        if may_gather and any(map(_jax.is_explicitly_sharded, operands)):
            division = typed_division(graph, operands, may_gather=True)
            operands = placed(graph, operands, division)
        return graph_p.bind(*operands, graph=graph, options=options)

    def around(graph: Graph, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
        return run_reference(graph, operands, options)

    is_explicit = any(map(_jax.is_explicitly_sharded, operands))
    if is_explicit and not is_one_kernel(graph):
        # The types of each kernel's results follow from those of its operands.
        return run_parts(graph, operands, bind, around)
    return bind(graph, operands)


def run_reference(
    graph: Graph,
    operands: Sequence[jax.Array],
    options: Options,
    *,
    narrow_sums: bool = False,
    kept: Mapping[str, Keep] | None = None,
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
            precision=precision,
            exact_dtypes=options.exact_dtypes,
        )
        return tuple(as_results(graph, operands, results))


def reference_program(
    graph: Graph, options: Options
) -> Callable[..., Sequence[jax.Array]]:
    """Return what computes the graph's results by the reference, from arrays."""
    return lambda *operands: run_reference(graph, operands, options)


def _run_by_reference(
    graph: Graph, operands: Sequence[jax.Array], options: Options
) -> tuple[jax.Array, ...]:
    """Return the graph's results by the reference, divided as operands' types say."""

    def run(graph: Graph, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return run_reference(graph, operands, options)

    if any(map(_jax.is_explicitly_sharded, operands)):
        return tuple(run_explicit(graph, unmerged(graph, operands), run, run))
    return run(graph, operands)


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
    if any(map(_jax.is_explicitly_sharded, primals)):
        division = typed_division(graph, primals)
        specs = {name: spec_of(division, name) for name in graph.outputs}
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


# --- forward mode ---------------------------------------------------------------------


def _graph_jvp(
    primals: Sequence[jax.Array],
    tangents: Sequence[Any],
    *,
    graph: Graph,
    options: Options,
) -> tuple[list[jax.Array], list[Any]]:
    derivative = derivative_of(graph)
    wanted = tuple(not _jax.is_zero(t) for t in tangents)
    if not any(wanted):
        outputs = run_graph(graph, primals, options)
        return outputs, [_jax.zero_like(x) for x in outputs]
    full = graph if derivative is None else derivative.with_residuals(graph, wanted)
    results = run_graph(full, primals, options)
    if derivative is not None:
        # Named, so that remat policies such as save_only_these_names can keep them.
        results = [
            checkpoint_name(x, f"cudnn_{full.nodes[0].kind}_{_remat_name(name)}")
            for x, name in zip(results, full.outputs, strict=True)
        ]
    outputs = results[: len(graph.outputs)]
    if (added := added_first(graph)) is None:
        return outputs, _linear(graph, primals, results, full, tangents, options)
    # What it adds is a sum of JAX's to the tangents. The rest reads the sum alone.
    total = outputs[added.total]
    moved = _sum([tangents[i] for i in added.terms], total)
    first, second = added.terms
    primals, tangents = list(primals), list(tangents)
    primals[first], tangents[first] = total, moved
    del primals[second], tangents[second]
    tangents_out = _linear(added.rest, primals, results, full, tangents, options)
    tangents_out.insert(added.total, moved)
    return outputs, tangents_out


def _sum(tangents: Sequence[Any], like: jax.Array) -> Any:
    terms = [jnp.reshape(t, like.shape) for t in tangents if not _jax.is_zero(t)]
    return functools.reduce(jnp.add, terms) if terms else _jax.zero_like(like)


def _linear(
    graph: Graph,
    primals: Sequence[jax.Array],
    results: Sequence[jax.Array],
    full: Graph,
    tangents: Sequence[Any],
    options: Options,
) -> list[Any]:
    """Return a graph's derivative along tangents, given results that it may read.

    ``full`` is the graph that has given these.
    """
    wanted = tuple(not _jax.is_zero(t) for t in tangents)
    derivative = derivative_of(graph)
    own = graph if derivative is None else derivative.with_residuals(graph, wanted)
    names = [own.outputs[i] for i in _saved(graph, wanted)]
    return list(
        linear_p.bind(
            *primals,
            *(results[full.outputs.index(name)] for name in names),
            *(t for t in tangents if not _jax.is_zero(t)),
            graph=graph,
            wanted=wanted,
            options=options,
        )
    )


@functools.lru_cache(maxsize=4096)
def _remat_name(name: str) -> str:
    """Return a result's name for remat, the same in every dtype."""
    is_new = name[-1].isdigit() and not name.startswith("saved_")
    return f"saved_{name}" if is_new else name


def _saved(graph: Graph, wanted: tuple[bool, ...]) -> tuple[int, ...]:
    """Return which results of the graph with residuals its gradient graph reads."""
    derivative = derivative_of(graph)
    nonzero = (True,) * len(graph.outputs)
    backward = derivative and derivative.backward(graph, wanted, nonzero)
    if backward is None:
        return ()
    return tuple(sorted({i for kind, i in backward.operands if kind == "output"}))


def _split(
    args: Sequence[Any], wanted: tuple[bool, ...]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Split linear_p's arguments into primals, saved results and tangents."""
    primal_count, tangent_count = len(wanted), sum(wanted)
    end = len(args) - tangent_count
    return list(args[:primal_count]), list(args[primal_count:end]), list(args[end:])


def _reference_tangents(
    graph: Graph,
    options: Options,
    wanted: tuple[bool, ...],
    primals: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Return the derivative of the reference at `primals` along `tangents`."""
    moving = [x for x, is_wanted in zip(primals, wanted, strict=True) if is_wanted]

    def function(*moving: jax.Array) -> tuple[jax.Array, ...]:
        remaining = iter(moving)
        operands = [
            next(remaining) if is_wanted else x
            for x, is_wanted in zip(primals, wanted, strict=True)
        ]
        return _run_by_reference(graph, operands, options)

    return jax.jvp(function, tuple(moving), tuple(tangents))[1]


def _linear_by_reference(
    *args: jax.Array, graph: Graph, wanted: tuple[bool, ...], options: Options
) -> tuple[jax.Array, ...]:
    primals, _, tangents = _split(args, wanted)
    return _reference_tangents(graph, options, wanted, primals, tangents)


def _linear_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    # The saved results do not enter: they are functions of the primals, through which
    # the reference is differentiated already.
    function = functools.partial(_linear_by_reference, **params)
    return _jax.jvp_where_nonzero(function, primals, tangents)


# --- reverse mode ---------------------------------------------------------------------


def _linear_transpose(
    cotangents: Sequence[Any],
    *args: Any,
    graph: Graph,
    wanted: tuple[bool, ...],
    options: Options,
) -> list[Any]:
    primals, saved, tangents = _split(args, wanted)
    derivative = derivative_of(graph)
    if all(_jax.is_zero(ct) for ct in cotangents):
        gradients: list[Any] = [
            _jax.zero_like(x) for x, w in zip(primals, wanted, strict=True) if w
        ]
    elif derivative is None:
        gradients = _transpose_reference(graph, options, wanted, primals, cotangents)
    else:
        gradients = _run_backward(
            derivative, graph, wanted, options, primals, saved, cotangents
        )
    kept = [
        gradient if _jax.is_linear_input(tangent) else None
        for gradient, tangent in zip(gradients, tangents, strict=True)
    ]
    return [None] * (len(primals) + len(saved)) + kept


def _transpose_reference(
    graph: Graph,
    options: Options,
    wanted: tuple[bool, ...],
    primals: Sequence[jax.Array],
    cotangents: Sequence[Any],
) -> list[jax.Array]:
    function = functools.partial(_reference_tangents, graph, options, wanted, primals)
    moving = [x for x, is_wanted in zip(primals, wanted, strict=True) if is_wanted]
    transposed = jax.linear_transpose(lambda *tangents: function(tangents), *moving)
    return list(transposed(tuple(_jax.instantiate_zero(ct) for ct in cotangents)))


def _run_backward(
    derivative: Derivative,
    graph: Graph,
    wanted: tuple[bool, ...],
    options: Options,
    primals: Sequence[jax.Array],
    saved: Sequence[jax.Array],
    cotangents: Sequence[Any],
) -> list[jax.Array]:
    nonzero = tuple(not _jax.is_zero(ct) for ct in cotangents)
    backward = derivative.backward(graph, wanted, nonzero)
    zeros = {i: jnp.zeros_like(primals[i]) for i, w in enumerate(wanted) if w}
    if backward is None:
        return list(zeros.values())
    sources = {
        "input": dict(enumerate(primals)),
        "output": dict(zip(_saved(graph, wanted), saved, strict=True)),
        "cotangent": dict(enumerate(cotangents)),
    }
    operands = [
        _jax.instantiate_zero(sources[source][index])
        for source, index in backward.operands
    ]
    # What surrounds the call has a gradient of its own.
    results = run_graph(
        backward.graph, operands, replace(options, remark=""), may_gather=True
    )
    # XLA drops the zeros that are not used.
    by_input = zeros | {
        i: _jax.typed_like(jnp.reshape(x, primals[i].shape), primals[i])
        for i, x in zip(backward.gradients, results, strict=True)
    }
    return [by_input[i] for i, is_wanted in enumerate(wanted) if is_wanted]


def _graph_transpose(
    cotangents: Sequence[Any], *args: Any, graph: Graph, options: Options
) -> list[Any]:
    """Transpose a graph that is linear in some operands, by the reference."""
    linear = [i for i, x in enumerate(args) if _jax.is_linear_input(x)]

    def function(*moving: jax.Array) -> tuple[jax.Array, ...]:
        operands = list(args)
        for index, value in zip(linear, moving, strict=True):
            operands[index] = value
        return _run_by_reference(graph, operands, options)

    avals = (args[i].aval for i in linear)
    shapes = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
    transposed = jax.linear_transpose(function, *shapes)
    gradients = transposed(tuple(_jax.instantiate_zero(ct) for ct in cotangents))
    by_index = dict(zip(linear, gradients, strict=True))
    return [by_index.get(i) for i in range(len(args))]


# --- batching -------------------------------------------------------------------------


def _axis_size(args: Sequence[jax.Array], axes: Sequence[int | None]) -> int:
    return next(
        x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None
    )


def _shapes(
    args: Sequence[jax.Array], axes: Sequence[int | None]
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one example's operands."""
    return tuple(
        tuple(size for i, size in enumerate(x.shape) if i != axis)
        for x, axis in zip(args, axes, strict=True)
    )


def _graph_batch(
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    graph: Graph,
    options: Options,
) -> tuple[list[jax.Array], list[int | None]]:
    shapes = _shapes(args, axes)
    if _axis_size(args, axes) == 0:
        return _no_examples(graph, shapes)
    is_batched = tuple(axis is not None for axis in axes)
    fold = None
    if options.implementation != "cudnn" or not is_apart(graph):
        fold = fold_graph(graph, _axis_size(args, axes), is_batched, shapes)
    if fold is None:
        return _batch_without_fold(args, axes, graph, options)
    operands = [
        fold.input(i, x, axis)
        for i, (x, axis) in enumerate(zip(args, axes, strict=True))
    ]
    results = run_graph(fold.graph, operands, options)
    return _unfold(fold, results)


def _no_examples(
    graph: Graph, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[jax.Array], list[int | None]]:
    results = [
        jnp.zeros((0, *shape), jax_dtype(tensor.dtype))
        for shape, tensor in zip(
            result_shapes(graph, shapes), graph.output_tensors, strict=True
        )
    ]
    return results, [0] * len(results)


def _unfold(
    fold: Fold, results: Sequence[jax.Array]
) -> tuple[list[jax.Array], list[int | None]]:
    # A tangent has no results that are only saved, which come last.
    names = fold.original.outputs[: len(results)]
    axes = [0 if name in fold.rule.axes else None for name in names]
    return [
        x if axis is None else fold.output(i, x)
        for i, (x, axis) in enumerate(zip(results, axes, strict=True))
    ], axes


def _batch_without_fold(
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    graph: Graph,
    options: Options,
) -> tuple[list[jax.Array], list[int | None]]:
    """Run examples that no graph takes at once: one by one in cuDNN if it has to be."""
    if options.implementation != "cudnn":

        def reference(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return _run_by_reference(graph, operands, options)

        results = jax.vmap(reference, in_axes=tuple(axes))(*args)
    else:
        moved = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(args, axes, strict=True)
        ]
        is_batched = [axis is not None for axis in axes]

        def one(examples: list[jax.Array]) -> list[jax.Array]:
            remaining = iter(examples)
            operands = [
                next(remaining) if is_in else x
                for x, is_in in zip(moved, is_batched, strict=True)
            ]
            return run_graph(graph, operands, options)

        examples = [x for x, is_in in zip(moved, is_batched, strict=True) if is_in]
        results = jax.lax.map(one, examples)
    return list(results), [0] * len(results)


def _linear_batch(
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    graph: Graph,
    wanted: tuple[bool, ...],
    options: Options,
) -> tuple[list[jax.Array], list[int | None]]:
    primals, saved, tangents = _split(args, wanted)
    primal_axes, saved_axes, tangent_axes = _split(axes, wanted)
    shapes = _shapes(primals, primal_axes)
    if _axis_size(args, axes) == 0:
        return _no_examples(graph, shapes)
    moving = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    is_batched = [axis is not None for axis in primal_axes]
    for i, axis in zip(moving, tangent_axes, strict=True):
        is_batched[i] |= axis is not None
    # Results saved with an example axis need operands that have it as well.
    if any(axis is not None for axis in saved_axes) and not any(is_batched):
        is_batched[moving[0]] = True
    derivative = derivative_of(graph)
    full = graph if derivative is None else derivative.with_residuals(graph, wanted)
    fold = fold_graph(full, _axis_size(args, axes), tuple(is_batched), shapes)
    saved_tensors = [full.output_tensors[i] for i in _saved(graph, wanted)]
    if fold is None or any(
        axis is not None and tensor.name not in fold.rule.axes
        for tensor, axis in zip(saved_tensors, saved_axes, strict=True)
    ):
        function = functools.partial(
            _linear_by_reference, graph=graph, wanted=wanted, options=options
        )
        results = jax.vmap(function, in_axes=tuple(axes))(*args)
        return list(results), [0] * len(results)
    results = linear_p.bind(
        *(
            fold.input(i, x, axis)
            for i, (x, axis) in enumerate(zip(primals, primal_axes, strict=True))
        ),
        *(
            fold.fold_array(tensor, x, axis)
            for tensor, x, axis in zip(saved_tensors, saved, saved_axes, strict=True)
        ),
        *(
            fold.input(i, x, axis)
            for i, x, axis in zip(moving, tangents, tangent_axes, strict=True)
        ),
        graph=fold.part(graph),
        wanted=wanted,
        options=options,
    )
    return _unfold(fold, results)


# --- registration ---------------------------------------------------------------------

graph_p.def_impl(_eager(graph_p))
graph_p.def_abstract_eval(graph_avals)
_jax.set_lowering(
    graph_p,
    _jax.lower_function(
        lambda *operands, graph, options: _run_by_reference(graph, operands, options)
    ),
)
_jax.set_jvp(graph_p, _graph_jvp)
_jax.set_transpose(graph_p, _graph_transpose)
_jax.set_batching(graph_p, _graph_batch)

linear_p.def_impl(_eager(linear_p))
linear_p.def_abstract_eval(graph_avals)
_jax.set_jvp(linear_p, _linear_jvp)
_jax.set_transpose(linear_p, _linear_transpose)
_jax.set_batching(linear_p, _linear_batch)
_jax.set_lowering(linear_p, _jax.lower_function(_linear_by_reference))
