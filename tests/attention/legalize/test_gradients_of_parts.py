# SPDX-License-Identifier: Apache-2.0
"""Tests that gradients of a part of the keys add up to those of all."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.graph import Graph
from jax_cudnn.legalize import legalize
from tests.attention.shared.legal import HOPPER, run_legal
from tests.attention.shared.oracle import attention_graph, backward_graph
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SIZES = {"b": 2, "s": 5, "t": 7, "h": 6, "k": 3, "d": 5, "e": 3}


def _part_of(
    backward: Graph, operands: list[jax.Array], columns: slice
) -> tuple[Graph, list[jax.Array]]:
    """Return the partial gradient graph of some keys, with its operands."""
    axis_of_keys = {"key": 2, "value": 2, "bias": 3, "mask": 3}
    tensors, arrays = {}, dict(zip(backward.inputs, operands, strict=True))
    for tensor in backward.tensors:
        axis = axis_of_keys.get(tensor.name.removeprefix("grad_"))
        if axis is not None and tensor.dims[axis] != 1:
            dims = list(tensor.dims)
            dims[axis] = len(range(*columns.indices(dims[axis])))
            if tensor.name in arrays:
                index = [slice(None)] * 4
                index[tensor.order.index(axis)] = columns
                arrays[tensor.name] = arrays[tensor.name][tuple(index)]
            tensor = dataclasses.replace(tensor, dims=tuple(dims))
        tensors[tensor.name] = tensor
    (node,) = backward.nodes
    attributes: Any = node.attributes
    node = dataclasses.replace(
        node, attributes=dataclasses.replace(attributes, is_partial=True)
    )
    if "key_lengths" in arrays:
        arrays["key_lengths"] = arrays["key_lengths"] - columns.start
    part = dataclasses.replace(backward, tensors=tuple(tensors.values()), nodes=(node,))
    return part, [arrays[name] for name in backward.inputs]


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("with_grad_stats", [False, True])
@pytest.mark.parametrize("lengths", [(), ("query_lengths", "key_lengths")])
@pytest.mark.parametrize("mask", [None, "b1st"])
@pytest.mark.parametrize("bias", [None, "bhst", "1h1t", "b1s1"])
def test_gradients_of_parts_of_the_keys_add_up(
    bias: str | None, mask: str | None, lengths: tuple[str, ...], with_grad_stats: bool
) -> None:
    graph = attention_graph(
        sizes=_SIZES,
        bias=bias,
        mask=mask,
        lengths=lengths,
        with_stats=True,
        order=(0, 1, 2, 3),
    )
    given = draw_arrays(graph)
    backward = backward_graph(graph, with_grad_stats=with_grad_stats)
    rng = np.random.default_rng(5)
    known = {
        **dict(zip(graph.inputs, given, strict=True)),
        **dict(zip(graph.outputs, evaluate(graph, given), strict=True)),
    }
    operands = [
        known[tensor.name]
        if tensor.name in known
        else jnp.asarray(
            np.asarray(rng.standard_normal(tensor.stored_shape), jnp.float32)
        )
        for tensor in backward.input_tensors
    ]
    whole = dict(zip(backward.outputs, evaluate(backward, operands), strict=True))
    # Each way to a part's gradient in turn; the reference of the part is the last one.
    columns = (slice(0, 1), slice(1, 3), slice(3, 7))
    parts = [_part_of(backward, operands, x) for x in columns]
    ways = len(legalize(parts[2][0], HOPPER).candidates)
    assert ways == (1 if bias in (None, "b1s1") else 2)
    for way in range(ways + 1):
        found: dict[str, list[Any]] = {name: [] for name in backward.outputs}
        for part, arrays in parts:
            if way == ways:
                results = evaluate(part, arrays)
            else:
                candidates = legalize(part, HOPPER).candidates
                rewrite = candidates[min(way, len(candidates) - 1)]
                assert not rewrite.graph.nodes[0].attributes.is_partial  # type: ignore[attr-defined]
                arrays = _within_lengths(part, arrays)
                results = run_legal(rewrite, arrays)
            for name, x in zip(part.outputs, results, strict=True):
                found[name].append(x)
        for name, want in whole.items():
            axis = {"grad_key": 2, "grad_value": 2, "grad_bias": 3}.get(name)
            is_along_keys = axis is not None and want.shape[axis] != 1
            got = (
                jnp.concatenate(found[name], axis)
                if is_along_keys
                else sum(found[name])
            )
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4, err_msg=name)


def _within_lengths(part: Graph, arrays: list[jax.Array]) -> list[jax.Array]:
    """Return operands whose lengths are within the axes, as `sdpa` has them."""
    return [
        jnp.clip(x, 0) if tensor.dtype == "i32" else x
        for tensor, x in zip(part.input_tensors, arrays, strict=True)
    ]
