# SPDX-License-Identifier: Apache-2.0
"""Tests sum, max and min at the end of a matmul's kernel, by every plan.

Judged against float64 on the CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import native
from jax_cudnn.graph import to_json
from jax_cudnn.legalize import legalize
from jax_cudnn.lowering import subprograms
from tests.common.gpu.pinned import pinned

pytestmark = pytest.mark.gpu

# Of an array, axes, and the module that computes: jax.numpy, or NumPy for the truth.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda y, axis, m: m.sum(y, axis),
    "squares": lambda y, axis, m: m.sum(m.square(y), axis),
    "max": lambda y, axis, m: m.max(y, axis),
    "min": lambda y, axis, m: m.min(y, axis),
    "amax": lambda y, axis, m: m.max(m.abs(y), axis),
    "two": lambda y, axis, m: (m.max(y, axis), m.min(y, axis)),
    "with the product": lambda y, axis, m: (y, m.max(y, axis)),
}
_AXES = ((2,), (1,), (0, 1, 2))
_SHAPES = (((1, 200, 64), (1, 64, 376)), ((3, 256, 128), (3, 128, 512)))


def _operands(shapes: Any, dtype: str, poison: str) -> list[jax.Array]:
    numbers = np.random.default_rng(0)
    a, b = (numbers.standard_normal(shape) for shape in shapes)
    if poison == "nan":
        a[0, 5, 3] = np.nan
    elif poison == "inf":
        a[0, 5, 3], a[0, 9, 1] = np.inf, -np.inf
    elif poison == "all -inf":
        a[0, 6], b[0] = -np.inf, np.abs(b[0]) + 0.1
    elif poison == "negative":
        a, b = -np.abs(a) - 0.1, np.abs(b) + 0.1
    return [jnp.asarray(x, dtype) for x in (a, b)]


def _close(found: Any, truth: Any, terms: int, dtype: str) -> None:
    is_half = found.dtype == jnp.float16
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(truth))
    is_finite = np.isfinite(truth)
    if is_half:
        truth = np.where(np.abs(truth) > 65504, np.sign(truth) * np.inf, truth)
        is_finite = np.isfinite(truth)
    np.testing.assert_array_equal(found[np.isinf(truth)], truth[np.isinf(truth)])
    # f32 operands are multiplied in TF32. Sums of many are added up one by one.
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-10}[dtype]
    size = np.max(np.abs(truth[is_finite]), initial=1.0)
    error = np.max(np.abs(found[is_finite] - truth[is_finite]), initial=0)
    assert error <= (2 * unit + terms * 2.0**-24) * size, (error, size)


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_plan(name: str, dtype: str) -> None:
    """Of some sizes, axes and operands; the fewest plans of each that cover engines."""
    target = native.device_target(0)
    launched = 0
    for shapes in _SHAPES:
        for axis in _AXES:

            def run(a: Any, b: Any, axis: Any = axis) -> Any:
                return _FUNCTIONS[name](jnp.matmul(a, b), axis, jnp)

            like = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
            closed = jax.make_jaxpr(jax_cudnn.fuse(run, strict=True))(*like)
            (traced,) = subprograms(closed.jaxpr)
            graph = traced.graph
            (rewrite,) = (
                way
                for way in legalize(graph, target).candidates
                if any(node.kind == "reduction" for node in way.graph.nodes)
            )
            every = native.candidates(to_json(rewrite.graph))
            listed = [each for each in every if not each.refusal]
            # The first of each engine, and the last one: others differ in tiles.
            chosen = {each.engine: each for each in reversed(listed)}
            for candidate in {*chosen.values(), listed[-1]}:
                compiled = pinned(graph, rewrite, target, candidate.request)
                for poison in ("", "nan", "inf", "all -inf", "negative"):
                    arrays = _operands(shapes, dtype, poison)
                    results = compiled(*arrays)
                    with np.errstate(invalid="ignore"):
                        # XLA's maximum on a CPU may lose a NaN.
                        a, b = (np.asarray(x, np.float64) for x in arrays)
                        truth = jax.tree.leaves(_FUNCTIONS[name](a @ b, axis, np))
                    made = dict(zip(graph.outputs, results, strict=True))
                    assert len(made) == len(truth)
                    by_shape = sorted(made.values(), key=lambda x: -x.size)
                    wanted = sorted(truth, key=lambda x: -x.size)
                    if name == "two":
                        by_shape, wanted = _by_value(by_shape), _by_value(wanted)
                    for found, want in zip(by_shape, wanted, strict=True):
                        terms = shapes[0][1] * shapes[1][2]
                        _close(np.reshape(found, want.shape), want, terms, dtype)
                launched += 1
    assert launched


def _by_value(arrays: Any) -> list[Any]:
    """Sort the largest and the smallest elements: nothing says which is which."""

    def middle(array: Any) -> float:
        numbers = np.asarray(array, np.float64)
        known = numbers[~np.isnan(numbers)]
        return float(np.median(known)) if known.size else 0.0

    return sorted(arrays, key=middle)


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("implementation", ["cudnn", "auto"])
def test_fused_functions_and_their_gradients(name: str, implementation: str) -> None:
    shapes = ((2, 2048, 64), (2, 64, 4096))
    arrays = _operands(shapes, "bfloat16", "")

    def run(a: Any, b: Any) -> Any:
        return _FUNCTIONS[name](jnp.matmul(a, b), (2,), jnp)

    fused = jax_cudnn.fuse(run, strict=True, implementation=implementation)

    def loss(function: Any) -> Any:
        def total(a: Any, b: Any) -> Any:
            wide = [x.astype(jnp.float32) for x in jax.tree.leaves(function(a, b))]
            # The sine of a large number would be one of the last bits.
            sizes = [jax.lax.stop_gradient(jnp.max(jnp.abs(x))) for x in wide]
            return sum(
                jnp.sum(jnp.sin(x / size)) for x, size in zip(wide, sizes, strict=True)
            )

        return jax.jit(jax.value_and_grad(total, (0, 1)))

    found, wanted = (jax.tree.leaves(loss(each)(*arrays)) for each in (fused, run))
    for one, two in zip(found, wanted, strict=True):
        one, two = (np.asarray(x, np.float64) for x in (one, two))
        # Of elements that are equal in bf16, either may be the largest.
        assert np.linalg.norm(one - two) <= 0.05 * np.linalg.norm(two), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_comparisons_of_what_is_not_finite(dtype: str) -> None:
    """Of infinities with each other and with NaN, within a kernel."""
    numbers = np.array([np.inf, -np.inf, np.nan, 1.0, 0.0, -2.0, 5.0, 7.0])
    a = jnp.asarray(np.broadcast_to(numbers[:, None], (8, 8)), dtype)
    row = jnp.asarray(numbers[None], dtype)
    failures: list[str] = []
    for name in (
        "equal",
        "not_equal",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
    ):
        compare = getattr(jnp, name)

        def against(x: Any, y: Any, other: Any, compare: Any = compare) -> Any:
            product = jnp.matmul(x, y)
            one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
            return jnp.where(compare(product, other), one, zero)

        fused = jax_cudnn.fuse(against, strict=True, implementation="cudnn")
        # One column times one row of ones: no products with 0.
        operands = (a[:, :1], jnp.ones((1, 8), dtype))
        found = np.asarray(fused(*operands, row), np.float32)
        want = np.asarray(against(*operands, row), np.float32)
        if not np.array_equal(found, want):
            failures.append(f"{name}: {np.argwhere(found != want).tolist()}")
    assert not failures, failures
