# SPDX-License-Identifier: Apache-2.0
"""Tests that random problems pass on a CPU, and that wrong results are seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.common.judged import Judged, worst_ratio
from tests.lowering.operation_problems import Problem
from tests.lowering.random_operations import FAMILIES, Family, draw_problem
from tests.norms import problems as norms
from tests.pooling.windows import pooled

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_EACH = pytest.mark.parametrize("family", FAMILIES)


def _problem(family: Family, seed: int) -> Problem:
    return draw_problem(family, seed, most=2**10)


def _found(problem: Problem) -> dict[str, jax.Array]:
    arrays = {name: jnp.asarray(x) for name, x in problem.arrays.items()}
    return jax.jit(lambda x: problem.call(x, "auto"))(arrays)


@pytest.mark.parametrize("seed", range(6))
@_EACH
def test_random_problems_are_within_the_bounds(family: Family, seed: int) -> None:
    problem = _problem(family, seed)
    ratios = problem.worst_ratios(_found(problem))
    assert max(ratios.values()) <= 1, (problem.text, ratios)


@functools.cache
def _exact(family: Family) -> tuple[str, dict[str, Judged]]:
    """Return what is right of a problem with gradients, neither small nor rounded."""
    for seed in range(1, 99, 2):
        problem = _problem(family, seed)
        is_plain = family != "pooling" or "avg" in problem.text
        others = ("values=with", " in group ", "f8=True")
        if is_plain and not any(each in problem.text for each in others):
            judged = problem.truth(problem.arrays)
            if all(x.value.size > 9 for x in judged.values()):
                return problem.text, judged
    raise AssertionError("no seed has such a problem")


@pytest.mark.parametrize("change", ["a number", "a row", "the scale", "NaN"])
@_EACH
def test_a_wrong_result_is_out_of_bounds(family: Family, change: str) -> None:
    text, judged = _exact(family)
    for name, right in judged.items():
        if not (size := np.abs(right.value).max()):
            continue
        got = right.value.copy()
        assert worst_ratio(got, right) < 1e-3
        largest = np.unravel_index(np.abs(got).argmax(), got.shape)
        if change == "a number":
            got[largest] = 0
        elif change == "a row":
            got = np.roll(got, 1)
        elif change == "the scale":
            got *= 1 + 2.0**-3
        else:
            got[largest] = np.nan
        assert worst_ratio(got, right) > 1, (text, name, size)


def test_nan_and_infinities_are_only_right_where_they_belong() -> None:
    judged = Judged(np.array([np.nan, np.inf, -np.inf, 1.0]), np.full(4, 0.1))
    assert worst_ratio(jnp.array([jnp.nan, jnp.inf, -jnp.inf, 1.05]), judged) < 1
    for place, number in ((0, 1.0), (1, -np.inf), (2, np.nan), (3, np.inf), (3, 2.0)):
        got = np.array([np.nan, np.inf, -np.inf, 1.0])
        got[place] = number
        assert worst_ratio(got, judged) > 1
    assert worst_ratio(np.ones((2, 2)), judged) == np.inf


@pytest.mark.parametrize("is_centred", [True, False])
def test_gradients_of_norms_agree_with_finite_differences(is_centred: bool) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 4, 5), "scale": (1, 4, 5), "bias": (1, 4, 5)}
    given = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    moves = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    cotangents = [rng.standard_normal(shape) for shape in ((3, 4, 5), (3, 1, 5))]
    cotangents.append(cotangents[1] * is_centred + 0.5)
    options = {"axes": (1,), "epsilon": 1e-2, "is_centred": is_centred}

    def total(by: float, name: str) -> float:
        moved = {**given, name: given[name] + by * moves[name]}
        found = norms.truth(**moved, **options)
        results = [found[x] for x in ("output", "rstd", "mean") if x in found]
        pairs = zip(results, cotangents, strict=False)
        return float(sum(np.vdot(x, cotangent) for x, cotangent in pairs))

    found = norms.gradients(
        given["x"],
        cotangents[0],
        given["scale"],
        along=(1, 2),
        grad_rstd=cotangents[1],
        grad_mean=cotangents[2] if is_centred else 0.0,
        **options,
    )
    for name, grad in found.items():
        slope = (total(1e-5, name) - total(-1e-5, name)) / 2e-5
        np.testing.assert_allclose(np.vdot(grad, moves[name]), slope, rtol=1e-7)


def test_the_gradient_of_maxima_is_jaxs_with_ties(x64: None) -> None:
    rng = np.random.default_rng(0)
    x = np.round(rng.standard_normal((2, 9, 8, 3)))

    def largest(x: jax.Array) -> jax.Array:
        window, strides = (1, 3, 2, 1), (1, 2, 1, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID")

    output, back = jax.vjp(largest, jnp.asarray(x))
    cotangent = rng.standard_normal(output.shape)
    want = pooled(x, "max", (3, 2), (2, 1), cotangent=cotangent)
    np.testing.assert_array_equal(output, want.output)
    np.testing.assert_allclose(back(jnp.asarray(cotangent))[0], want.grad, atol=1e-12)
