# SPDX-License-Identifier: Apache-2.0
"""Tests that cuDNN's graph of attention over a cache means what the user's does.

The rewritten graph is evaluated by the reference, with junk where a kernel leaves what
it likes. Both are in f32; the refusal of f32 is switched off for this.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_cudnn.graph import Graph, from_json, to_json
from jax_cudnn.graph.attention.cached import room
from jax_cudnn.legalize import Rewrite, legalize
from jax_cudnn.legalize.attention import cached as rules
from tests.attention.shared.cached import cached_graph
from tests.attention.shared.legal import HOPPER
from tests.common.drawn_operands import draw_arrays
from tests.common.evaluating import evaluate

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _run(rewrite: Rewrite, operands: list[Any]) -> tuple[Any, ...]:
    """Run a rewritten graph as a kernel does, which leaves junk in rows of no key."""
    graph = rewrite.graph
    assert from_json(to_json(graph)) == graph
    assert all(tensor.order[-1] == 3 for tensor in graph.tensors)
    attributes: Any = graph.nodes[0].attributes
    assert attributes.scale > 0
    changed = jax.jit(rewrite.before)(operands)
    by_name = dict(zip(graph.inputs, changed, strict=True))
    tensors = {tensor.name: tensor for tensor in graph.tensors}
    for tensor, x in zip(graph.input_tensors, changed, strict=True):
        assert x.shape == tensor.stored_shape, tensor
    lengths = np.asarray(by_name["key_lengths"])
    assert lengths.min() >= 1
    assert lengths.max() <= room(tensors)
    if "page_table" in by_name:
        table = np.asarray(by_name["page_table"])
        assert 0 <= table.min() <= table.max() < tensors["key"].dims[0]
    made = dict(zip(graph.outputs, evaluate(graph, changed), strict=True))
    is_dead = made["stats"] == -jnp.inf
    made["stats"] = jnp.where(is_dead, 77.0, made["stats"])
    order = tensors["output"].order
    rows = jnp.transpose(is_dead, order)
    made["output"] = jnp.where(rows, jnp.nan, made["output"])
    results = [made[name] for name in graph.outputs]
    return jax.jit(rewrite.after)(operands, results)


@pytest.fixture
def _allow_f32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_DTYPES", ("f32",))


def _check_meaning(graph: Graph, ways: int) -> None:
    operands = draw_arrays(graph)
    want = evaluate(graph, operands)
    candidates = legalize(graph, HOPPER).candidates
    assert len(candidates) == ways
    for rewrite in candidates:
        for x, y in zip(_run(rewrite, operands), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("query_lengths", [False, True])
@pytest.mark.parametrize("window", [(), (2, 1), (4, 0), (99, 1)])
@pytest.mark.parametrize("s", [1, 3])
def test_legal_graphs_keep_the_meaning(
    s: int, window: tuple[int, ...], query_lengths: bool, is_paged: bool
) -> None:
    turn = s + len(window) + query_lengths + 2 * is_paged
    graph = cached_graph(
        is_paged=is_paged,
        sizes={"s": s},
        query_lengths=query_lengths,
        is_causal=turn % 3 != 0,
        window=window,
        scale=(0.3, -0.7, 0.0)[turn % 3],
        order=(0, 2, 1, 3) if turn % 4 else (3, 1, 0, 2),
    )
    is_one = s == 1 or (window and (turn % 3 == 0 or window[0] < s))
    _check_meaning(graph, 1 if is_one else 2)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("query_lengths", [False, True])
@pytest.mark.parametrize("window", [(), (2, 1), (4, 0), (99, 1)])
@pytest.mark.parametrize("s", [1, 3])
def test_more_tokens_than_there_is_room_for_keep_the_meaning(
    s: int, window: tuple[int, ...], query_lengths: bool, is_paged: bool
) -> None:
    sizes = {"b": 9, "s": s, "t": 8, "i": 4, "m": 2}
    lengths = jnp.array([7, 8, 9, 10, 11, 12, 16, 2**30, 2**31 - 1], jnp.int32)
    for is_causal in (True, False):
        graph = cached_graph(
            is_paged=is_paged,
            sizes=sizes,
            query_lengths=query_lengths,
            is_causal=is_causal,
            window=window,
        )
        operands = draw_arrays(graph)
        place = graph.inputs.index("key_lengths")
        operands[place] = lengths.reshape(operands[place].shape)
        want = evaluate(graph, operands)
        lost = np.isnan(want[1])
        assert lost.any()
        assert not lost.all()
        for rewrite in legalize(graph, HOPPER).candidates:
            for x, y in zip(_run(rewrite, operands), want, strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0)]
)
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_become_heads_in_every_order_of_storage(
    order: tuple[int, ...], is_paged: bool, is_causal: bool
) -> None:
    graph = cached_graph(
        is_paged=is_paged, order=order, is_causal=is_causal, query_lengths=True
    )
    _check_meaning(graph, 2)


@pytest.mark.usefixtures("_allow_f32")
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("left", [2, 3, 5, 8, 9, 2**40])
def test_queries_become_heads_within_a_window(left: int, is_paged: bool) -> None:
    for query_lengths in (False, True):
        graph = cached_graph(
            is_paged=is_paged,
            sizes={"s": 2, "b": 9},
            window=(left, 3),
            query_lengths=query_lengths,
        )
        _check_meaning(graph, 2)


def _only(graph: Graph) -> Rewrite:
    (rewrite,) = legalize(graph, HOPPER).candidates
    return rewrite


def test_as_heads_the_kernel_has_one_query_and_every_head() -> None:
    graph = cached_graph(is_paged=True, dtype="bf16", with_stats=False)
    first, second = legalize(graph, HOPPER).candidates
    assert first.graph.tensor("query").dims == (4, 18, 1, 8)
    assert first.graph.outputs == ("output", "stats")
    assert not first.graph.nodes[0].attributes.is_causal  # type: ignore[attr-defined]
    assert second.graph.tensor("query").dims == (4, 6, 3, 8)
    assert second.graph.nodes[0].attributes.is_causal  # type: ignore[attr-defined]
    assert len(legalize(_of_length(16), HOPPER).candidates) == 2
    assert _only(_of_length(17)).graph.tensor("query").dims[2] == 17


def _of_length(s: int) -> Graph:
    return cached_graph(dtype="bf16", sizes={"s": s})


def test_the_cache_reaches_the_kernel_as_it_is() -> None:
    for is_paged in (False, True):
        graph = cached_graph(is_paged=is_paged, dtype="bf16")
        operands = draw_arrays(graph)
        given = dict(zip(graph.inputs, operands, strict=True))
        for rewrite in legalize(graph, HOPPER).candidates:
            changed = dict(
                zip(rewrite.graph.inputs, rewrite.before(operands), strict=True)
            )
            for role in ("key", "value"):
                assert changed[role] is given[role]


@pytest.mark.parametrize(
    ("graph", "reasons"),
    [
        (
            cached_graph(),
            ["query is f32; cuDNN's attention over a cache takes bf16, f16"],
        ),
        (
            cached_graph(is_paged=True, dtype="f16", sizes={"i": 6}),
            ["pages have 6 tokens; cuDNN takes a power of two"],
        ),
        (
            cached_graph(dtype="bf16", d=12, e=3),
            [
                "head size d=12 is not a multiple of 8; to pad it, the whole cache "
                "would have to be copied",
                "head size e=3 is not a multiple of 8; to pad it, the whole cache "
                "would have to be copied",
            ],
        ),
        (
            cached_graph(dtype="bf16", window=(3, -1)),
            ["the window [3, -1] has a negative bound"],
        ),
        (
            cached_graph(dtype="bf16", sizes={"b": 65536, "t": 1, "s": 1}),
            ["cuDNN's attention takes at most 65535 batch entries and 65535 heads"],
        ),
    ],
)
def test_what_cudnn_does_not_take_is_refused(graph: Graph, reasons: list[str]) -> None:
    refusal = legalize(graph, HOPPER)
    assert not refusal.candidates
    assert refusal.reasons == tuple(reasons)
    assert 'Pass implementation="xla"' in refusal.advice


def test_targets_without_it_are_refused() -> None:
    graph = cached_graph(is_paged=True, dtype="bf16")
    for changes, reason in (
        ({"sm_version": 75}, "NVIDIA H200 is sm_75; cuDNN's attention needs sm_80"),
        ({"cudnn_version": 91001}, "cuDNN 9.10.0 to 9.10.1: attention is wrong"),
        ({"cudnn_version": 90400}, "cuDNN 90400 has no pages; they came with 90500"),
    ):
        target = dataclasses.replace(HOPPER, **changes)  # type: ignore[arg-type]
        (found,) = legalize(graph, target).reasons
        assert found.startswith(reason)
    assert legalize(graph, None).candidates


@given(st.data())
def test_graphs_are_read_as_they_are_written(data: st.DataObject) -> None:
    graph = cached_graph(
        is_paged=data.draw(st.booleans()),
        sizes={x: data.draw(st.integers(0, 4)) for x in ("b", "s", "t", "m", "p")},
        dtype=data.draw(st.sampled_from(["bf16", "f16", "f32", "f64"])),
        query_lengths=data.draw(st.booleans()),
        with_stats=data.draw(st.booleans()),
        order=data.draw(st.permutations(range(4)).map(tuple)),
        is_causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([(), (1, 2), (-1, 2**40)])),
    )
    assert from_json(to_json(graph)) == graph
