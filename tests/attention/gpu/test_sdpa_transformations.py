# SPDX-License-Identifier: Apache-2.0
"""Tests JAX's transformations of attention on a GPU, with cuDNN underneath."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jax_cudnn
from tests.attention.shared.cases import Case, make_operands
from tests.common.gpu.numerics import judge, to_f32

pytestmark = pytest.mark.gpu

_B, _S, _T = 2, 67, 61
_CASE = Case(name="transformations", b=_B, s=_S, t=_T, h=6, k=3, d=40, e=24, bias="hst")
_N = 3


def _loss(implementation):
    def loss(q, k, v, bias):
        out, lse = jax_cudnn.sdpa(
            q, k, v, bias, implementation=implementation, return_residual=True
        )
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(jnp.sin(lse))

    return loss


def _value_and_grad(implementation):
    return jax.value_and_grad(_loss(implementation), argnums=(0, 1, 2, 3))


def _check(function, operands):
    """Judge function("cudnn") against function("xla") in f32."""
    results = jax.tree.leaves(function("cudnn")(*operands))
    references = jax.tree.leaves(function("xla")(*operands))
    with jax.default_matmul_precision("highest"):
        truths = jax.tree.leaves(function("xla")(*map(to_f32, operands)))
    judge([f"leaf {i}" for i in range(len(results))], results, references, truths)


@pytest.mark.parametrize("subset", list(itertools.product((False, True), repeat=4))[1:])
def test_vmap_of_gradients_over_every_operand_subset(subset):
    single = make_operands(_CASE).arrays[:4]
    many = [make_operands(_CASE, seed).arrays[:4] for seed in range(_N)]
    axes = tuple((i % 3 if is_in else None) for i, is_in in enumerate(subset))
    operands = [
        jnp.stack([m[i] for m in many], axis=axis) if axis is not None else single[i]
        for i, axis in enumerate(axes)
    ]
    _check(lambda how: jax.jit(jax.vmap(_value_and_grad(how), in_axes=axes)), operands)


def test_nested_vmap():
    q, k, v, bias = make_operands(_CASE).arrays[:4]
    q = jnp.stack([jnp.stack([q, 2 * q, -q]), jnp.stack([q, q / 2, 3 * q])])
    inner = lambda how: jax.vmap(_value_and_grad(how), in_axes=(0, None, None, None))  # noqa: E731
    _check(
        lambda how: jax.jit(jax.vmap(inner(how), in_axes=(0, None, None, None))),
        (q, k, v, bias),
    )


def test_scan_and_remat():
    q, k, v, bias = make_operands(
        Case(name="scan", s=61, t=61, d=32, h=4, k=4, bias="hst")
    ).arrays[:4]

    def layers(how):
        @jax.checkpoint
        def layer(x, _):
            y = jax_cudnn.sdpa(x, k, v, bias, is_causal=True, implementation=how)
            return x + y, None

        def loss(x):
            return jnp.sum(
                lax.scan(layer, x, None, length=4)[0].astype(jnp.float32) ** 2
            )

        return jax.jit(jax.grad(loss))

    results, references = layers("cudnn")(q), layers("xla")(q)
    k, v, bias = map(to_f32, (k, v, bias))
    with jax.default_matmul_precision("highest"):
        truths = layers("xla")(to_f32(q))
    judge(["gradient"], [results], [references], [truths])


def test_forward_mode_and_second_order_run_with_the_reference():
    operands = make_operands(_CASE).arrays[:4]
    tangents = make_operands(_CASE, 1).arrays[:4]
    _check(
        lambda how: jax.jit(
            lambda *x: jax.jvp(_loss(how), x, tangents_like(x, tangents))
        ),
        operands,
    )
    _check(
        lambda how: jax.jit(
            lambda *x: jax.jvp(
                jax.grad(_loss(how), argnums=(0, 1)), x, tangents_like(x, tangents)
            )[1]
        ),
        operands,
    )


def tangents_like(primals, tangents):
    return tuple(t.astype(x.dtype) for x, t in zip(primals, tangents, strict=True))


def test_jacrev_and_donation():
    q, k, v = make_operands(Case(name="jac", s=3, t=5, d=8, h=2, k=2)).arrays[:3]
    _check(
        lambda how: jax.jit(
            jax.jacrev(
                lambda q, k, v: jax_cudnn.sdpa(q, k, v, implementation=how)[
                    0, :2, 0, :3
                ]
            )
        ),
        (q, k, v),
    )
    run = jax.jit(
        lambda q, k, v: jax_cudnn.sdpa(q, k, v, implementation="cudnn"),
        donate_argnums=0,
    )
    expected = np.asarray(run(q.copy(), k, v), np.float32)
    np.testing.assert_array_equal(np.asarray(run(q.copy(), k, v), np.float32), expected)


def test_export_round_trip():
    operands = make_operands(_CASE).arrays[:4]
    function = jax.jit(_value_and_grad("cudnn"))
    exported = export.export(function, disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS)(
        *operands
    )
    again = export.deserialize(exported.serialize())
    for x, y in zip(
        jax.tree.leaves(again.call(*operands)),
        jax.tree.leaves(function(*operands)),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=2e-2
        )


def test_program_lowered_without_a_gpu_runs_here():
    """The scratch target: the plan and its workspace come at run time."""
    operands = make_operands(_CASE).arrays[:4]
    function = jax.jit(_value_and_grad("cudnn"))
    from jax_cudnn.lowering import devices

    real = devices.local_target
    devices.local_target = lambda: None
    try:
        exported = export.export(
            function,
            platforms=("cuda",),
            disabled_checks=jax_cudnn.EXPORT_SAFETY_CHECKS,
        )(*operands)
    finally:
        devices.local_target = real
    assert "jax_cudnn.graph_scratch" in exported.mlir_module()
    for x, y in zip(
        jax.tree.leaves(exported.call(*operands)),
        jax.tree.leaves(_value_and_grad("cudnn")(*operands)),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=2e-2
        )


def test_ahead_of_time_compilation():
    operands = make_operands(_CASE).arrays[:4]
    compiled = jax.jit(_value_and_grad("cudnn")).lower(*operands).compile()
    value, _ = compiled(*operands)
    assert np.isfinite(float(value))
