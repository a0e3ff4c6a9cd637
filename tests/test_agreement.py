# SPDX-License-Identifier: Apache-2.0
"""Is a plan's result told from a wrong one, whatever the dtype and the size?"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_cudnn import conv, matmul, sdpa
from jax_cudnn.lowering import traced_graphs
from jax_cudnn.measuring.agreement import bound, largest_error, reference_results

pytestmark = pytest.mark.once

_BF16, _F16, _F32 = jnp.bfloat16, jnp.float16, jnp.float32


def _normal(seed: int, shape: tuple[int, ...], dtype: Any = _F32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, _F32).astype(dtype)


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


def test_rounding_is_within_the_bound_and_what_is_missing_is_not() -> None:
    part = _part(matmul, (32, 64), (64, 48))
    a, b = _normal(0, (1, 32, 64), _BF16), _normal(1, (1, 64, 48), _BF16)
    (expected,) = reference_results(part, [a, b])
    rounded = (a[..., :32] @ b[:, :32] + a[..., 32:] @ b[:, 32:]).astype(_BF16)
    assert 0 < largest_error([rounded], [expected]) < bound(part)
    assert largest_error([a[..., :60] @ b[:, :60]], [expected]) > bound(part)
    assert largest_error([expected.at[..., 0].set(0)], [expected]) > bound(part)


@pytest.mark.parametrize("op", ["conv", "sdpa"])
def test_the_reference_agrees_with_itself_in_the_operands_dtype(op: str) -> None:
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
    operands = [_normal(i, shape, _BF16) for i, shape in enumerate(shapes)]
    expected = reference_results(part, operands)
    assert largest_error(expected, expected) == 0
    wide = [x.astype(_F32) for x in expected]
    assert largest_error(wide, expected) == 0
    assert largest_error([-x for x in expected], expected) == pytest.approx(2)


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
