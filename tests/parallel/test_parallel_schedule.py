# SPDX-License-Identifier: Apache-2.0
"""Tests that the calls of all devices cover exactly what queries see, and evenly."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_cudnn.parallel.order import all_positions
from jax_cudnn.parallel.schedule import (
    Band,
    Call,
    Order,
    Step,
    gathered_step,
    ring_steps,
)

pytestmark = pytest.mark.once

_CAUSAL = Band.of(is_causal=True, window=())


def _seen_by(call: Call) -> np.ndarray:
    """Return what a call's queries see of its keys, as sdpa defines it."""
    rows = np.arange(call.rows[1])[:, None]
    columns = np.arange(call.columns[1])[None, :]
    seen = np.ones((call.rows[1], call.columns[1]), bool)
    if call.is_causal:
        seen &= columns <= rows
    if call.window:
        left, right = call.window
        seen &= (columns >= rows - left) & (columns <= rows + right)
    return seen


@st.composite
def _problems(draw: st.DrawFn, orders: tuple[Order, ...]) -> dict[str, Any]:
    order = draw(st.sampled_from(orders))
    chunks = 2 if order == "zigzag" else 1
    size = st.integers(1, 5)
    queries = chunks * draw(size)
    keys = draw(st.one_of(st.just(queries), size.map(lambda x: chunks * x)))
    bound = st.integers(-4, 25)
    window = draw(st.one_of(st.just(()), st.tuples(bound, bound)))
    return {
        "count": draw(st.integers(1, 5)),
        "order": order,
        "queries": queries,
        "keys": keys,
        "band": Band.of(is_causal=draw(st.booleans()), window=window),
    }


def _count_pairs(
    problem: dict[str, Any], steps: tuple[Step, ...], device: int, keys_of: Any
) -> np.ndarray:
    """Return how often each of a device's queries meets each key of the sequence."""
    count, queries, keys = (problem[x] for x in ("count", "queries", "keys"))
    met = np.zeros((queries, count * keys), int)
    rows_of = np.reshape(all_positions(count, queries, problem["order"]), (count, -1))
    rows_of = rows_of[device]
    for step in steps:
        calls = step.programs[step.program_of[device]]
        positions = keys_of(step)
        for call, first in zip(calls, step.columns_of[device], strict=True):
            seen = _seen_by(call)
            # A row without a key, or a band with negative bounds, would cost a mask.
            assert seen.any(1).all()
            assert seen.any(0).all()
            assert min(call.window, default=0) >= 0
            if problem["order"] != "striped" and not (call.is_shifted or call.is_full):
                # What counts from the beginning of a packed sequence, on both sides.
                assert rows_of[call.rows[0]] == positions[first + call.columns[0]]
            rows, columns = np.nonzero(seen)
            np.add.at(met, (call.rows[0] + rows, positions[first + columns]), 1)
    return met


def _wanted(problem: dict[str, Any], device: int) -> np.ndarray:
    count, queries, order = (problem[x] for x in ("count", "queries", "order"))
    rows = np.reshape(all_positions(count, queries, order), (count, -1))[device]
    difference = np.arange(count * problem["keys"])[None, :] - rows[:, None]
    band = problem["band"]
    return (band.lowest <= difference) & (difference <= band.highest)


@given(_problems(get_args(Order)), st.booleans())
def test_a_ring_computes_each_visible_pair_once(
    problem: dict[str, Any], is_packed: bool
) -> None:
    count, keys = problem["count"], problem["keys"]
    shares = np.reshape(all_positions(count, keys, problem["order"]), (count, -1))
    is_packed &= problem["order"] != "striped"
    steps = ring_steps(**problem, is_packed=is_packed)
    assert steps[0].shift == 0
    for device in range(count):

        def keys_of(step: Step, device: int = device) -> np.ndarray:
            return shares[(device - step.shift) % count]

        met = _count_pairs(problem, steps, device, keys_of)
        np.testing.assert_array_equal(met, _wanted(problem, device))


@given(_problems(("contiguous", "zigzag")), st.booleans())
def test_gathered_keys_are_met_once_where_visible(
    problem: dict[str, Any], is_packed: bool
) -> None:
    step = gathered_step(**problem, is_packed=is_packed)
    natural = np.arange(problem["count"] * problem["keys"])
    for device in range(problem["count"]):
        met = _count_pairs(problem, (step,), device, lambda _: natural)
        np.testing.assert_array_equal(met, _wanted(problem, device))


@given(
    _problems(("contiguous", "zigzag")), st.sampled_from([ring_steps, gathered_step])
)
def test_no_call_of_causal_documents_needs_a_mask(
    problem: dict[str, Any], steps_of: Any
) -> None:
    found = steps_of(**problem | {"band": _CAUSAL}, is_packed=True)
    for step in found if isinstance(found, tuple) else (found,):
        assert not any(call.is_shifted for calls in step.programs for call in calls)


def _ring(order: Order, band: Band, count: int = 8) -> tuple[Step, ...]:
    return ring_steps(count=count, order=order, queries=64, keys=64, band=band)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_zigzag_order_gives_all_devices_the_same_causal_work(count: int) -> None:
    steps = _ring("zigzag", _CAUSAL, count)
    assert len(steps) == count
    for step in steps[1:]:
        # One call, of all queries with half of the keys or the other way round.
        assert [len(calls) for calls in step.programs] == [1, 1]
        assert set(step.work) == {64 * 32}


