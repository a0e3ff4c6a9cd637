# SPDX-License-Identifier: Apache-2.0
"""Defines vmap of the primitives; importing this registers the rules."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_cudnn.config import Options
from jax_cudnn.graph import Graph, derivative_of, fold_rule, is_anchor, is_apart
from jax_cudnn.legalize import partition
from jax_cudnn.lowering import _jax
from jax_cudnn.lowering.differentiation import (
    linear_by_reference,
    saved_of,
    split_operands,
)
from jax_cudnn.lowering.fold import Fold, fold_graph
from jax_cudnn.lowering.linear import with_values
from jax_cudnn.lowering.primitives import (
    graph_p,
    linear_p,
    run_by_reference,
    run_graph,
    run_reference,
)
from jax_cudnn.lowering.sharding.array_types import is_explicitly_sharded
from jax_cudnn.lowering.sharding.explicit import is_one_kernel
from jax_cudnn.lowering.sharding.parts import run_parts
from jax_cudnn.lowering.sharding.subaxes import result_shapes
from jax_cudnn.reference.dtypes import jax_dtype


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
    if _folds_better_in_parts(graph, is_batched):
        return _batch_of_parts(args, axes, graph, options)
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


@functools.lru_cache(maxsize=4096)
def _folds_better_in_parts(graph: Graph, is_batched: tuple[bool, ...]) -> bool:
    """Whether a kernel folds by itself into another letter than the whole graph does.

    An example: of a convolution with shared filters, the gradient by the filters needs
    a group for each example, and the gradient by the images takes them as more images.
    """
    kernels = [part for part in partition(graph) if any(map(is_anchor, part.nodes))]
    if len(kernels) < 2:
        return False
    names = zip(graph.inputs, is_batched, strict=True)
    batched = {name for name, is_in in names if is_in}
    whole = fold_rule(graph, frozenset(batched))
    for part in partition(graph):
        own = batched.intersection(part.inputs)
        if not own:
            continue
        rule = fold_rule(part, frozenset(own))
        is_kernel = part in kernels
        if is_kernel and rule and (not whole or rule.letter != whole.letter):
            return True
        batched.update(part.outputs)
    return False


def _batch_of_parts(
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    graph: Graph,
    options: Options,
) -> tuple[list[jax.Array], list[int | None]]:
    """Run a graph of several kernels, each of which folds its examples by itself."""
    kernel = functools.partial(run_graph, options=options)
    around = functools.partial(run_reference, options=options)

    def each(*operands: jax.Array) -> list[jax.Array]:
        return run_parts(graph, operands, kernel, around)

    results = jax.vmap(each, in_axes=tuple(axes))(*args)
    return results, [0] * len(results)


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
            return run_by_reference(graph, operands, options)

        results = jax.vmap(reference, in_axes=tuple(axes))(*args)
    else:
        moved = [
            x if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(args, axes, strict=True)
        ]
        batched = [i for i, axis in enumerate(axes) if axis is not None]

        def one(examples: list[jax.Array]) -> list[jax.Array]:
            return run_graph(graph, with_values(moved, batched, examples), options)

        results = jax.lax.map(one, [moved[i] for i in batched])
    return list(results), [0] * len(results)


def _linear_batch(
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    graph: Graph,
    wanted: tuple[bool, ...],
    options: Options,
) -> tuple[list[jax.Array], list[int | None]]:
    primals, saved, tangents = split_operands(args, wanted)
    primal_axes, saved_axes, tangent_axes = split_operands(axes, wanted)
    shapes = _shapes(primals, primal_axes)
    if _axis_size(args, axes) == 0:
        return _no_examples(graph, shapes)
    # A matmul x @ w, differentiated by w: `moving` is [1]. If the tangent of w has
    # examples and w has none, w is treated as if it had them: the folded graph has one
    # tensor for both.
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
    saved_tensors = [full.output_tensors[i] for i in saved_of(graph, wanted)]
    # Only graphs of one kernel say how their results are sharded.
    is_typed = any(map(is_explicitly_sharded, args))
    has_no_type = fold is not None and is_typed and not is_one_kernel(fold.graph)
    if (
        fold is None
        or has_no_type
        or any(
            axis is not None and tensor.name not in fold.rule.axes
            for tensor, axis in zip(saved_tensors, saved_axes, strict=True)
        )
    ):
        function = functools.partial(
            linear_by_reference, graph=graph, wanted=wanted, options=options
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


_jax.set_batching(graph_p, _graph_batch)
_jax.set_batching(linear_p, _linear_batch)
