# SPDX-License-Identifier: Apache-2.0
"""Tests that folding vmap's examples into the batch axis keeps the meaning.

NumPy's answer for each example alone is compared with NumPy's answer for the folded
graph, so that only the fold itself is tested.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.graph import FoldRule, Graph, fold_rule
from jax_cudnn.lowering.fold import Fold, fold_graph
from jax_cudnn.lowering.sharding.subaxes import merged
from tests.attention.shared.oracle import (
    attention_graph,
    backward_graph,
    by_role,
    chained_graph,
    numpy_attention,
    numpy_gradients,
    to_logical,
)
from tests.common.drawn_operands import draw_operands

pytestmark = pytest.mark.sampled

_SIZES = {"b": 2, "s": 3, "t": 5, "h": 4, "k": 2, "d": 7, "e": 6}
_COUNT = 3
_SCALE = 0.3


def _subsets(count: int) -> list[tuple[bool, ...]]:
    return list(itertools.product((False, True), repeat=count))[1:]


def _draw(graph: Graph, batched: tuple[bool, ...], seed: int) -> list[np.ndarray]:
    """Draw operands; a batched one has the examples as its axis 0."""
    examples = [draw_operands(graph, seed + i) for i in range(_COUNT)]
    return [
        np.stack(xs) if is_batched else xs[0]
        for *xs, is_batched in zip(*examples, batched, strict=True)
    ]


def _example(operands: list[Any], batched: tuple[bool, ...], i: int) -> list[Any]:
    return [x[i] if is_in else x for x, is_in in zip(operands, batched, strict=True)]


def _folded(fold: Fold, operands: list[Any], axes: list[int | None]) -> list[Any]:
    with jax.enable_x64(True):
        arrays = [
            fold.input(i, jnp.asarray(x), axis)
            for i, (x, axis) in enumerate(zip(operands, axes, strict=True))
        ]
        return [np.asarray(x) for x in merged(fold.graph, arrays)]


def _unfolded(fold: Fold, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Take logical results of the folded graph apart: stored, examples first."""
    with jax.enable_x64(True):
        return {
            name: np.asarray(
                fold.output(i, jnp.asarray(np.transpose(results[name], tensor.order)))
            )
            for i, (name, tensor) in enumerate(
                zip(fold.graph.outputs, fold.graph.output_tensors, strict=True)
            )
        }


def _forward_answer(graph: Graph, operands: list[Any]) -> dict[str, np.ndarray]:
    return numpy_attention(by_role(graph, operands), scale=_SCALE, is_causal=True)


def _backward_answer(graph: Graph, operands: list[Any]) -> dict[str, np.ndarray]:
    """Answer a gradient graph; its `output` and `stats` operands are not needed.

    The gradient of a bias gets the bias's dims: where the graph was folded those are
    the broadcast ones.
    """
    roles = by_role(graph, operands)
    cotangents = [roles.pop(f"grad_{role}", None) for role in ("output", "stats")]
    del roles["output"], roles["stats"]
    found = numpy_gradients(roles, *cotangents, scale=_SCALE, is_causal=True)
    return {f"grad_{role}": x for role, x in found.items()}


def _check(answer: Any, graph: Graph, batched: tuple[bool, ...], seed: int) -> Fold:
    operands = _draw(graph, batched, seed)
    fold = fold_graph(graph, _COUNT, batched)
    assert fold is not None
    axes = [0 if is_in else None for is_in in batched]
    got = _unfolded(fold, answer(fold.graph, _folded(fold, operands, axes)))
    for i in range(_COUNT):
        want = answer(graph, _example(operands, batched, i))
        for tensor in graph.output_tensors:
            np.testing.assert_allclose(
                to_logical(tensor, got[tensor.name][i]),
                want[tensor.name],
                rtol=1e-12,
                atol=1e-12,
                err_msg=tensor.name,
            )
    return fold


@functools.cache
def _full_graph(bias: str, mask: str) -> Graph:
    return attention_graph(
        sizes=_SIZES,
        bias=bias,
        mask=mask,
        lengths=("query_lengths", "key_lengths"),
        scale=_SCALE,
        is_causal=True,
        with_stats=True,
    )


@pytest.mark.parametrize(
    "batched", _subsets(7), ids=lambda b: "".join("01"[x] for x in b)
)
def test_every_subset_of_forward_operands_folds(batched: tuple[bool, ...]) -> None:
    # The bias is shared by the batch, the mask is not; the next test turns that round.
    _check(_forward_answer, _full_graph("1hst", "b1st"), batched, seed=sum(batched))


