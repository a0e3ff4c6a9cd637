# SPDX-License-Identifier: Apache-2.0
"""Tests cuDNN's grouped matmul against NumPy in float64, with NaN in other groups."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import f8, native, plans, ragged_dot
from jax_cudnn.legalize.products.grouped_matmul import (
    BY_CUBLASLT,
    BY_GROUP,
    ONE_KERNEL,
)
from jax_cudnn.reference.products import grouped_tiles
from tests.common.gpu.versions import needs_cudnn
from tests.common.policy import decided_by
from tests.products.shared.grouped import grouped

pytestmark = pytest.mark.gpu

# Contraction, columns, and the sizes of groups with how many rows there are.
_CASES: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "usual": (64, 128, (40, 100, 7, 109), 256),
    "empty groups": (64, 72, (0, 130, 0, 0, 126, 0), 256),
    "all in one": (32, 64, (0, 0, 200), 200),
    "rows in none": (48, 40, (33, 0, 65), 150),
    "all rows in none": (16, 24, (0, 0), 40),
    "odd": (23, 41, (3, 9, 1), 17),
    "one row": (8, 16, (0, 1, 0), 1),
    "one group": (40, 56, (77,), 100),
    "many groups": (64, 64, tuple(i % 5 for i in range(200)), 400),
    "large": (512, 1024, (1000, 24, 3000, 72), 4096),
}
# Large enough for XLA's code to be a loop.
_LOOP = {"in a loop": (1024, 2048, (700, 0, 2500, 1, 129, 1024, 3000, 600), 8192)}
_EACH = pytest.mark.parametrize("name", _CASES)


@pytest.fixture(autouse=True)
def has_grouped_products(request: pytest.FixtureRequest) -> None:
    """Grouped products are run with cuDNN 9.15 and newer."""
    if "xla" not in request.node.name:
        needs_cudnn(91500, "a grouped product")


def _operands(name: str, dtype: Any) -> tuple[jax.Array, ...]:
    """Return rows, matrices, sizes and a cotangent."""
    k, n, sizes, m = {**_CASES, **_LOOP}[name]
    rng = np.random.default_rng(len(name))
    shapes = ((m, k), (len(sizes), k, n), (m, n))
    lhs, rhs, cotangent = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes
    )
    return lhs, rhs, jnp.array(sizes, jnp.int32), cotangent


def _truth(*operands: Any) -> tuple[np.ndarray, ...]:
    """Return the product and its gradients but for that of a bias, which is not."""
    lhs, rhs, sizes, cotangent = operands
    return grouped(lhs, rhs, sizes, cotangent=cotangent)[:3]


def _results(
    *operands: jax.Array, implementation: Any = "cudnn"
) -> tuple[jax.Array, ...]:
    lhs, rhs, sizes, cotangent = operands
    run = functools.partial(
        ragged_dot, group_sizes=sizes, implementation=implementation
    )
    output, back = jax.vjp(run, lhs, rhs)
    return output, *back(cotangent)


def _assert_right(got: tuple[jax.Array, ...], *operands: jax.Array) -> None:
    dtype = operands[0].dtype
    magnitudes = _truth(*(abs(x) for x in operands))
    # f32 operands are multiplied in TF32, with the fraction of f16; sums are f32.
    is_wide = dtype == jnp.float32
    unit = float(jnp.finfo(jnp.float16 if is_wide else dtype).eps)
    operand = 10 * unit if is_wide else 1e-4
    for x, y, size in zip(got, _truth(*operands), magnitudes, strict=True):
        assert x.dtype == dtype
        error = np.abs(np.asarray(x, np.float64) - y)
        assert np.all(error <= unit * np.abs(y) + operand * np.sqrt(size) + 1e-5)
        assert np.all(np.asarray(x, np.float64)[size == 0] == 0)


def _beside_other_groups_of(poison: float) -> tuple[np.ndarray, np.ndarray]:
    """Check the rows of the first group, beside others that hold anything.

    Returns the gradient of the matrices and what it would be with numbers.
    """
    lhs, rhs, sizes, cotangent = _operands("rows in none", jnp.bfloat16)
    want = _truth(lhs, rhs, sizes, cotangent)
    spoilt = (
        lhs.at[33:].set(poison),
        rhs.at[1:].set(poison),
        sizes,
        cotangent.at[33:].set(poison),
    )
    output, grad, matrices = jax.jit(_results)(*spoilt)
    for x, y in zip((output, grad), want[:2], strict=True):
        x = np.asarray(x, np.float64)
        np.testing.assert_allclose(x[:33], y[:33], rtol=2e-2, atol=0.2)
        assert np.all(x[98:] == 0)
    return np.asarray(matrices, np.float64), want[2]


_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
_NO_CUBLAS = "products in groups need cuBLAS 13"


@pytest.fixture(params=[BY_CUBLASLT, BY_GROUP, ONE_KERNEL])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have all products, small ones too, run in one of the ways."""
    of = {"of": "grouped products", "when": {}, "by": "nothing"}
    order = {**of, "ways": [request.param]}
    target = native.device_target(0)
    with decided_by(target, rows=[{**of, "runs": "cudnn"}], orders=[order]):
        if request.param == BY_CUBLASLT:
            lhs, rhs, sizes, _ = _operands("usual", jnp.bfloat16)
            run = functools.partial(ragged_dot, implementation="cudnn")
            if _NO_CUBLAS in str(plans.inspect(run, lhs, rhs, sizes)):
                pytest.skip(_NO_CUBLAS)
        yield request.param


