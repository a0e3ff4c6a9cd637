# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of conv and matmul: closeness, graphs in jaxprs, a loop."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import Graph
from jax_cudnn.lowering import subprograms

Function = Callable[..., Any]


def assert_close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    """Compare trees of arrays, shapes and dtypes included."""

    def compare(got: Any, want: Any) -> None:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, got, want)


def graphs(function: Function, *args: Any) -> list[tuple[Graph, bool]]:
    """Return the graphs in a function's jaxpr, with whether they are forward mode's."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [(graph, is_linear) for graph, _, is_linear in subprograms(jaxpr)]


def nodes(graph: Graph) -> Counter[str]:
    """Count the nodes of a graph: their kinds, or modes for pointwise ones."""
    return Counter(getattr(node.attributes, "mode", node.kind) for node in graph.nodes)


def contractions(graph: Graph) -> list[str]:
    """Return the kinds of a graph's nodes that are contractions, sorted."""
    return sorted(
        node.kind for node in graph.nodes if node.kind.startswith(("conv", "matmul"))
    )


def subsets(count: int) -> list[tuple[int, ...]]:
    """Return the subsets of `count` positions that are not empty."""
    every = itertools.product((False, True), repeat=count)
    return [tuple(itertools.compress(range(count), mask)) for mask in every][1:]


def loss(function: Function, *args: Any) -> jax.Array:
    """Return a number that depends on every element of the result differently."""
    result = function(*args)
    weights = jnp.cos(jnp.arange(result.size, dtype=result.dtype))
    return jnp.sum(jnp.sin(result) * weights.reshape(result.shape))


def gradients(function: Function, argnums: Sequence[int]) -> Function:
    """Return the function that gives the loss and its gradients."""
    return jax.value_and_grad(functools.partial(loss, function), argnums=argnums)


def assert_same(ours: Function, plain: Function, operands: Sequence[Any]) -> None:
    """Compare results and all gradients of two functions, computed by one program."""
    argnums = range(len(operands))

    @jax.jit
    def both(*operands: jax.Array) -> Any:
        return [(f(*operands), gradients(f, argnums)(*operands)) for f in (ours, plain)]

    assert_close(*both(*operands))


def stacked(function: Function, args: Sequence[Any], axes: Iterable[int | None]) -> Any:
    """Return the results of a function for one example after the other, stacked."""
    axes = tuple(axes)
    count = next(
        x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None
    )
    run = jax.jit(function)
    results = [
        run(
            *(
                x if axis is None else jnp.take(x, i, axis=axis)
                for x, axis in zip(args, axes, strict=True)
            )
        )
        for i in range(count)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)
