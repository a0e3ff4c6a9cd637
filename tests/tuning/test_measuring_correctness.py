# SPDX-License-Identifier: Apache-2.0
"""Tests that wrong results of a plan are noticed, whatever the dtype and the size."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import conv, matmul, sdpa
from jax_cudnn.graph import Graph, derivative_of, from_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.tuning.correctness import (
    bound,
    comparable,
    largest_error,
    reference_results,
    with_own_results,
)
from jax_cudnn.tuning.stopwatch import draw_sets
from tests.attention.shared.cases import Case, attention, make_operands
from tests.attention.shared.flash import flash
from tests.common import drawn
from tests.common.planner import H200
from tests.norms import problems as norms

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_GOLDEN = Path(__file__).parents[1] / "golden"
_BF16, _F16, _F32 = jnp.bfloat16, jnp.float16, jnp.float32


def _normal(seed: int, shape: tuple[int, ...], dtype: Any = _F32) -> jax.Array:
    return drawn.normal(seed, shape, _F32).astype(dtype)


def _part(function: Any, *shapes: tuple[int, ...], dtype: Any = _BF16) -> Any:
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    ((graph, _, _), *_) = traced_graphs(function, *operands)
    return graph


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(_F32, 2**-7), (_F16, 2**-7), (_BF16, 2**-4), (jnp.float8_e4m3fn, 0.5)],
    ids=str,
)
def test_the_bound_is_that_of_the_coarsest_dtype(dtype: Any, most: float) -> None:
    assert bound(_part(matmul, (8, 16), (16, 8), dtype=dtype)) == most


def test_operands_that_are_only_converted_do_not_widen_the_bound() -> None:
    operands = [
        jax.ShapeDtypeStruct((8, 16), _BF16),
        jax.ShapeDtypeStruct((16, 8), jnp.float8_e4m3fn),
    ]
    ((part, _, _),) = traced_graphs(matmul, *operands)
    assert bound(part) == 2**-4


def test_rounding_is_within_the_bound_and_what_is_missing_is_not() -> None:
    part = _part(matmul, (32, 64), (64, 48))
    a, b = _normal(0, (1, 32, 64), _BF16), _normal(1, (1, 64, 48), _BF16)
    (expected,) = reference_results(part, [a, b])
    rounded = (a[..., :32] @ b[:, :32] + a[..., 32:] @ b[:, 32:]).astype(_BF16)
    assert 0 < largest_error([rounded], [expected]) < bound(part)
    assert largest_error([a[..., :60] @ b[:, :60]], [expected]) > bound(part)
    assert largest_error([expected.at[..., 0].set(0)], [expected]) > bound(part)


@pytest.mark.parametrize("op", ["conv", "sdpa"])
def test_what_differs_by_rounding_agrees_and_what_is_negated_does_not(op: str) -> None:
    layer = functools.partial(
        conv,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        padding="SAME",
        activation="gelu",
    )
    if op == "conv":
        part = _part(layer, (2, 8, 8, 16), (3, 3, 16, 8))
    else:
        part = _part(sdpa, *((2, 16, 4, 8),) * 3)
    shapes = [tensor.stored_shape for tensor in part.input_tensors]
    operands = [_normal(i, shape) for i, shape in enumerate(shapes)]
    expected = reference_results(part, operands)
    found = reference_results(part, [x.astype(_BF16) for x in operands])
    assert 0 < largest_error(found, expected) < bound(part) / 4
    assert largest_error([-x for x in expected], expected) == pytest.approx(2)


def _backward(case: Case) -> Graph:
    """Return the gradient graph of attention, with that of a bias."""
    ((graph, _, _),) = traced_graphs(attention(case), *make_operands(case).arrays)
    derivative = derivative_of(graph)
    assert derivative is not None
    wanted = tuple(t.dtype in ("bf16", "f16") for t in graph.input_tensors)
    full = derivative.with_residuals(graph, wanted)
    made = derivative.backward(graph, wanted, (True,) * len(graph.outputs))
    assert made is not None
    assert "stats" in full.outputs
    return made.graph


@pytest.mark.parametrize(
    "case",
    [
        Case(name="plain", dtype="float16", scale=1.0),
        Case(name="row bias", bias="bhs."),
        Case(name="row bias and residual", bias="b.s.", with_residual=True),
        Case(name="key bias", bias="...t", dtype="float16"),
        Case(name="mask", mask="bhst", k=2),
        Case(name="one key", t=1, mask="bhst"),
        Case(name="causal with lengths", causal=True, key_lengths=(4, 99)),
        Case(name="turned", scale=-0.3, d=36, with_residual=True),
    ],
    ids=lambda case: case.name.replace(" ", "_"),
)
def test_random_operands_of_attentions_gradient_raise_no_alarm(case: Case) -> None:
    """Each way of rewriting it agrees, and all that is compared is finite."""
    part = _backward(case)
    (device,) = jax.devices("cpu")[:1]
    drawn = draw_sets(part, device)[0]
    operands = with_own_results(part, drawn)
    changed = [
        name
        for name, x, y in zip(part.inputs, drawn, operands, strict=True)
        if x is not y
    ]
    assert changed == ["output", "stats"]
    expected = comparable(part, reference_results(part, operands))
    assert all(bool(jnp.isfinite(x).all()) for x in expected)
    ways = legalize(part, H200).candidates
    assert ways
    for way in ways:
        results = flash(way.graph, way.before(operands))
        with jax.disable_jit():  # a loop that is not entered is not compiled
            found = comparable(part, way.after(operands, results))
        assert largest_error(found, expected) < bound(part) / 8
        # What is left of one key's gradients is that of its value.
        count = 3 if case.bias in (None, "bhs.", "b.s.") else 4
        assert len(found) == (1 if case.t == 1 else count)


def test_large_and_empty_and_missing_numbers_are_compared() -> None:
    huge = jnp.full((4,), 1e38, _F32)
    assert largest_error([huge * 1.01], [huge]) == pytest.approx(0.01, rel=1e-3)
    assert largest_error([jnp.zeros(0)], [jnp.zeros(0)]) == 0
    assert largest_error([jnp.zeros(3)], [jnp.zeros(3)]) == 0
    assert largest_error([jnp.ones(3)], [jnp.zeros(3)]) > 1e30
    nan, one = jnp.array([jnp.nan, 1.0]), jnp.ones(2)
    assert largest_error([nan], [one]) == jnp.inf
    assert largest_error([one], [nan]) == 0
    assert largest_error([], []) == 0
    assert largest_error([one, one], [one, 2 * one]) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["avg_pool_backward", "grouped_matmul_backward"])
def test_gradients_that_read_no_results_keep_their_operands(name: str) -> None:
    part = from_json((_GOLDEN / f"{name}.json").read_text().rstrip("\n"))
    operands = draw_sets(part, jax.devices("cpu")[0])[0]
    assert with_own_results(part, operands) == operands


@pytest.mark.parametrize("kind", norms.KINDS)
def test_gradients_of_norms_get_the_statistics_of_their_x(kind: str) -> None:
    forward = norms.Problem(kind=kind, bias=None, with_statistics=True).graph
    nonzero = [name == "output" for name in forward.outputs]
    part = norms.backward_of(forward, nonzero=nonzero)
    drawn = draw_sets(part, jax.devices("cpu")[0])[0]
    operands = dict(zip(part.inputs, with_own_results(part, list(drawn)), strict=True))
    results = dict(
        zip(
            forward.outputs,
            reference_results(forward, [operands[name] for name in forward.inputs]),
            strict=True,
        )
    )
    read = [name for name in part.inputs if name in results]
    assert "rstd" in read
    for name in read:
        np.testing.assert_array_equal(operands[name], results[name])
