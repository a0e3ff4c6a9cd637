# SPDX-License-Identifier: Apache-2.0
"""Derivatives of norms, vmap over any operands, and which graphs they are."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.norms.calls import CALLS, Call, operands

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_EACH = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
# Those whose kernel may add a residual.
_ROWS = pytest.mark.parametrize(
    "call",
    [call for name, call in CALLS.items() if name.startswith(("layer", "rms"))],
    ids=[name for name in CALLS if name.startswith(("layer", "rms"))],
)
_TWICE = [CALLS[name] for name in ("layer", "rms", "adaptive", "group", "batch")]


@_EACH
def test_derivatives_agree_in_both_modes_and_twice(call: Call) -> None:
    with jax.enable_x64(True):
        x, scale, bias = operands(call, dtype=np.float64)
        other = operands(call, 1, np.float64)[0] / 4

        @jax.jit
        def run(x: Any, scale: Any, bias: Any, other: Any) -> Any:
            return call.run(
                x,
                scale,
                bias,
                residual=other,
                activation="tanh",
                return_statistics=True,
            )

        order = 2 if call in _TWICE else 1
        check_grads(run, (x, scale, bias, other), order=order, modes=("fwd", "rev"))


@_EACH
def test_the_gradient_of_bf16_is_near_that_of_f64(call: Call) -> None:
    arrays = operands(call, dtype=jnp.bfloat16)

    def run(*arrays: Any) -> Any:
        output, *more = call.run(*arrays, return_statistics=True)
        wide = output.astype(more[0].dtype)
        return sum(jnp.sum(jnp.sin(each)) for each in (wide, *more))

    got = jax.grad(run, argnums=(0, 1, 2))(*arrays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        want = jax.jit(jax.grad(run, argnums=(0, 1, 2)))(*wide)
    for one, two in zip(got, want, strict=True):
        assert one.dtype == jnp.bfloat16
        two = np.asarray(two)
        error = np.linalg.norm(np.asarray(one, np.float64) - two)
        assert error <= 2e-2 * np.linalg.norm(two)


@_ROWS
def test_the_gradient_of_the_sum_alone_is_that_of_a_sum(call: Call) -> None:
    """Whatever the norm is: NaN of a row that is constant or not finite stays there."""
    x, scale, _ = operands(call)
    x = jnp.zeros_like(x).at[(0,) * x.ndim].set(jnp.inf)
    other = jnp.ones_like(x)
    cotangent = operands(call, 1)[0]

    def total(x: Any, other: Any, scale: Any) -> Any:
        return call.run(x, scale, residual=other, epsilon=0.0)[1]

    _, pull = jax.vjp(total, x, other, scale)
    for grad in pull(cotangent)[:2]:
        np.testing.assert_array_equal(grad, cotangent)
    np.testing.assert_array_equal(pull(cotangent)[2], jnp.zeros_like(scale))
    text = str(
        jax.make_jaxpr(lambda *args: jax.vjp(total, *args)[1](cotangent))(
            x, other, scale
        )
    )
    assert "_backward" not in text


@_ROWS
def test_only_the_sum_is_kept_for_the_gradient(call: Call) -> None:
    x, scale, bias = operands(call)

    def run(x: Any, other: Any, scale: Any, bias: Any) -> Any:
        return call.run(x * 2, scale, bias, residual=other * 3)

    _, pull = jax.vjp(run, x, x, scale, bias)
    kept = {id(each): each for each in jax.tree.leaves(pull)}
    large = [each for each in kept.values() if getattr(each, "size", 0) == x.size]
    has_large_factors = scale.size == x.size
    assert len(large) <= 1 + 2 * has_large_factors


_SUBSETS = [s for s in itertools.product((False, True), repeat=6) if any(s)]


def _with_derivatives(
    call: Call,
    x: Any,
    scale: Any,
    bias: Any,
    cotangent: Any,
    residual: Any,
    of_sum: Any,
) -> Any:
    """Return results, gradients for cotangents, and the derivative along one.

    ``of_sum`` is the cotangent of the sum with the residual.
    """

    def run(x: Any, scale: Any, bias: Any, residual: Any) -> Any:
        return call.run(x, scale, bias, residual=residual, return_statistics=True)

    output, pull = jax.vjp(run, x, scale, bias, residual)
    more = [jnp.ones_like(each) for each in output[2:]]
    moved = jax.jvp(lambda x: run(x, scale, bias, residual), (x,), (cotangent,))
    return output, pull((cotangent, of_sum, *more)), moved


@_EACH
@pytest.mark.parametrize("seed", range(2))
def test_vmap_of_any_operands_and_cotangents(call: Call, seed: int) -> None:
    """Examples of random subsets, on random axes, against a loop over them."""
    rng = np.random.default_rng(seed)
    run = jax.jit(functools.partial(_with_derivatives, call))
    for _ in range(2):
        batched = _SUBSETS[rng.integers(len(_SUBSETS))]
        full = [*operands(call, seed)]
        full += [operands(call, seed + more)[0] for more in (9, 10, 11)]
        axes = [
            int(rng.integers(x.ndim + 1)) if is_in else None
            for x, is_in in zip(full, batched, strict=True)
        ]
        examples = [
            x if axis is None else jnp.stack([x, x * 2 + 1, 3 - x], axis)
            for x, axis in zip(full, axes, strict=True)
        ]
        got = jax.tree.leaves(jax.jit(jax.vmap(run, in_axes=axes))(*examples))
        for i in range(3):
            one = [
                x if axis is None else jnp.take(x, i, axis)
                for x, axis in zip(examples, axes, strict=True)
            ]
            for a, b in zip(got, jax.tree.leaves(run(*one)), strict=True):
                scale = float(jnp.max(jnp.abs(b)))
                np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=2e-5 * scale + 1e-6)


def test_examples_share_a_kernel() -> None:
    """Of x they fold into rows, and where all has examples into groups or channels."""
    for name, axes, is_one in (
        ("layer", (0, None, None), True),
        ("layer", (0, 0, None), False),
        ("rms", (0, None, None), True),
        ("adaptive", (0, 0, 0), True),
        ("group", (0, None, None), True),
        ("group", (0, 0, 0), True),
        ("instance", (0, 0, None), True),
        ("batch", (0, 0, 0), True),
        ("batch", (0, None, None), True),
    ):
        call = CALLS[name]
        examples = [
            x if axis is None else jnp.stack([x] * 3)
            for x, axis in zip(operands(call), axes, strict=True)
        ]
        text = str(jax.make_jaxpr(jax.vmap(call.run, in_axes=axes))(*examples))
        assert (text.count("cudnn_graph[") == 1) == is_one, name


def test_the_gradient_is_two_graphs() -> None:
    for name, call in CALLS.items():

        def loss(*arrays: Any, call: Call = call) -> jax.Array:
            return jnp.sum(call.run(*arrays) ** 2)

        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*operands(call))
        assert str(jaxpr).count("cudnn_graph[") == 2, name


def test_remat_keeps_the_statistics_by_name() -> None:
    call = CALLS["layer"]
    x, scale, bias = operands(call)
    names = ("cudnn_layer_norm_mean", "cudnn_layer_norm_rstd")
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    run = jax.checkpoint(lambda x: call.run(x, scale, bias), policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(run(x) ** 2)))(x))
    assert all(name in jaxpr for name in names)
    want = jax.grad(lambda x: jnp.sum(call.run(x, scale, bias) ** 2))(x)
    got = jax.grad(lambda x: jnp.sum(run(x) ** 2))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