def _told_by(way: str, operands: tuple[jax.Array, ...]) -> None:
    """Check by what `inspect` says that a product and its gradient ran in a way."""
    text = str(plans.inspect(_results, *operands))
    assert ("the host waits for the sizes" in text) == (way == BY_GROUP)
    assert ("one launch of cuBLASLt's" in text) == (way == BY_CUBLASLT)
    assert ("the gradient of b is computed by XLA" in text) == (way == ONE_KERNEL)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@_EACH
def test_results_and_gradients_match_float64(name: str, dtype: Any, way: str) -> None:
    operands = _operands(name, dtype)
    if way != ONE_KERNEL and len(operands[1]) == 1:
        pytest.skip("a single group is a matmul")
    if way == BY_CUBLASLT and dtype == jnp.float32:
        pytest.skip("cuBLASLt's products in groups are of 16 bits")
    if dtype != jnp.float32:
        _told_by(way, operands)
    _assert_right(jax.jit(_results)(*operands), *operands)


@pytest.mark.parametrize(
    ("first", "dtype"),
    [
        (jnp.float8_e4m3fn, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float16),
        (jnp.float8_e4m3fn, jnp.float32),
        (jnp.float8_e5m2, jnp.bfloat16),
        (jnp.float8_e5m2, jnp.float32),
    ],
)
@pytest.mark.parametrize("turned", [False, True], ids=["copied", "along the sum"])
@_EACH
def test_f8_matches_float64(name: str, turned: bool, first: Any, dtype: Any) -> None:
    """By cuBLASLt, whether the matrices are stored along the sum or copied so."""
    lhs, rhs, sizes, _ = _operands(name, jnp.float32)
    if len(rhs) == 1:
        pytest.skip("a single group is a matmul")
    # Rows in no group, and those of other groups, are not read.
    count = int(sizes.sum())
    lhs = lhs.at[count:].set(np.nan).astype(first)
    rhs = rhs.astype(jnp.float8_e4m3fn)
    given = jnp.swapaxes(rhs, 1, 2).copy() if turned else rhs

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        rhs = jnp.swapaxes(rhs, 1, 2) if turned else rhs
        return ragged_dot(
            lhs, rhs, sizes, preferred_element_type=dtype, implementation="cudnn"
        )

    text = str(plans.inspect(run, lhs, given, sizes))
    if _NO_CUBLAS in text:
        pytest.skip(_NO_CUBLAS)
    assert "one launch of cuBLASLt's" in text
    got = np.asarray(jax.jit(run)(lhs, given, sizes), np.float64)
    want, *_ = grouped(lhs, rhs, sizes)
    size, *_ = grouped(abs(lhs.astype(jnp.float32)), abs(rhs.astype("f4")), sizes)
    # Tensor cores of Hopper add products of f8 up with 14 bits.
    bound = float(jnp.finfo(dtype).eps) * np.abs(want) + 2.0**-12 * size
    np.testing.assert_array_less(np.abs(got - want), bound + 1e-5)
    assert np.all(got[count:] == 0)


