# SPDX-License-Identifier: Apache-2.0
"""Tests that contenders are measured beside plans, and what little time allows."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import contenders, matmul, native
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.native import PlanInfo
from jax_cudnn.tuning import OutOfTimeError, fastest, together
from tests.common.planner import H200, made_plan
from tests.tuning.stand_in import Gpu, measured, pin, stand_in

pytestmark = pytest.mark.once


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Measure on a stand-in; a program takes as long as its plan, or XLA."""
    return stand_in(monkeypatch)


def _compete(
    monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any], us: float, gpu: Gpu
) -> None:
    """Let a program compete, which takes so long."""
    mine = contenders.Contender(name="mine", version="2", offer=lambda _: None)

    def timed(*operands: jax.Array) -> Any:
        gpu.ran.append(us)
        return program(*operands)

    monkeypatch.setattr(contenders, "all_of", lambda _: [(mine, timed)])


def _multiplied(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return [jnp.matmul(x, y)]


@pytest.mark.parametrize(
    ("us", "winner"), [(9, "mine 2"), (10, "cudnn"), (11, "cudnn")]
)
def test_a_contender_wins_where_it_is_faster(
    us: float, winner: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compete(monkeypatch, _multiplied, us, gpu)
    choice = measured()
    assert (choice.implementation, choice.plan) == (winner, pin(10))
    assert choice.contenders_us == (("mine 2", us),)
    assert choice.without_contenders().implementation == "cudnn"


def test_a_contender_with_wrong_results_is_warned_of(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _compete(monkeypatch, lambda x, y: [1.2 * jnp.matmul(x, y)], 1, gpu)
    choice = measured()
    assert (choice.implementation, choice.contenders_us) == ("cudnn", ())
    (record,) = caplog.records
    assert record.message.startswith("mine 2 for matmul(bf16[1,8,16],")


@pytest.mark.parametrize(
    ("error", "is_warned_of"),
    [(NotImplementedError("no"), False), (KeyError("a"), True)],
)
def test_a_contender_that_fails_is_passed_over(
    error: Exception,
    is_warned_of: bool,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: jax.Array) -> list[jax.Array]:
        raise error

    _compete(monkeypatch, fail, 1, gpu)
    assert measured().implementation == "cudnn"
    told = [record.message for record in caplog.records]
    assert bool(told) == is_warned_of
    assert all("it fails: KeyError: 'a'" in each for each in told)


@pytest.mark.parametrize(
    ("until", "batches", "left"),
    [
        # Up to twice as many as cores, if a part takes one of these 25 s; then, if one
        # takes as long as those before it, 4 s.
        ([math.inf], [8, 8, 4], 0),
        ([200], [8, 8, 4], 0),
        ([40], [6, 4], 10),
        ([19], [3, 1], 16),
        ([3], [1], 19),
        ([-1], [1], 19),
        # More time, or less, is seen when the next ones begin.
        ([19, 44], [3, 8], 9),
        ([40, 26], [6], 14),
    ],
)
def test_as_many_parts_are_begun_as_there_is_time_for(
    until: list[float], batches: list[int], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, begun, found = [0.0], [], []
    by_others: list[bool] = []

    class Contest:
        def __init__(self, part: Any, *rest: Any) -> None:
            self.part = part
            by_others.append(rest[-1] is not None)

        def choice(self) -> Any:
            yield []
            now[0] += 4
            return self.part

    def in_stages(works: Sequence[Any]) -> Any:
        begun.append(len(works))
        return together.in_stages(works)

    monkeypatch.setattr(fastest, "Contest", Contest)
    monkeypatch.setattr(fastest, "in_stages", in_stages)
    monkeypatch.setattr(fastest, "local_device", lambda: SimpleNamespace(
        local_hardware_id=3
    ))  # fmt: skip
    monkeypatch.setattr(fastest, "plan_builders", lambda *_: contextlib.nullcontext(1))
    monkeypatch.setattr(fastest, "_ENOUGH_PARTS", 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    parts: Any = [(i, None) for i in range(20)]
    ends = iter(until)
    each = fastest.measure_each(parts, H200, until=lambda: next(ends, until[-1]))
    with pytest.raises(OutOfTimeError) if left else contextlib.nullcontext():
        found.extend(each)
    begun[0] -= 1  # what runs beside them
    assert begun == batches
    assert found == list(range(20 - left))
    # Other processes are there from the first large number of parts on.
    before = sum(batches[: batches.index(8)] if 8 in batches else batches)
    assert by_others == [i >= before for i in range(20 - left)]


@pytest.mark.parametrize("until", [math.inf, -1.0])
def test_when_it_is_late_only_the_first_plan_of_an_engine_is_built(
    until: float, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    first, second = made_plan(pin(10)), made_plan(pin(10).replace(":2}", ":8}"))
    assert first.request != second.request

    def plan(text: str, *, request: str, device: int) -> PlanInfo:
        asked.append(request)
        return gpu.plan(text, request=request, device=device)

    monkeypatch.setattr(native, "candidates", lambda *_, **__: (first, second))
    monkeypatch.setattr(native, "plan", plan)
    ((part, options, _),) = traced_graphs(
        matmul,
        jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 8), jnp.bfloat16),
    )
    ran: list[str] = []
    beside = [lambda: ran.append(f"after {len(asked)} plans")]
    (choice,) = fastest.measure_each(
        [(part, options)], H200, until=lambda: until, beside=beside
    )
    assert choice.plan in (first.request, second.request)
    assert (second.request in asked) == (until > 0)
    assert ran == ["after 0 plans"]
