# SPDX-License-Identifier: Apache-2.0
"""Tests the random checks of attention over caches: XLA passes, and errors are seen."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.shared import random_decode
from tests.attention.shared.random_decode import Problem, judge
from tests.common.judged import worst_ratio

pytestmark = [pytest.mark.once, pytest.mark.sampled]


def _problem(seed: int) -> Problem:
    return random_decode.draw_problem(seed, longest=48, most_scores=2**13)


def _results(problem: Problem, arrays: dict[str, Any]) -> dict[str, jax.Array]:
    run = functools.partial(random_decode.call, problem, implementation="xla")
    return jax.jit(run)({name: jnp.asarray(x) for name, x in arrays.items()})


@pytest.mark.parametrize("seed", range(48))
def test_random_problems_are_within_the_bounds_of_a_kernel(seed: int) -> None:
    problem = _problem(seed)
    arrays = random_decode.make_arrays(problem)
    judged = judge(problem, arrays)
    found = _results(problem, arrays)
    ratios = {name: worst_ratio(x, judged[name]) for name, x in found.items()}
    assert max(ratios.values()) <= 1, (str(problem), ratios)


def test_problems_have_what_decoding_has() -> None:
    problems = [random_decode.draw_problem(seed) for seed in range(400)]
    assert all(p.h % p.k == 0 and p.t % max(p.page, 1) == 0 for p in problems)
    assert {p.s for p in problems} == set(range(1, 9))
    assert {p.page for p in problems} == {0, 1, 4, 16, 32, 64, 128}
    for has in (
        lambda p: p.page and p.with_update,
        lambda p: p.with_query_lengths and p.window,
        lambda p: not p.may_hold_nan,
        lambda p: p.h == p.k,
        lambda p: p.with_sinks and p.returns_lse and p.page,
        lambda p: 0 in random_decode.make_arrays(p)["lengths"],
    ):
        assert any(has(p) for p in problems[:150]), has


@pytest.mark.parametrize("change", ["a token", "a page", "a length", "a head"])
def test_a_wrong_result_is_out_of_bounds(change: str) -> None:
    problem = next(
        p
        for p in map(_problem, range(999))
        if p.page == 4 and p.t > 8 and p.k > 1 and p.window is None
    )
    arrays = random_decode.make_arrays(problem)
    judged = judge(problem, arrays)
    wrong = {name: x.copy() for name, x in arrays.items()}
    longest = int(np.argmax(arrays["lengths"]))
    if change == "a token":
        wrong["dense_value"][longest, 0] += 1
    elif change == "a page":
        wrong["dense_value"][longest, :4] = arrays["dense_value"][longest, 4:8]
    elif change == "a length":
        wrong["lengths"][longest] -= 1
    else:
        wrong["dense_value"] = np.roll(wrong["dense_value"], 1, axis=2)
    output = judge(problem, wrong)["output"].value
    assert worst_ratio(jnp.asarray(output, problem.dtype), judged["output"]) > 1
