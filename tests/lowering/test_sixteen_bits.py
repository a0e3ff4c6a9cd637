# SPDX-License-Identifier: Apache-2.0
"""Every operation runs in bf16 and f16 on a CPU, forward, in gradients and under vmap.

XLA for a CPU has no code for some products of 16 bits with sums in f32, which depends
on how vmap has arranged their axes. The truth is the same call in f32.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SIZES = jnp.array([1, 2, 1])
_IMAGES = ("NHWC", "HWIO", "NHWC")


def _ragged(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.ragged_dot(x, w, _SIZES, activation="tanh")


def _matmul(x: Any, w: Any) -> jax.Array:
    return jax_cudnn.matmul(x, w, activation="silu")


def _gated(x: Any, gate: Any, up: Any) -> jax.Array:
    return jax_cudnn.gated_matmul(x, gate, up, activation="silu")


def _dot_general(x: Any, y: Any) -> jax.Array:
    return jax_cudnn.dot_general(x, y, (([0], [1]), ([2], [0])))


def _conv(x: Any, w: Any) -> jax.Array:
    options: dict[str, Any] = {"window_strides": (2, 1), "dimension_numbers": _IMAGES}
    return jax_cudnn.conv(x, w, padding="SAME", **options)


def _conv_groups(x: Any, w: Any) -> jax.Array:
    options: dict[str, Any] = {"feature_group_count": 2, "dimension_numbers": _IMAGES}
    return jax_cudnn.conv(x, w, padding="SAME", **options)


def _sdpa(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, v, is_causal=True)


def _biased(q: Any, k: Any, bias: Any) -> jax.Array:
    return jax_cudnn.sdpa(q, k, k, bias)


def _cached(q: Any, k: Any, v: Any) -> jax.Array:
    return jax_cudnn.cached_sdpa(q, k, v, jnp.array([5, 7]))


_KEYS = (2, 7, 2, 8)
CALLS: dict[Any, tuple[tuple[int, ...], ...]] = {
    _ragged: ((4, 8), (3, 8, 2)),
    _matmul: ((2, 4, 8), (8, 3)),
    jax_cudnn.matmul: ((2, 4, 8), (2, 8, 6)),
    _gated: ((4, 8), (8, 6), (8, 6)),
    _dot_general: ((8, 4, 3), (3, 8, 6)),
    _conv: ((2, 6, 5, 4), (3, 3, 4, 4)),
    _conv_groups: ((2, 6, 5, 4), (3, 3, 2, 4)),
    _sdpa: ((2, 5, 4, 8), _KEYS, _KEYS),
    _biased: ((2, 5, 4, 8), _KEYS, (1, 4, 5, 7)),
    _cached: ((2, 2, 4, 8), _KEYS, _KEYS),
    jax_cudnn.layer_norm: ((3, 8), (8,)),
    jax_cudnn.batch_norm: ((3, 4, 8), (8,)),
}
CASES = [
    (function, axes)
    for function, shapes in CALLS.items()
    for axes in itertools.product((None, 0), repeat=len(shapes))
]


def _run(function: Any, axes: tuple[int | None, ...], given: list[Any]) -> Any:
    def one(*operands: Any) -> Any:
        def loss(*operands: Any) -> Any:
            result = function(*operands)
            return jnp.sum(jnp.sin(result.astype(jnp.float32))), result

        numbers = tuple(range(len(operands)))
        return jax.value_and_grad(loss, numbers, has_aux=True)(*operands)

    every = one if not any(axis == 0 for axis in axes) else jax.vmap(one, axes)
    return jax.jit(every)(*given)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("function", "axes"), CASES)
def test_narrow_operands_run_and_are_right(
    function: Any, axes: Any, dtype: Any
) -> None:
    rng = np.random.default_rng(len(axes))
    given = [
        jnp.asarray(
            np.asarray(
                0.5 * rng.standard_normal((*([2] if axis == 0 else []), *shape)), dtype
            )
        )
        for axis, shape in zip(axes, CALLS[function], strict=True)
    ]
    got = _run(function, axes, given)
    want = _run(function, axes, [x.astype(jnp.float32) for x in given])
    # The result, its sine's slope and the gradient are rounded, a sum at a time.
    steps = 16 * float(jnp.finfo(dtype).eps)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        atol = steps * max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(np.asarray(x, np.float32), y, rtol=0, atol=atol)