@pytest.mark.parametrize("batched", _subsets(3), ids=str)
@pytest.mark.parametrize(("bias", "mask"), [("bh1t", "1hs1"), ("1111", "b11t")])
def test_every_subset_of_query_bias_and_mask_folds(
    bias: str, mask: str, batched: tuple[bool, ...]
) -> None:
    query, its_bias, its_mask = batched
    subset = (query, False, False, its_bias, its_mask, False, False)
    _check(_forward_answer, _full_graph(bias, mask), subset, seed=7)


@pytest.mark.parametrize("batched", _subsets(4), ids=str)
@pytest.mark.parametrize("bias", ["1hst", "bh1t", "11s1"])
def test_every_subset_of_gradient_operands_folds(
    bias: str, batched: tuple[bool, ...]
) -> None:
    graph = backward_graph(
        attention_graph(
            sizes=_SIZES, bias=bias, scale=_SCALE, is_causal=True, with_stats=True
        ),
        with_grad_stats=True,
    )
    in_subset = dict(
        zip(("query", "bias", "grad_output", "grad_stats"), batched, strict=True)
    )
    fold = _check(
        _backward_answer,
        graph,
        tuple(in_subset.get(name, False) for name in graph.inputs),
        seed=11,
    )
    # Each example has its own gradient of a shared bias.
    assert ("grad_bias" in fold.rule.sums) == (bias[0] == "1")
    assert fold.graph.tensor("grad_bias").dims[0] == _COUNT * _SIZES["b"]


@pytest.mark.parametrize("axis", range(-5, 5))
def test_examples_may_lie_along_any_axis(axis: int) -> None:
    graph = attention_graph(sizes=_SIZES)
    fold = fold_graph(graph, _COUNT, (False, True, False))
    shape = graph.tensor("key").stored_shape
    key = np.arange(_COUNT * np.prod(shape), dtype=np.float32).reshape(_COUNT, *shape)
    got = fold.input(1, jnp.asarray(np.moveaxis(key, 0, axis)), axis)
    np.testing.assert_array_equal(got, key)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0)])
def test_examples_join_the_batch_axis_wherever_it_is_stored(
    order: tuple[int, ...],
) -> None:
    graph = attention_graph(sizes=_SIZES, order=order)
    fold = _check(
        lambda g, x: numpy_attention(by_role(g, x), scale=_SCALE),
        graph,
        (True, True, True),
        seed=13,
    )
    assert fold.graph.tensor("query").order == order


# --- rules ----------------------------------------------------------------------------


def _rule(graph: Graph, *batched: str) -> FoldRule:
    rule = fold_rule(graph, frozenset(batched))
    assert rule is not None
    return rule


def test_vmap_over_the_query_keeps_a_shared_bias_and_mask_uncopied() -> None:
    graph = _full_graph("1hst", "11st")
    rule = _rule(graph, "query")
    folded = {t.name for t in graph.tensors} - {"bias", "mask"}
    assert rule.axes == dict.fromkeys(folded, 0)
    assert rule.sizes == dict.fromkeys(folded, 2)
    assert rule.sums == frozenset()


@pytest.mark.parametrize(
    ("bias", "batched", "is_copied"),
    [
        ("1hst", (), False),
        ("1hst", ("bias",), True),
        ("bhst", (), True),
        ("bhst", ("bias",), True),
    ],
)
def test_a_bias_is_copied_only_where_it_must_be(
    bias: str, batched: tuple[str, ...], is_copied: bool
) -> None:
    graph = attention_graph(sizes=_SIZES, bias=bias)
    assert ("bias" in _rule(graph, "query", *batched).axes) == is_copied


def test_a_shared_bias_takes_the_full_batch_where_its_gradient_is_asked_for() -> None:
    forward = attention_graph(sizes=_SIZES, bias="1hst", with_stats=True)
    with_gradient = _rule(backward_graph(forward), "query")
    assert with_gradient.sizes["bias"] == with_gradient.sizes["grad_bias"] == 2
    assert with_gradient.sums == {"grad_bias"}
    without = _rule(backward_graph(forward, with_grad_bias=False), "query")
    assert "bias" not in without.axes
    assert without.sums == frozenset()


def test_a_batch_of_one_folds_to_the_number_of_examples() -> None:
    sizes = {**_SIZES, "b": 1}
    graph = attention_graph(sizes=sizes, bias="1hst")
    fold = fold_graph(graph, _COUNT, (True, False, False, True))
    assert fold is not None
    assert fold.graph.tensor("query").dims == (3, 4, 3, 7)
    assert fold.graph.tensor("bias").dims == (3, 4, 3, 5)
    assert fold.graph.tensor("key").dims == (3, 2, 5, 7)


def test_chained_attentions_fold_into_one_batch() -> None:
    fold = fold_graph(chained_graph(), _COUNT, (True, False, False))
    assert fold is not None
    assert {tensor.dims[0] for tensor in fold.graph.tensors} == {_COUNT * _SIZES["b"]}