def test_layers_of_f8_match_their_rounded_operands() -> None:
    """With their gradients; that of the matrices adds up over rows, in bf16."""
    lhs, rhs, sizes, cotangent = _operands("large", jnp.bfloat16)

    def run(how: Any, lhs: jax.Array, rhs: jax.Array, cotangent: jax.Array) -> Any:
        y, back = jax.vjp(
            lambda x, w: f8.ragged_dot(x, w, sizes, implementation=how), lhs, rhs
        )
        return y, *back(cotangent)

    operands = lhs, rhs, cotangent
    text = str(plans.inspect(functools.partial(run, "cudnn"), *operands))
    if _NO_CUBLAS in text:
        pytest.skip(_NO_CUBLAS)
    assert text.count("b is copied: products of f8 read it along the sum") >= 1
    got = jax.jit(functools.partial(run, "cudnn"))(*operands)
    want = jax.jit(functools.partial(run, "xla"))(*operands)
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=2e-2, atol=4e-3 * np.abs(y).max())


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nothing_leaks_into_another_group(poison: float, way: str) -> None:
    """Nor from rows in no group, in tiles that several groups share."""
    found, want = _beside_other_groups_of(poison)
    if way != ONE_KERNEL:
        np.testing.assert_allclose(found[0], want[0], rtol=2e-2, atol=0.2)
        assert np.all(found[1] == 0)


def test_the_sizes_are_read_when_the_kernel_runs(way: str) -> None:
    _assert_sizes_are_read_when_run()


def test_products_of_groups_run_in_loops_and_from_threads(way: str) -> None:
    """Each step, and each thread, has sizes of its own."""
    lhs, rhs, _, _ = _operands("usual", jnp.bfloat16)
    many = jnp.array([(256, 0, 0, 0), (1, 2, 3, 4), (64, 65, 63, 64)], jnp.int32)

    def one(sizes: jax.Array) -> jax.Array:
        return ragged_dot(lhs, rhs, sizes, implementation="cudnn")

    want = np.stack([_truth(lhs, rhs, sizes, lhs @ rhs[0])[0] for sizes in many])
    got = jax.jit(lambda many: jax.lax.map(one, many))(many)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=0.2)
    run = jax.jit(one)
    with ThreadPoolExecutor(4) as pool:
        each = list(pool.map(run, [*many] * 8))
    for i, x in enumerate(each):
        np.testing.assert_allclose(
            np.asarray(x, np.float64), want[i % 3], rtol=2e-2, atol=0.2
        )


@pytest.mark.parametrize("poison", [None, np.nan])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_xlas_loop_over_tiles_matches_float64(dtype: Any, poison: float | None) -> None:
    operands = _operands("in a loop", dtype)
    lhs, rhs, sizes, cotangent = operands
    assert grouped_tiles.pays(lhs[None], rhs, len(rhs))
    run = jax.jit(functools.partial(_results, implementation="xla"))
    if poison is None:
        got = run(*operands)
    else:
        # Rows in no group, and the matrix of a group without rows.
        rows, empty = int(sizes.sum()), int(jnp.argmin(sizes))
        spoilt = rhs.at[empty].set(poison)
        got = run(
            lhs.at[rows:].set(poison), spoilt, sizes, cotangent.at[rows:].set(poison)
        )
    _assert_right(got, *operands)


