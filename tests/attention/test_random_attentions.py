# SPDX-License-Identifier: Apache-2.0
"""Tests the random checks of attention: XLA passes, and wrong results are seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.shared import random_attentions
from tests.attention.shared.random_attentions import Problem, judge
from tests.common.judged import Judged, worst_ratio

pytestmark = pytest.mark.sampled


def _problem(seed: int) -> Problem:
    return random_attentions.draw_problem(seed, longest=24, most_scores=2**13)


@pytest.mark.once
@pytest.mark.parametrize("seed", range(16))
def test_random_problems_are_within_the_bounds_of_a_kernel(seed: int) -> None:
    problem = _problem(seed)
    arrays = random_attentions.make_arrays(problem)
    run = functools.partial(random_attentions.results, problem, implementation="xla")
    found = jax.jit(run)({name: jnp.asarray(x) for name, x in arrays.items()})
    judged = judge(problem, arrays, with_gradients=True)
    ratios = {name: worst_ratio(x, judged[name]) for name, x in found.items()}
    assert max(ratios.values()) <= 1, (str(problem), ratios)


@pytest.mark.parametrize("change", ["a key", "a row", "the scale", "infinity"])
def test_a_wrong_result_is_out_of_bounds(change: str) -> None:
    problem = next(
        p for p in map(_problem, range(99)) if p.s > 4 and p.t > 4 and p.with_lse
    )
    arrays = random_attentions.make_arrays(problem)
    judged = judge(problem, arrays, with_gradients=True)
    output = judged["output"].value.copy()
    if change == "a key":
        arrays["value"][:, 0] += 1
        output = judge(problem, arrays, with_gradients=False)["output"].value
    elif change == "a row":
        output[:, 1] = output[:, 2]
    elif change == "the scale":
        output *= 1 + 2.0**-4
    else:
        output[0, 0, 0, 0] = np.nan
    assert worst_ratio(jnp.asarray(output, problem.dtype), judged["output"]) > 1


def test_minus_infinity_is_only_right_where_it_belongs() -> None:
    judged = Judged(np.array([-np.inf, 1.0]), np.array([0.0, 0.1]))
    assert worst_ratio(jnp.array([-jnp.inf, 1.05]), judged) < 1
    assert worst_ratio(jnp.array([0.0, 1.0]), judged) == np.inf
    assert worst_ratio(jnp.array([-jnp.inf, -jnp.inf]), judged) == np.inf
