# SPDX-License-Identifier: Apache-2.0
"""Norms of numbers whose squares are near the end of the range of f32.

The range does not depend on how many numbers are normalised. The truth is NumPy's, and
JAX's gradient of the same norm, in float64.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_cudnn
from tests.norms.calls import CALLS, Call, operands

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# Thousands of numbers share statistics, in counts that are powers of two and not.
_LONG = {
    "layer": (3, 2, 4096),
    "layer_two_axes": (65, 3, 67),
    "layer_first": (5000, 3, 2),
    "rms": (3, 2, 5000),
    "adaptive": (2, 2, 3, 4096),
    "group": (2, 33, 47, 6),
    "group_first": (2, 6, 32, 128),
    "instance": (2, 53, 61, 3),
    "instance_first": (2, 3, 16, 512),
    "batch": (37, 111, 3),
    "batch_first": (70, 3, 71),
}
_CASES = {name: replace(CALLS[name], shape=shape) for name, shape in _LONG.items()}
# XLA rewrites formulas of single numbers more freely than those of arrays.
_CASES["batch_one_channel"] = replace(CALLS["batch"], shape=(64, 9, 1))
_EACH = pytest.mark.parametrize("call", _CASES.values(), ids=_CASES)


def _large(call: Call) -> np.ndarray:
    """Return numbers as far from their mean as the range of the norm says."""
    rng = np.random.default_rng(1)
    # Batch norm subtracts an estimate of the mean, which may be as far from it.
    farthest = 9e18 if "batch_norm" in repr(call.function) else 1.8e19
    x = farthest * np.where(rng.integers(0, 2, call.shape) > 0, 1, -1)
    return (x * rng.uniform(0.9, 1, call.shape) * 0.95).astype(np.float32)


def _assert_normalised(call: Call, x: np.ndarray, given: jax.Array) -> None:
    _, scale, bias = operands(call)
    want = call.truth(x, scale, bias)
    output, *statistics = jax.jit(
        lambda x: call.run(x, scale, bias, return_statistics=True)
    )(given)
    np.testing.assert_allclose(output, want["output"], rtol=1e-5, atol=1e-5)
    rstd = np.asarray(statistics[-1], np.float64)
    np.testing.assert_allclose(rstd, want["rstd"], rtol=1e-5)


@_EACH
def test_large_numbers_are_normalised(call: Call) -> None:
    x = _large(call)
    _assert_normalised(call, x, jnp.asarray(x))


@pytest.mark.parametrize(
    ("name", "axis"), [("layer", 2), ("adaptive", 3), ("group_first", 2), ("batch", 0)]
)
def test_large_numbers_on_several_devices_are_normalised(name: str, axis: int) -> None:
    call = _CASES[name]
    if name == "batch":
        call = replace(call, shape=(38, 111, 3))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("i",))
    spec = P(*("i" if i == axis else None for i in range(len(call.shape))))
    x = _large(call)
    given = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    _assert_normalised(call, x, given)


@_EACH
def test_gradients_of_large_numbers(call: Call) -> None:
    x, (_, scale, bias) = _large(call), operands(call)
    cotangent = np.random.default_rng(2).standard_normal(call.shape)

    def gradients(dtype: Any) -> Any:
        given = [jnp.asarray(each, dtype) for each in (x, scale, bias)]
        _, pull = jax.vjp(call.run, *given)
        return [np.asarray(g, np.float64) for g in pull(jnp.asarray(cotangent, dtype))]

    got = gradients(jnp.float32)
    with jax.enable_x64(True):
        want = gradients(jnp.float64)
    for mine, true in zip(got, want, strict=True):
        largest = float(np.abs(true).max())
        # In units of the largest: f32 numbers below 1e-38 do not enter.
        np.testing.assert_allclose(mine / largest, true / largest, atol=2e-5)


def test_a_symbolic_number_of_features_has_the_same_range() -> None:
    x = _large(_CASES["layer"])
    (count,) = jax.export.symbolic_shape("n")
    for function in (jax_cudnn.layer_norm, jax_cudnn.rms_norm):
        spec = jax.ShapeDtypeStruct((3, 2, count), jnp.float32)
        exported = jax.export.export(jax.jit(function))(spec)
        np.testing.assert_allclose(exported.call(x), function(x), rtol=1e-6)


@_EACH
@pytest.mark.parametrize("size", [1e-17, 1e-12, 1.0])
def test_small_numbers_without_an_epsilon_are_normalised(
    call: Call, size: float
) -> None:
    x = np.random.default_rng(3).standard_normal(call.shape) * size
    given = jnp.asarray(x, jnp.float32)
    want = call.truth(given, epsilon=0)["output"]
    got = np.asarray(call.run(given, epsilon=0), np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@_EACH
def test_an_epsilon_that_hides_small_squares_leaves_one_sum(call: Call) -> None:
    """Programs for a GPU compile as fast as the formulas that people write."""

    def sums(epsilon: float) -> int:
        run = functools.partial(call.run, epsilon=epsilon)
        text = jax.jit(run).lower(*operands(call)).as_text()
        return text.count("stablehlo.reduce(")

    assert sums(1e-6) < sums(0.0)
