# SPDX-License-Identifier: Apache-2.0
"""Tests how the rules of "auto" are derived from measured times."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from jax_cudnn import choices, conv
from jax_cudnn.calibration import rules
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.lowering.decision import rewritten_as
from jax_cudnn.policy.products import kernels
from jax_cudnn.policy.tables import Tables, tables_for
from tests.common.planner import H200

_TABLES = tables_for(None)

pytestmark = pytest.mark.once

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    """Import the script that judges the rules, which reads the benchmarks."""
    return importlib.import_module("scripts.judged_rules")


def _row(kernels: dict[int, float], **fields: Any) -> dict[str, Any]:
    return {
        "class": "conv_fprop, 16 bits, more, 2 axes",
        "op": "conv_fprop+silu",
        "sizes": [256, 256, 512, 2**25],
        "ratio": 1.0,
        "first_engine": 4,
        "engines": {"4": 1.0},
        "kernels": {json.dumps({"KERNEL_CFG": k}): v for k, v in kernels.items()},
        **fields,
    }


def test_kernels_that_were_faster_go_first_each_where_others_are_not_listed() -> None:
    rows = [_row({1: 0.5, 2: 0.9, 3: 1.0})] * 40 + [_row({2: 0.8, 3: 0.99})] * 40
    (found,) = rules.preferences(rows, 91900)
    assert found["knobs"] == [{"KERNEL_CFG": 1}, {"KERNEL_CFG": 2}]
    assert found["ratio"] == pytest.approx(math.sqrt(0.5 * 0.8), abs=1e-3)
    assert (found["count"], found["of"]) == (80, 80)
    # Too few, hardly faster, faster in the mean but often slower, and in few blocks.
    assert not rules.preferences(rows[:7], 91900)
    assert not rules.preferences([_row({1: 0.97})] * 80, 91900)
    assert not rules.preferences([_row({1: 0.5}), _row({1: 1.6})] * 40, 91900)
    assert not rules.preferences([_row({1: 0.5})] * 8 + [_row({3: 1.0})] * 72, 91900)
    assert not rules.preferences([_row({1: 0.5}, op="conv_fprop")] * 80, 91900)


@pytest.mark.parametrize(
    ("times", "is_slow"),
    [
        # Of XLA's time, by an engine that comes second.
        ([2.0, 2.0, 2.0], True),
        ([2.0, 2.0, 1.9], False),
        ([9.0, 9.0], False),
        ([1.06, 9.0, 9.0], True),
        ([1.05, 9.0, 9.0], False),
        ([1.05, *[9.0] * 99], True),
        ([1.05, 1.05, *[9.0] * 198], True),
        ([1.05, 1.05, *[9.0] * 197], False),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_an_engine_is_slow_that_xla_is_faster_than(
    times: list[float], is_slow: bool, is_first: bool
) -> None:
    rows = [
        _row({}, ratio=us, first_engine=8, engines={"7": 0.01 / us, "8": 1.0})
        if is_first
        # The first plan takes half of XLA's time.
        else _row({}, ratio=0.5, first_engine=7, engines={"8": us / 0.5})
        for us in times
    ]
    of_f32 = _row({}, ratio=0.1, first_engine=8)
    of_f32["class"] = of_f32["class"].replace("16 bits", "f32")
    found = rules.slow_engines([*rows, of_f32])
    assert found == ({"conv_fprop, 16 bits": [8]} if is_slow else {})


@pytest.mark.parametrize(
    ("dtype", "slow"),
    [("bfloat16", (1, 5)), ("float32", (1, 9)), ("int8", (1,))],
)
def test_engines_are_slow_for_operands_of_a_width(
    dtype: str, slow: tuple[int, ...]
) -> None:
    engines = {"conv_fprop, 16 bits": [1, 5], "conv_fprop, f32": [1, 9]}
    first = _TABLES.about("kernels")
    made = replace(first, data={**first.data, "slow_engines": engines})
    tables = Tables((made,), (0.0,))
    x, w = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, 8, 8, 16), (3, 3, 16, 16))
    )
    numbers = ("NHWC", "HWIO", "NHWC")

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return conv(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    ((graph, _, _),) = traced_graphs(layer, x, w)
    assert kernels.slow_engines(graph, H200, tables) == slow
    ampere = replace(H200, sm_version=80)
    assert kernels.slow_engines(graph, ampere, tables) == ()


def test_an_engine_that_was_faster_goes_before_another() -> None:
    def found(*rows: dict[str, Any]) -> list[dict[str, Any]]:
        return [*rules.engine_orders(rows, 91900)]

    def rows(*ratios: float, **fields: Any) -> list[dict[str, Any]]:
        return [
            _row({}, first_engine=7, **{"engines": {"7": 1.0, "4": ratio}, **fields})
            for ratio in ratios
        ]

    assert found(*rows(*[0.5] * 8, 1.1)) == [
        {
            "kind": "conv_fprop",
            "bits": "16 bits",
            "cudnn": 91900,
            "groups": False,
            "windows_of_1": False,
            "first": 7,
            "before": [4],
            "ratio": round((0.5**8 * 1.1) ** (1 / 9), 3),
            "count": 9,
            "of": 9,
        }
    ]
    # One that is listed where the faster one is not comes second.
    others = rows(*[1.0] * 6, engines={"7": 1.0, "9": 0.7})
    (both,) = found(*rows(*[0.5] * 8), *others)
    assert both["before"] == [4, 9]
    assert (both["count"], both["of"]) == (14, 14)
    ones = "conv_fprop, 16 bits, more, 2 axes, windows of 1"
    (of_ones,) = found(*rows(*[0.5] * 9, **{"class": ones}))
    assert of_ones["windows_of_1"]
    # Groups have an order of their own.
    groups = "conv_fprop, 16 bits, more, 2 axes, groups"
    (of_groups,) = found(*rows(*[0.5] * 9, **{"class": groups}), *rows(*[1.9] * 9))
    assert of_groups["groups"]
    assert of_groups["count"] == 9
    # Three are enough if it was faster for each, else six.
    assert found(*rows(0.1, 0.5, 0.89))
    assert not found(*rows(0.1, 0.5))
    assert not found(*rows(0.1, 0.5, 0.5, 0.5, 0.92))
    assert found(*rows(0.1, 0.5, 0.5, 0.5, 0.5, 0.92))
    # The mean is 0.86 of both, but only the first is surely below 1.
    assert found(*rows(*[0.75, 0.99] * 4))
    assert not found(*rows(*[0.4, *[0.99] * 5]))
    # Hardly faster; often slower; only for one; a product.
    assert not found(*rows(*[0.97] * 20))
    assert not found(*rows(*[0.5, 1.9] * 10))
    assert not found(*rows(0.01, *[1.0] * 8))
    assert not found(*rows(*[0.5] * 9, **{"class": "matmul, 16 bits, more"}))


def test_ratios_are_with_the_plans_that_go_first() -> None:
    rows = [_row({1: 0.5})] * 80
    found_rules = rules.rules_of(rows, {}, 91900)
    assert not found_rules.engines

    def ratio(kernels: dict[int, float], **fields: Any) -> float:
        ((_, found),) = rules.of_rows([_row(kernels, **fields)], found_rules)
        return found

    assert ratio({1: 0.6}) == 0.6
    assert ratio({1: 0.6}, first_engine=7) == 1.0
    assert ratio({1: 0.6}, op="conv_fprop") == 1.0
    assert ratio({2: 0.6}) == 1.0
    unknown = {name: x for name, x in _row({}).items() if name != "kernels"}
    ((_, found),) = rules.of_rows([unknown], found_rules)
    assert found == 0.5, "the mean of those that are known"
    slow = rules.Rules(slow={"conv_fprop, 16 bits": [4]}, preferred=[], engines=[])
    assert not [*rules.of_rows(rows, slow)]


def test_ratios_are_with_the_engines_that_go_first() -> None:
    order = {
        "kind": "conv_fprop", "bits": "16 bits", "cudnn": 91900, "groups": False,
        "windows_of_1": False, "first": 7, "before": [4, 9], "ratio": 0.7, "count": 9,
        "of": 9,
    }  # fmt: skip
    slow = {"conv_fprop, 16 bits": [7, 9]}
    found_rules = rules.Rules(
        slow=slow, preferred=[], engines=[{**order, "first": 5}, order]
    )

    def ratios(engines: dict[str, float], **fields: Any) -> list[float]:
        row = _row({}, **{"first_engine": 7, "engines": engines, **fields})
        return [found for _, found in rules.of_rows([row], found_rules)]

    # What comes first now is not slow.
    assert ratios({"7": 1.0, "4": 0.8, "9": 0.1}) == [0.8]
    assert ratios({"7": 1.0, "4": 0.8}, op="conv_fprop") == [0.8]
    assert ratios({"7": 1.0, "9": 0.1}) == []
    assert ratios({"7": 1.0, "11": 0.1}) == []
    assert ratios({"6": 1.0, "4": 0.8}, first_engine=6) == [1.0]
    assert ratios({"5": 1.0, "4": 0.8}, first_engine=5) == [0.8]
    # A kernel of the first engine is wanted instead, as when a plan is asked for.
    rows = [_row({1: 0.5})] * 80
    preferred = rules.preferences(rows, 91900)
    both = rules.Rules(slow={}, preferred=preferred, engines=[{**order, "first": 4}])
    row = _row({1: 0.6}, engines={"4": 1.0, "9": 0.1})
    assert [found for _, found in rules.of_rows([row], both)] == [0.6]


def test_what_is_left_out_has_no_part_in_choosing() -> None:
    # Engine 9 was timed five times, which is too few where one of them is near 1. That
    # one row of it is left out does not make it six.
    times = [{"4": 0.8, "9": ratio} for ratio in (0.3, 0.4, 0.5, 0.95, 0.95)]
    times += [{"4": 0.8}] * 3
    assert rules._preferred(times, rules._is_faster_engine) == ["4"]
    assert rules._engine_ratio_in_others(times) == pytest.approx(0.8)


def test_kernels_are_judged_by_others_than_those_beside_them(
    script: ModuleType,
) -> None:
    slow = {"ratio": 2.0, "sizes": [256, 256, 32768, 2**31]}
    rows = [_row({}, ratio=0.5)] * 64 + [_row({}, **slow)] * 64
    found = list(script.judged(rows, {}, 91900))
    assert [each.ratio for each in found] == [0.5] * 64 + [2.0] * 64
    assert [each.is_cudnns for each in found] == [True] * 64 + [False] * 64
    # The fastest of the engines' first plans, if it is faster than what runs.
    assert {each.best_ratio for each in found} == {0.5, 2.0}
    engines = {"4": 1.0, "7": 0.4, "9": 0.9}
    rows[-1] = _row({}, **slow, engines=engines)
    *_, last = script.judged(rows, {}, 91900)
    assert (last.ratio, last.best_ratio) == (2.0, pytest.approx(0.8))
    # Of those right beside a block, nothing is known.
    assert all(each.is_cudnns for each in script.judged(rows[64:96], {}, 91900))


def test_shipped_choices_are_for_graphs_that_cudnn_gets(script: ModuleType) -> None:
    """A kernel that is written in another way has to be tuned and shipped again."""
    known = {key.graph: choice for key, choice in choices.shipped().items()}
    parts = {
        choices.digest_of(part): part
        for cell in script.CELLS
        for part in script._parts_of(cell)
    }
    planned = {digest for digest, choice in known.items() if choice.plan}
    assert len(planned & parts.keys()) > 100
    stale: list[str] = []
    for digest in sorted(planned & parts.keys()):
        part, choice = parts[digest], known[digest]
        found = legalize(part, H200)
        if rewritten_as(part, found, H200, choice.rewritten) is None:
            stale.append(f"{choice.op} {choice.operands}")
    assert not stale
