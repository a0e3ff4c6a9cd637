# SPDX-License-Identifier: Apache-2.0
"""Tests how the kernels that were measured decide about those like them."""

import math
from dataclasses import replace

import pytest

from jax_cudnn.policy.nearest import (
    Kernel,
    Measured,
    between_names,
    between_sizes,
    cost_of,
)

pytestmark = pytest.mark.once


def kernel(
    name: str = "matmul, f32, more",
    rows: float = 64.0,
    columns: float = 64.0,
    depth: float = 64.0,
) -> Kernel:
    return Kernel(name=name, rows=rows, columns=columns, depth=depth)


def test_kernels_are_apart_by_their_sizes_and_the_words_of_their_classes() -> None:
    e = math.e
    assert between_sizes(kernel(), kernel()) == 0
    assert between_sizes(kernel(), kernel(depth=64 / e)) == pytest.approx(1)
    assert between_sizes(kernel(rows=64 * e), kernel(columns=64 * e)) == pytest.approx(
        math.sqrt(2)
    )
    more, relu, array_more = (
        f"matmul, f32, {tail}" for tail in ("more", "relu", "more, 1 more arrays")
    )
    sums, gradient = "matmul, f32, sums", "matmul, f32, gradient of silu"
    assert between_names(sums, relu) == between_names(gradient, more) == 1
    assert between_names(more, array_more) == 0.5
    # XLA runs one of them as one kernel, and the other as two.
    assert between_names(more, relu) == 2
    assert between_names(array_more, relu) == 2.5
    # XLA has other algorithms for convolutions along three axes.
    one, two, three = (f"conv_dgrad, f32, alone, {i} axes" for i in (1, 2, 3))
    assert between_names(one, two) == 1
    assert between_names(two, three) == between_names(one, three) == 2.5


def test_the_nearest_kernels_decide() -> None:
    near = [(kernel(depth=64 + i), 0.8) for i in range(8)]
    far = [(kernel(depth=512 + i), 1.5) for i in range(8)]
    known = Measured([*near, *far])
    here, there = known.verdict(kernel()), known.verdict(kernel(depth=512))
    assert here is not None
    assert here.is_faster
    assert (here.ratio, here.count, here.losses) == (pytest.approx(0.8), 8, 0)
    assert there is not None
    assert not there.is_faster
    assert (there.ratio, there.losses) == (pytest.approx(1.5), 8)


def test_a_mean_weighs_near_ones_more() -> None:
    known = Measured(
        [(kernel(), 0.5), (kernel(depth=640), 1.04), (kernel(depth=640), 1.0)]
    )
    found = known.verdict(kernel())
    assert found is not None
    far = 1 / (0.5 + math.log(10))
    logs = 2 * math.log(0.5) + far * math.log(1.04)
    assert found.ratio == pytest.approx(math.exp(logs / (2 + 2 * far)))
    assert found.is_faster


def test_a_loss_counts_more_than_a_win_and_no_single_one_decides() -> None:
    def is_faster(*ratios: float) -> bool:
        verdict = Measured((kernel(), r) for r in ratios).verdict(kernel())
        assert verdict is not None
        return verdict.is_faster

    assert is_faster(0.9, 0.9, 0.9)
    assert not is_faster(0.91, 0.91, 0.91), "too little to win"
    assert not is_faster(0.8, 0.9, 1.2), "0.95 in the mean"
    assert is_faster(*[0.65] * 7, 100.0)
    assert not is_faster(*[0.7] * 4, *[2.0] * 4)
    assert cost_of(1.05) == pytest.approx(math.log(1.05))
    assert cost_of(1.05**2) == pytest.approx(math.log(1.05) * 4)
    assert cost_of(100.0) == cost_of(2.0)


def test_an_engine_is_judged_by_its_own_times() -> None:
    with_both = [(replace(kernel(), engines={4: 0.6, 7: 2.5}), 0.6)] * 4
    others = [(replace(kernel(), engines={4: 0.7}), 0.7)] * 8
    known = Measured([*others, *with_both])
    assert len([*known.neighbours(kernel())]) == 12
    assert [*known.neighbours(kernel(depth=64 * 21))] == []

    def ratio(engine: int) -> float:
        found = known.verdict(kernel(), engine)
        assert found is not None
        return found.ratio

    # Four of the eight are nearest, and the others half a unit further away.
    near, far = 4 / 0.5, 4 / (0.5 + 0.5)
    logs = near * math.log(2.5) + far * math.log(0.7)
    assert ratio(7) == pytest.approx(math.exp(logs / (near + far)))
    assert ratio(4) < 1 < ratio(7)
    # One that was never timed is like the first plans.
    assert ratio(5) == pytest.approx(0.7)


def test_families_are_judged_apart_and_too_few_say_nothing() -> None:
    slow = [(kernel(), 2.0)] * 3
    few = kernel("matmul, f32, more, few rows")
    assert Measured(slow).verdict(few) is None
    assert Measured(slow).verdict(kernel("matmul, 16 bits, more")) is None
    assert Measured(slow).verdict(kernel("matmul, f32, alone")) is not None
    assert Measured(slow[:2]).verdict(kernel()) is None
    assert Measured([(few, 0.5)] * 3).verdict(few) is not None
    groups = "conv_fprop, 16 bits, alone, 2 axes, groups"
    kept = [(kernel(groups), 2.0)] * 3
    assert Measured(kept).verdict(kernel(groups.replace("2", "3"))) is not None
    for way in ("padded", "merged", "one group"):
        assert Measured(kept).verdict(kernel(f"{groups}, {way}")) is None
