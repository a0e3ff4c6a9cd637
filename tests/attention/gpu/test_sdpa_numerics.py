# SPDX-License-Identifier: Apache-2.0
"""Tests that attention through cuDNN is as accurate as its dtype allows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn
from tests.attention.shared.cases import (
    ALL,
    HIDDEN,
    KNOWN_BUGS,
    WINDOWS,
    attention,
    make_operands,
    with_gradients,
)
from tests.attention.shared.oracle import numpy_results
from tests.common.gpu.numerics import judge, to_f32

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", ALL, ids=[case.name for case in ALL])
def test_results_and_gradients_match_f32_truth(case, record_property):
    operands = make_operands(case)
    run = functools.partial(
        lambda implementation, arrays: with_gradients(
            attention(case, implementation), operands.cotangents, operands.wanted
        )(*arrays)
    )
    results = run("cudnn", operands.arrays)
    references = run("xla", operands.arrays)
    with jax.default_matmul_precision("highest"):
        truths = run("xla", tuple(to_f32(x) for x in operands.arrays))
    ratios = judge(operands.names, results, references, truths)
    for name, ratio in ratios.items():
        record_property(f"error ratio of {name}", f"{ratio:.2f}")


_LOW = [case for case in KNOWN_BUGS if "minus_1" in case.name]


_SMALL_WINDOWS = [case for case in WINDOWS if "long" not in case.name]


@pytest.mark.parametrize(
    "case", [*HIDDEN, *_LOW, *_SMALL_WINDOWS], ids=lambda case: case.name
)
def test_low_hidden_and_windowed_rows_match_float64_numpy(case, record_property):
    operands = make_operands(case)
    results, references = (
        with_gradients(
            attention(case, implementation), operands.cotangents, operands.wanted
        )(*operands.arrays)
        for implementation in ("cudnn", "xla")
    )
    truth = _truth(case, operands)
    truths = [truth[name] for name in operands.names]
    for name, ratio in judge(operands.names, results, references, truths).items():
        record_property(f"error ratio of {name}", f"{ratio:.2f}")


def _truth(case, operands):
    """Return NumPy's results of a case by the names of its operands."""
    query, key, value, bias, mask, query_lengths, key_lengths = operands.arrays
    given = {
        **{
            role: np.swapaxes(np.asarray(x, np.float64), 1, 2)
            for role, x in (
                ("query", query),
                ("key", key),
                ("value", value),
                ("grad_output", operands.cotangents[0]),
            )
        },
        "bias": None if bias is None else np.asarray(bias, np.float32),
        "mask": mask,
        "query_lengths": _column(query_lengths),
        "key_lengths": _column(key_lengths),
    }
    if case.with_residual:
        given["grad_stats"] = np.swapaxes(operands.cotangents[1], 1, 2)[..., None]
    found = numpy_results(
        {role: x for role, x in given.items() if x is not None},
        scale=case.scale or case.d**-0.5,
        is_causal=case.causal,
        window=case.window or (),
    )
    found["residual"] = np.swapaxes(found.pop("stats")[..., 0], 1, 2)
    for role in ("output", "grad_query", "grad_key", "grad_value"):
        found[role] = np.swapaxes(found[role], 1, 2)
    return found


@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.name)
def test_windows_are_those_of_jax_nn(case):
    """Where every query sees a key, lengths hide none and both head sizes are one."""
    if case.query_lengths or case.s > case.t or min(case.window) < 0 or case.mask:
        case = dataclasses.replace(
            case,
            **{"query_lengths": None, "key_lengths": None, "mask": None},
            **{"t": max(case.s, case.t), "window": tuple(map(abs, case.window))},
        )
    case = dataclasses.replace(case, e=None)
    operands = make_operands(case)
    query, key, value, bias, *_ = operands.arrays
    cotangent = operands.cotangents[0]

    def results(function, *arrays, **options):
        def run(query, key, value, bias, cotangent):
            def call(query, key, value):
                return function(
                    *(query, key, value, bias),
                    is_causal=case.causal,
                    local_window_size=case.window,
                    **options,
                )

            out, pull = jax.vjp(call, query, key, value)
            return out, *pull(cotangent.astype(out.dtype))

        return jax.jit(run)(*arrays)

    arrays = (query, key, value, bias, cotangent)
    found = results(jax_cudnn.sdpa, *arrays, implementation="cudnn")
    with jax.default_matmul_precision("highest"):
        wide = [None if x is None else to_f32(x) for x in arrays]
        theirs = jax.nn.dot_product_attention
        truth = results(theirs, *wide, implementation="xla")
    eps = float(jnp.finfo(jnp.dtype(case.dtype)).eps)
    # With a single key, the gradients of query and key are sums that cancel.
    least = 0.1 * jnp.linalg.norm(to_f32(cotangent))
    for x, y in zip(found, truth, strict=True):
        error = jnp.linalg.norm(to_f32(x) - y)
        error = error / jnp.maximum(jnp.linalg.norm(y), least)
        assert error < 4 * eps, (case.name, float(error))


def _column(lengths):
    return None if lengths is None else np.asarray(lengths).reshape(-1, 1, 1, 1)


def test_a_captured_mask_is_not_folded_at_compile_time():
    mask = jnp.asarray(np.random.default_rng(0).random((1, 1, 272, 368)) < 0.5)
    query = jnp.ones((2, 272, 4, 64), jnp.bfloat16)
    key = jnp.ones((2, 368, 4, 64), jnp.bfloat16)

    def loss(query, key):
        out = jax_cudnn.sdpa(query, key, key, mask=mask, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    text = jax.jit(jax.grad(loss)).lower(query, key).compile().as_text()
    folded = re.findall(r"= (\w+)\[1,1,272,368\]\S* constant\(", text)
    assert set(folded) <= {"pred"}
