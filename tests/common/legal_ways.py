# SPDX-License-Identifier: Apache-2.0
"""Checks that all rewrites of a function's parts for cuDNN keep their meaning.

Each part is rewritten as for cuDNN and computed by the reference, with the array work
around it. That is compared with the part itself, in the operands' dtype.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn.graph import ConvAttributes, Graph, Target, derivative_of, is_anchor
from jax_cudnn.legalize import Rewrite, legalize, partition
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.policy import ranked
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate


def graphs_of(
    function: Callable[..., jax.Array], operands: Sequence[jax.Array]
) -> list[tuple[Graph, list[jax.Array]]]:
    """Return forward and gradient graph of a function, with operands for each."""
    ((graph, _, _),) = traced_graphs(function, *operands)
    stored = [
        jnp.reshape(x, t.stored_shape)
        for x, t in zip(operands, graph.input_tensors, strict=True)
    ]
    derivative = derivative_of(graph)
    assert derivative is not None
    wanted = (True,) * len(stored)
    full = derivative.with_residuals(graph, wanted)
    results = evaluate(full, stored)
    backward = derivative.backward(graph, wanted, (True,))
    assert backward is not None
    sources = {
        "input": stored,
        "output": results,
        "cotangent": [0.3 * results[0] + 0.1],
    }
    given = [sources[source][index] for source, index in backward.operands]
    return [(full, stored), (backward.graph, given)]


def kernels_of(function: Callable[..., jax.Array], *operands: Any) -> dict[str, Graph]:
    """Return the kernels of a convolution and of all its gradients, by their kinds."""

    def all_of_it(cotangent: Any, *operands: Any) -> Any:
        result, pullback = jax.vjp(function, *operands)
        return result, pullback(cotangent)

    traced = traced_graphs(all_of_it, jax.eval_shape(function, *operands), *operands)
    parts = [part for graph, _, _ in traced for part in partition(graph)]
    return {node.kind: part for part in parts for node in part.nodes if is_anchor(node)}


def run_way(way: Rewrite, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Return a part's results, computed in a way for cuDNN."""
    return jax.jit(functools.partial(_computed, way))(operands)


def _computed(way: Rewrite, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    changed = way.before(operands)
    for tensor, x in zip(way.graph.input_tensors, changed, strict=True):
        assert tensor.stored_shape == x.shape, tensor
    return way.after(operands, evaluate(way.graph, changed))


def _by_all(
    part: Graph, ways: Sequence[Rewrite], operands: list[jax.Array]
) -> tuple[tuple[jax.Array, ...], list[tuple[jax.Array, ...]]]:
    """Return a part's results, and those in each way, all by one program."""

    def program(operands: list[jax.Array]) -> Any:
        return evaluate(part, operands), [_computed(way, operands) for way in ways]

    return jax.jit(program)(operands)


def check_form(graph: Graph) -> None:
    """Check what cuDNN asks of a convolution, whichever way was taken."""
    for node in graph.nodes:
        if node.kind.startswith("conv"):
            attributes = node.attributes
            assert isinstance(attributes, ConvAttributes)
            assert set(attributes.lhs_dilation) == {1}
            assert attributes.padding_low == attributes.padding_high
            assert min(attributes.padding_low) >= 0
            assert len(attributes.window_strides) in (2, 3)
            for _, name in (*node.inputs, *node.outputs):
                assert graph.tensor(name).order[-1] == 1, "channels last"


def check_ways(
    function: Callable[..., jax.Array], operands: Sequence[jax.Array]
) -> int:
    """Compare all ways for all parts, and return how many there were."""
    count = 0
    for graph, given in graphs_of(function, operands):
        values = dict(zip(graph.inputs, given, strict=True))
        for part in partition(graph):
            arguments = [values[name] for name in part.inputs]
            ways = legalize(part, None).candidates
            assert ways or not any(map(is_anchor, part.nodes))
            want, found = _by_all(part, ways, arguments)
            for way, got in zip(ways, found, strict=True):
                check_form(way.graph)
                # cuDNN gives sums without a contraction in f32.
                is_sum = not any(map(is_anchor, part.nodes))
                tolerance = 1e-5 if is_sum else 1e-9
                for x, y in zip(got, want, strict=True):
                    assert x.dtype == y.dtype
                    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
            count += len(ways)
            values |= dict(zip(part.outputs, want, strict=True))
    return count


def check_bad_numbers(
    part: Graph, target: Target | None, bad: float, stays: Callable[[Rewrite], bool]
) -> None:
    """Compare ways in which a number has to stay in its channel and windows."""
    operands = draw_arrays(part)
    for i, x in enumerate(operands):
        if part.inputs[i] == "w":
            continue  # Filters meet the zeros that are written around x.
        place = (*(size // 2 for size in x.shape[:-1]), 5)
        given = [*operands[:i], x.at[place].set(bad), *operands[i + 1 :]]
        ways = [*filter(stays, legalize(part, target).candidates)]
        want, found = _by_all(part, ways, given)
        for got in found:
            for x, y in zip(got, want, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def ways_with(
    layer: Callable[..., jax.Array], operands: Sequence[jax.Array], words: str
) -> tuple[set[str], set[str]]:
    """Return the kinds of contractions whose first way has a note with these words.

    And those whose last way has it.
    """
    found: tuple[set[str], set[str]] = (set(), set())
    for graph, _ in graphs_of(layer, operands):
        for part in partition(graph):
            kinds = [node.kind for node in part.nodes if is_anchor(node)]
            first, *rest = (way.rewrite for way in ranked(part, None))
            for kept, ways in zip(found, ([first], rest[-1:]), strict=True):
                if any(words in note for way in ways for note in way.notes):
                    kept.update(kind.removeprefix("conv_") for kind in kinds)
    return found