@st.composite
def _packed_rows(draw: st.DrawFn) -> tuple[int, int, list[int], int | None]:
    """Return devices, tokens of each, where documents begin, and a causal window."""
    count, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    cuts = draw(st.lists(st.integers(0, count * tokens), max_size=5))
    window = draw(st.one_of(st.none(), st.integers(0, 25)))
    return count, tokens, sorted({0, *cuts, count * tokens}), window


@given(_packed_rows())
def test_striped_documents_are_computed_from_their_first_visible_token(
    row: tuple[int, int, list[int], int | None],
) -> None:
    count, tokens, cuts, window = row
    band = Band.of(is_causal=True, window=() if window is None else (window, 9))
    problem: dict[str, Any] = {"queries": tokens, "keys": tokens, "band": band}
    steps = ring_steps(count=count, order="striped", is_packed=True, **problem)
    places = np.reshape(all_positions(count, tokens, "striped"), (count, -1))
    documents = np.searchsorted(cuts, np.arange(count * tokens), side="right")
    met = np.zeros((count * tokens, count * tokens), int)
    for step in steps:
        assert len(step.programs) == 1, "devices need not differ"
        for device in range(count):
            rows, columns = places[device], places[(device - step.shift) % count]
            for call in step.programs[0]:
                assert call.rows == call.columns == (0, tokens)
                for document in set(documents):
                    own = rows[documents[rows] == document]
                    others = columns[documents[columns] == document]
                    if own.size and others.size and own[0] < others[0]:
                        own = own[1:]
                    sizes = {"rows": (0, own.size), "columns": (0, others.size)}
                    seen = _seen_by(replace(call, **sizes))
                    r, c = np.nonzero(seen)
                    np.add.at(met, (own[r], others[c]), 1)
    difference = np.arange(count * tokens)[None] - np.arange(count * tokens)[:, None]
    wanted = (band.lowest <= difference) & (difference <= 0)
    np.testing.assert_array_equal(met, wanted & (documents[:, None] == documents))


@pytest.mark.parametrize("order", ["striped", "zigzag"])
def test_striped_order_gives_all_devices_the_same_work_in_documents(
    order: Order,
) -> None:
    count, tokens = 4, 256
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, count * tokens, 5))
    documents = np.searchsorted(cuts, np.arange(count * tokens), side="right")
    places = np.reshape(all_positions(count, tokens, order), (count, -1))
    work = np.zeros((count, count))
    for shift in range(count):
        for device in range(count):
            rows, columns = places[device], places[(device - shift) % count]
            is_own = documents[rows][:, None] == documents[columns]
            work[shift, device] = np.sum(is_own & (columns <= rows[:, None]))
    # All wait for the slowest in each step.
    waited = work.max(axis=1).sum() / work.mean(axis=1).sum()
    assert waited < 1.03 if order == "striped" else waited > 1.2


def test_contiguous_order_leaves_early_devices_idle() -> None:
    steps = _ring("contiguous", _CAUSAL)
    assert steps[1].work == (0, *(7 * (64 * 64,)))
    assert steps[7].work == (*(7 * (0,)), 64 * 64)


def test_the_diagonal_is_one_causal_call_in_both_orders() -> None:
    diagonal = Call(rows=(0, 64), columns=(0, 64), is_causal=True)
    for order in ("contiguous", "zigzag"):
        assert _ring(order, _CAUSAL)[0].programs == ((diagonal,),)


def test_without_causality_every_step_is_one_whole_block() -> None:
    steps = _ring("zigzag", Band(lowest=-math.inf, highest=math.inf))
    block = Call(rows=(0, 64), columns=(0, 64))
    assert [step.programs for step in steps] == [((block,),)] * 8


def test_a_window_ends_the_ring_early() -> None:
    steps = _ring("contiguous", Band.of(is_causal=True, window=(70, 0)))
    assert [step.shift for step in steps] == [0, 1, 2]
    # Only the first 6 queries reach back that far, to the last 6 keys.
    corner = Call(rows=(0, 6), columns=(0, 6), window=(0, 5), is_shifted=True)
    assert steps[2].programs == ((), (corner,))
    assert {columns for columns in steps[2].columns_of if columns} == {(58,)}


def test_a_window_on_both_sides_asks_the_neighbours_only() -> None:
    steps = _ring("contiguous", Band.of(is_causal=False, window=(9, 9)))
    assert [step.shift for step in steps] == [0, 1, 7]


def test_devices_that_differ_in_where_keys_begin_share_a_program() -> None:
    step = gathered_step(
        count=8,
        order="contiguous",
        queries=64,
        keys=64,
        band=Band.of(is_causal=True, window=(10, 0)),
    )
    # All but the first device look back over the edge of their own keys.
    assert len(step.programs) == 2
    assert step.columns_of[1:] == tuple((64 * i - 10,) for i in range(1, 8))


def test_gathered_causal_keys_are_one_call_a_chunk() -> None:
    step = gathered_step(count=4, order="zigzag", queries=64, keys=64, band=_CAUSAL)
    # The last device's two chunks are neighbours.
    assert [len(calls) for calls in step.programs] == [2, 2, 2, 1]
    # Hidden keys are computed in the blocks on the diagonal only.
    assert set(step.work[:3]) == {32 * 32 * (2 * 4 + 1)}
