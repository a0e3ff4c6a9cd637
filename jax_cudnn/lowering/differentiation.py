# SPDX-License-Identifier: Apache-2.0
"""Defines the derivatives of a graph; importing this registers the rules.

The jvp rule of ``graph_p`` binds the graph with residuals and ``linear_p``, which maps
tangents to tangents and is linear in them. Transposing ``linear_p`` binds the gradient
graph, again under ``graph_p``: a reverse-mode gradient is two cuDNN graphs. Every other
derivative (forward mode, second order) comes from the reference, through ``linear_p``'s
own lowering and jvp rule.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, added_first, derivative_of
from jax_cudnn.graph.kinds import Derivative
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.linear import jvp_where_nonzero, with_values
from jax_cudnn.lowering.primitives import graph_p, linear_p, run_by_reference, run_graph
from jax_cudnn.lowering.sharding.array_types import struct_of, typed_like

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
    if not terms:
        return _jax.zero_like(like)
    return typed_like(functools.reduce(jnp.add, terms), like)


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
    names = [own.outputs[i] for i in saved_of(graph, wanted)]
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


def saved_of(graph: Graph, wanted: tuple[bool, ...]) -> tuple[int, ...]:
    """Return which results of the graph with residuals its gradient graph reads."""
    derivative = derivative_of(graph)
    nonzero = (True,) * len(graph.outputs)
    backward = derivative and derivative.backward(graph, wanted, nonzero)
    if backward is None:
        return ()
    return tuple(sorted({i for kind, i in backward.operands if kind == "output"}))


def split_operands(
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
    places = [i for i, is_wanted in enumerate(wanted) if is_wanted]

    def function(*moving: jax.Array) -> tuple[jax.Array, ...]:
        operands = with_values(primals, places, moving)
        return run_by_reference(graph, operands, options)

    moving = tuple(primals[i] for i in places)
    return jax.jvp(function, moving, tuple(tangents))[1]


def linear_by_reference(
    *args: jax.Array, graph: Graph, wanted: tuple[bool, ...], options: Options
) -> tuple[jax.Array, ...]:
    """Return the tangents that ``linear_p`` does, by the reference's derivative."""
    primals, _, tangents = split_operands(args, wanted)
    return _reference_tangents(graph, options, wanted, primals, tangents)


def _linear_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    # The saved results do not enter: they are functions of the primals, through which
    # the reference is differentiated already.
    function = functools.partial(linear_by_reference, **params)
    return jvp_where_nonzero(function, primals, tangents)


# --- reverse mode ---------------------------------------------------------------------


def _linear_transpose(
    cotangents: Sequence[Any],
    *args: Any,
    graph: Graph,
    wanted: tuple[bool, ...],
    options: Options,
) -> list[Any]:
    primals, saved, tangents = split_operands(args, wanted)
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
        "output": dict(zip(saved_of(graph, wanted), saved, strict=True)),
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
        i: typed_like(jnp.reshape(x, primals[i].shape), primals[i])
        for i, x in zip(backward.gradients, results, strict=True)
    }
    return [by_input[i] for i, is_wanted in enumerate(wanted) if is_wanted]


def _graph_transpose(
    cotangents: Sequence[Any], *args: Any, graph: Graph, options: Options
) -> list[Any]:
    """Transpose a graph that is linear in some operands, by the reference."""
    linear = [i for i, x in enumerate(args) if _jax.is_linear_input(x)]

    def function(*moving: jax.Array) -> tuple[jax.Array, ...]:
        operands = with_values(args, linear, moving)
        return run_by_reference(graph, operands, options)

    shapes = (struct_of(args[i].aval) for i in linear)
    transposed = jax.linear_transpose(function, *shapes)
    gradients = transposed(tuple(_jax.instantiate_zero(ct) for ct in cotangents))
    by_index = dict(zip(linear, gradients, strict=True))
    return [by_index.get(i) for i in range(len(args))]


_jax.set_jvp(graph_p, _graph_jvp)
_jax.set_transpose(graph_p, _graph_transpose)
_jax.set_jvp(linear_p, _linear_jvp)
_jax.set_transpose(linear_p, _linear_transpose)
_jax.set_lowering(linear_p, _jax.lower_function(linear_by_reference))
