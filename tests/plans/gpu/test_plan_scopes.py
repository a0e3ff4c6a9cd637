# SPDX-License-Identifier: Apache-2.0
"""Tests that options, scopes and tuning blocks reach the plans that run under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from jax_cudnn import UnsupportedError, plans
from jax_cudnn.plans import PlanOptions

pytestmark = pytest.mark.gpu

_JIT = "RUNTIME_COMPILATION"


def _normal(seed: int, *shape: int, dtype: jax.typing.DTypeLike = jnp.float16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


# --- options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [PlanOptions(required_notes=(_JIT,)), PlanOptions(refused_notes=(_JIT,))],
    ids=["compiled at run time", "precompiled"],
)
def test_notes_decide_which_engine_multiplies(options):
    a, b = _normal(1, 4, 64, 128), _normal(2, 4, 128, 64)

    def product(a, b):
        return jax_cudnn.matmul(a, b, plan=options, implementation="cudnn")

    (call,) = plans.inspect(product, a, b).calls
    assert (_JIT in call.behavior_notes) == bool(options.required_notes)
    assert call.why == "requested"
    found = np.asarray(jax.jit(product)(a, b), np.float64)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    # f16 rounds once, to 11 bits.
    np.testing.assert_allclose(found, expected, rtol=2**-10, atol=2**-10)


def test_what_no_plan_satisfies_is_xlas_or_an_error():
    a, b = _normal(1, 64, 128), _normal(2, 128, 64)
    impossible = PlanOptions(engines=(98765,))
    with plans.using(impossible):
        (call,) = plans.inspect(jax_cudnn.matmul, a, b).calls
        assert call.implementation == "xla"
        assert any("98765" in reason for reason in call.reasons)
        result = jax.jit(jax_cudnn.matmul)(a, b)
        with pytest.raises(UnsupportedError, match="98765"):
            jax.jit(lambda a, b: jax_cudnn.matmul(a, b, implementation="cudnn"))(a, b)
    np.testing.assert_array_equal(result, jax.jit(jnp.matmul)(a, b))


def _layer(x, w):
    return jax_cudnn.conv(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        activation="silu",
        implementation="cudnn",
    )


def _attention(q, k):
    return jax_cudnn.sdpa(q, k, k, is_causal=True, implementation="cudnn")


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_layer, ((8, 56, 56, 64), (3, 3, 64, 64))),
        (_attention, ((2, 1024, 8, 128), (2, 1024, 8, 128))),
    ],
    ids=["conv", "sdpa"],
)
def test_deterministic_gradients_are_equal_bit_by_bit(function, shapes):
    operands = [_normal(i, *shape) for i, shape in enumerate(shapes)]

    def loss(*operands):
        return jnp.sum(function(*operands).astype(jnp.float32))

    with plans.using(PlanOptions(deterministic=True)):
        gradient = jax.jit(jax.grad(loss, (0, 1)))
        first = gradient(*operands)
        for call in plans.inspect(jax.grad(loss, (0, 1)), *operands).calls:
            assert "NONDETERMINISTIC" not in call.numeric_notes
        for _ in range(19):
            for a, b in zip(gradient(*operands), first, strict=True):
                np.testing.assert_array_equal(
                    np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16)
                )


# --- tuning ---------------------------------------------------------------------------


def test_a_block_tunes_what_is_compiled_in_it(table):
    a, b = _normal(3, 512, 256), _normal(4, 256, 384)

    def function(a, b):
        return jax_cudnn.matmul(a, b, activation="gelu")

    with plans.autotuning(progress=False) as tuning:
        inside = jax.jit(function)(a, b)
        assert len(tuning.choices) == 1
        jax.jit(function)(a, b)
    assert table.all() == tuning.choices
    assert [call.why for call in plans.inspect(function, a, b).calls] == ["tuned"]
    np.testing.assert_array_equal(jax.jit(function)(a, b), inside)


def test_what_there_is_no_time_for_stays_as_it_is(table):
    a, b = _normal(3, 512, 256), _normal(4, 256, 384)
    tuning = plans.autotune(jax_cudnn.matmul, a, b, budget_s=0, progress=False)
    assert (tuning.choices, tuning.left_count) == ({}, 1)
    assert "not measured, for lack of time: 1" in str(tuning)
    assert not table.all()


def test_restricted_plans_are_tuned_among_themselves(table):
    a, b = _normal(3, 512, 256), _normal(4, 256, 384)
    precompiled = PlanOptions(refused_notes=(_JIT,))

    def function(a, b, plan=precompiled):
        return jax_cudnn.matmul(a, b, plan=plan, implementation="cudnn")

    tuning = plans.autotune(function, a, b, progress=False, whole_program=False)
    assert len(tuning.choices) == 1
    (call,) = plans.inspect(function, a, b).calls
    assert call.why == "tuned"
    assert _JIT not in call.behavior_notes
    (free,) = plans.inspect(lambda a, b: function(a, b, plan=None), a, b).calls
    assert free.why == "heuristic"
