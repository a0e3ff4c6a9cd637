# SPDX-License-Identifier: Apache-2.0
"""Tests the loop over tiles of rows as a grouped matmul, and where it runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_cudnn import ragged_dot
from jax_cudnn.reference.products import grouped_tiles
from tests.common.devices import mesh_of
from tests.products.shared.grouped import grouped

pytestmark = pytest.mark.once

_K, _N = 3, 5


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_tiles, "_FEWEST_ROWS", 4)
        patch.setattr(grouped_tiles, "_MOST_ROWS", 16)
        yield


def _near(got: jax.Array, want: np.ndarray, dtype: Any) -> None:
    assert got.dtype == dtype
    digits = float(jnp.finfo(dtype).eps)
    # In f32, the sum of up to 70 products loses some digits itself.
    some = (64 if got.dtype == jnp.float32 else 8) * digits
    x = np.asarray(got, np.float64)
    np.testing.assert_allclose(x, want, rtol=2 * digits, atol=some)


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 70),
    sizes=st.lists(
        st.sampled_from([0, 0, 1, 3, 4, 5, 16, 17, 40]), min_size=1, max_size=8
    ),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    spoilt=st.sampled_from([None, np.nan, np.inf]),
)
def test_each_row_meets_the_matrix_of_its_group(
    rows: int, sizes: list[int], dtype: str, spoilt: float | None
) -> None:
    rng = np.random.default_rng(rows)
    shapes = (rows, _K), (len(sizes), _K, _N), (rows, _N)
    narrow_dtype = jnp.dtype(dtype)
    arrays = [rng.standard_normal(shape).astype(narrow_dtype) for shape in shapes]
    a, b, grad = arrays
    want = grouped(*map(jnp.asarray, (a, b)), sizes, cotangent=jnp.asarray(grad))
    if spoilt is not None:
        # What no group holds, and the matrices of groups without rows.
        a[sum(sizes) :], grad[sum(sizes) :] = spoilt, spoilt
        b[np.array(sizes) == 0] = spoilt
    sums = jnp.float32

    @jax.jit
    def run(a: jax.Array, b: jax.Array, grad: jax.Array, sizes: jax.Array) -> Any:
        wide, narrow = (
            grouped_tiles.product(a, b, sizes, dtype, None) for dtype in (sums, a.dtype)
        )
        over_rows = grouped_tiles.product_over_rows(a, grad, sizes, sums, None)
        return wide, narrow, over_rows

    wide, narrow, found = run(*arrays, jnp.asarray(sizes, jnp.int32))
    _near(wide, want.output, sums)
    _near(narrow, want.output, narrow_dtype)
    _near(found, want.matrices, narrow_dtype)


def test_nothing_of_another_group_reaches_a_row() -> None:
    sizes, rows = [5, 0, 17, 9], 40
    rng = np.random.default_rng(0)
    shapes = (rows, _K), (len(sizes), _K, _N), (rows, _N)
    a, b, grad = (
        jnp.asarray(np.asarray(rng.standard_normal(x), jnp.float32)) for x in shapes
    )
    given_sizes = jnp.asarray(sizes, jnp.int32)
    clean = grouped_tiles.product(a, b, given_sizes, a.dtype, None)
    matrices = grouped_tiles.product_over_rows(a, grad, given_sizes, a.dtype, None)
    for group, end in enumerate(np.cumsum(sizes)):
        own = slice(end - sizes[group], end)
        if sizes[group] == 0:
            continue
        bad_a, bad_grad = (x.at[own.start].set(jnp.nan) for x in (a, grad))
        found = grouped_tiles.product(bad_a, b, given_sizes, a.dtype, None)
        is_nan = np.isnan(found).any(1)
        np.testing.assert_array_equal(np.flatnonzero(is_nan), [own.start])
        np.testing.assert_array_equal(found[~is_nan], clean[~is_nan])
        bad = b.at[group].set(jnp.inf)
        found = grouped_tiles.product(a, bad, given_sizes, a.dtype, None)
        others = np.delete(np.arange(rows), own)
        np.testing.assert_array_equal(found[others], clean[others])
        found = grouped_tiles.product_over_rows(a, bad_grad, given_sizes, a.dtype, None)
        is_nan = np.isnan(found).any((1, 2))
        np.testing.assert_array_equal(np.flatnonzero(is_nan), [group])
        np.testing.assert_array_equal(found[~is_nan], matrices[~is_nan])


def test_sizes_that_go_too_far_or_are_negative_are_cut() -> None:
    a, b = jnp.ones((24, _K)), jnp.ones((3, _K, _N))
    sizes = jnp.array([20, 2**30, 2**30], jnp.int32)
    found = grouped_tiles.product(a, b, sizes, a.dtype, None)
    np.testing.assert_array_equal(found, _K)
    found = grouped_tiles.product(a, b, jnp.array([9, -4, 7]), a.dtype, None)
    assert np.isfinite(found).all()


def _lowered(groups: int, rows: int, size: int) -> str:
    def loss(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        y = ragged_dot(lhs, rhs, sizes, implementation="xla")
        return y.astype(jnp.float32).sum()

    given = (
        ((rows, size), "bfloat16"),
        ((groups, size, size), "bfloat16"),
        ((groups,), "int32"),
    )
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given]
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_large_programs_for_a_gpu_have_loops_and_small_ones_do_not() -> None:
    assert "chlo.ragged_dot" not in _lowered(8, 4096, 2048)
    assert _lowered(8, 4096, 2048).count("stablehlo.while") == 3
    for few in (7, 4096, 2048), (8, 4095, 2048):
        assert _lowered(*few).count("chlo.ragged_dot") >= 3
        assert "stablehlo.while" not in _lowered(*few)


@pytest.mark.parametrize(
    "specs",
    [(P("i"), P("i"), P("i")), (P("i"), P(), P()), (P(), P(None, None, "i"), P())],
)
def test_each_device_has_loops_inside_shard_map(specs: tuple[P, ...]) -> None:
    # All operands vary over the devices, rows only, or columns only.
    is_split = specs == (P("i"),) * 3

    def gradients(*operands: jax.Array) -> Any:
        *arrays, sizes = operands

        def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            y = ragged_dot(lhs, rhs, sizes, implementation="xla")
            return y.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(*arrays)

    groups = 16 if is_split else 8
    shapes = (8192, 2048), (groups, 2048, 4096)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    operands.append(jax.ShapeDtypeStruct((groups,), jnp.int32))
    mapped = jax.shard_map(
        gradients, mesh=mesh_of(i=2), in_specs=specs, out_specs=specs[:2]
    )
    lowered = jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.while") == 2


@pytest.mark.parametrize(
    ("total", "groups", "rows"), [(1000, 8, 16), (64, 16, 8), (3, 2, 3), (64, 64, 4)]
)
def test_a_tile_has_twice_as_many_rows_as_a_group(
    total: int, groups: int, rows: int
) -> None:
    assert grouped_tiles._rows_of_tile(total, groups) == rows
