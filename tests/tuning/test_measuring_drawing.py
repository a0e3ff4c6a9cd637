# SPDX-License-Identifier: Apache-2.0
"""Tests that the arrays that measurements run on are random enough."""

import jax
import numpy as np
import pytest

from jax_cudnn.tuning.drawing import tables, taken

pytestmark = pytest.mark.once

_TABLES = tables(jax.devices("cpu")[0])


def _taken(number: int, *shape: int, table: str = "normal") -> np.ndarray:
    return np.asarray(taken(getattr(_TABLES, table), np.uint32(number), shape))


@pytest.mark.parametrize("shape", [(5000, 1024), (3000, 1, 2048), (2**23,)])
def test_arrays_larger_than_a_table_have_its_moments(shape: tuple[int, ...]) -> None:
    normal, uniform = _taken(3, *shape), _taken(3, *shape, table="uniform")
    assert normal.shape == uniform.shape == shape
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs(uniform.mean() - 0.5) < 0.01
    assert 0 <= uniform.min() < uniform.max() < 1


def test_no_two_rows_and_no_two_arrays_are_the_same() -> None:
    rows = _taken(0, 6000, 1024)
    assert len(np.unique(rows[:, :8], axis=0)) == len(rows)
    other = _taken(1, 6000, 1024)
    assert abs((rows * other).mean()) < 0.01
    assert not np.any(np.all(rows == other, axis=1))


def test_the_same_number_gives_the_same_array() -> None:
    np.testing.assert_array_equal(_taken(5, 7, 9), _taken(5, 7, 9))


def test_arrays_may_be_empty_or_of_one_number() -> None:
    assert _taken(2, 0, 3).shape == (0, 3)
    assert _taken(2).shape == ()