def test_sums_are_f32_where_asked_for(way: str) -> None:
    lhs, rhs, sizes, cotangent = _operands("usual", jnp.bfloat16)
    run = functools.partial(
        ragged_dot, preferred_element_type=jnp.float32, implementation="cudnn"
    )
    got = jax.jit(run)(lhs, rhs, sizes)
    want = _truth(lhs, rhs, sizes, cotangent)[0]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_in_no_group_are_not_read(poison: float, implementation: str) -> None:
    lhs, rhs, sizes, cotangent = _operands("rows in none", jnp.bfloat16)
    want = _truth(lhs, rhs, sizes, cotangent)
    spoilt = lhs.at[98:].set(poison), rhs, sizes, cotangent.at[98:].set(poison)
    run = functools.partial(_results, implementation=implementation)
    for x, y in zip(jax.jit(run)(*spoilt), want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2e-2, atol=0.2)


def test_bias_and_activation_follow() -> None:
    lhs, rhs, sizes, _ = _operands("rows in none", jnp.bfloat16)
    bias = jnp.arange(rhs.shape[0] * rhs.shape[2], dtype=jnp.float32)
    bias = bias.reshape(rhs.shape[0], rhs.shape[2]) / bias.size
    run = functools.partial(ragged_dot, bias=bias, activation="silu")
    got = jax.jit(functools.partial(run, implementation="cudnn"))(lhs, rhs, sizes)
    want = jax.jit(functools.partial(run, implementation="xla"))(lhs, rhs, sizes)
    np.testing.assert_allclose(
        np.asarray(got, "f4"), np.asarray(want, "f4"), rtol=2e-2, atol=1e-3
    )


def _assert_sizes_are_read_when_run() -> None:
    """One program serves all of them, as the router of each step has it."""
    lhs, rhs, _, cotangent = _operands("usual", jnp.bfloat16)
    traces: list[None] = []

    @jax.jit
    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        traces.append(None)
        return _results(*operands)

    for sizes in ((256, 0, 0, 0), (0, 0, 0, 256), (1, 2, 3, 4), (64, 64, 64, 64)):
        got = run(lhs, rhs, jnp.array(sizes), cotangent)
        want = _truth(lhs, rhs, sizes, cotangent)
        for x, y in zip(got, want, strict=True):
            scale = max(1.0, float(np.abs(y).max()))
            np.testing.assert_allclose(
                np.asarray(x, np.float64), y, rtol=0, atol=1e-2 * scale
            )
    assert len(traces) == 1


@_EACH
def test_runs_repeat_in_every_bit(name: str, way: str) -> None:
    operands = _operands(name, jnp.bfloat16)
    if way != ONE_KERNEL and len(operands[1]) == 1:
        pytest.skip("a single group is a matmul")
    run = jax.jit(_results)
    for a, b in zip(run(*operands), run(*operands), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_auto_is_xla_until_tuned_and_right_after() -> None:
    lhs, rhs, sizes, cotangent = _operands("usual", jnp.bfloat16)

    def run(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_dot(lhs, rhs, sizes)

    report = plans.inspect(run, lhs, rhs, sizes)
    assert [call.implementation for call in report.calls] == ["xla"]
    plans.autotune(run, lhs, rhs, sizes, progress=False)
    want = _truth(lhs, rhs, sizes, cotangent)[0]
    got = np.asarray(jax.jit(run)(lhs, rhs, sizes), np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=0.1)


def test_products_of_groups_are_captured_in_command_buffers(way: str) -> None:
    """Sizes on the device: a program with nothing that waits is one CUDA graph."""
    lhs, rhs, _, _ = _operands("usual", jnp.bfloat16)
    if way == BY_GROUP:
        pytest.skip("the host waits for the sizes")

    def steps(lhs: jax.Array, sizes: jax.Array) -> jax.Array:
        for _ in range(6):
            y = ragged_dot(lhs, rhs, sizes, implementation="cudnn")
            lhs = (lhs + 1e-3 * y[:, : lhs.shape[1]]).astype(lhs.dtype)
        return lhs

    run, plain = jax.jit(steps), jax.jit(steps, compiler_options=_NO_GRAPHS)
    for sizes in ((256, 0, 0, 0), (1, 2, 3, 4), (64, 64, 64, 64)):
        for _ in range(3):
            got = run(lhs, jnp.array(sizes))
        np.testing.assert_array_equal(
            np.asarray(got, "f4"), np.asarray(plain(lhs, jnp.array(sizes)), "f4")
        )
