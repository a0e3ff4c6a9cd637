# SPDX-License-Identifier: Apache-2.0
"""Tests how kernels get the cotangent of the log-sum-exp, which they do not take."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn.legalize import legalize
from tests.attention.shared.flash import flash
from tests.attention.shared.legal import HOPPER
from tests.attention.shared.oracle import attention_graph, backward_graph
from tests.common.drawn_operands import draw_arrays

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SIZES = {"b": 2, "s": 5, "t": 7, "h": 6, "k": 3, "d": 5, "e": 3}


@pytest.mark.parametrize(("e", "padded"), [(3, 8), (5, 8), (6, 16), (8, 16), (64, 72)])
def test_it_takes_three_spare_columns(e: int, padded: int) -> None:
    forward = attention_graph(sizes={**_SIZES, "e": e}, dtype="bf16", with_stats=True)
    graph = backward_graph(forward, with_grad_stats=True)
    (rewrite,) = legalize(graph, HOPPER).candidates
    for name in ("value", "output", "grad_output", "grad_value"):
        assert rewrite.graph.tensor(name).dims[3] == padded
    assert rewrite.graph.tensor("query").dims[3] == 8


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_it_keeps_f32_accuracy(dtype: Any) -> None:
    # Two keys with equal scores and values 1 and -1: the output is 0, and the slope of
    # the first score is (g + sum of dO) / 2. With g = 192 + 3/16 + 2^-15 and dO = -192,
    # -3/16 it is g's last bits alone, which two 16-bit parts would lose.
    last = 2.0**-15
    sizes = {"b": 1, "s": 3, "t": 2, "h": 1, "k": 1, "d": 8, "e": 2}
    name = "bf16" if dtype == jnp.bfloat16 else "f16"
    forward = attention_graph(sizes=sizes, dtype=name, scale=1.0, with_stats=True)
    graph = backward_graph(forward, with_grad_stats=True)
    grad_output = jnp.array([-192, -3 / 16], dtype)
    values = {
        "query": jnp.ones((1, 3, 1, 8), dtype),
        "key": jnp.zeros((1, 2, 1, 8), dtype),
        "value": jnp.array([[1, 1], [-1, -1]], dtype).reshape(1, 2, 1, 2),
        "output": jnp.zeros((1, 3, 1, 2), dtype),
        "stats": jnp.full((1, 1, 3, 1), np.log(2), jnp.float32),
        "grad_output": jnp.tile(grad_output.reshape(1, 1, 1, 2), (1, 3, 1, 1)),
        "grad_stats": jnp.full((1, 1, 3, 1), 192 + 3 / 16 + last, jnp.float32),
    }
    operands = [values[name] for name in graph.inputs]
    (rewrite,) = legalize(graph, HOPPER).candidates
    results = rewrite.after(operands, flash(rewrite.graph, rewrite.before(operands)))
    grad_key = dict(zip(graph.outputs, results, strict=True))["grad_key"]
    # Three queries of ones, each with the slope last / 2.
    got = np.asarray(grad_key[0, 0, 0], np.float64)
    np.testing.assert_allclose(got, 3 * last / 2, rtol=float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("size", [0.0, 2.0**-12, 3.0, 2.0**20])
def test_it_may_have_any_size_in_f16(size: float) -> None:
    forward = attention_graph(sizes=_SIZES, dtype="f16", with_stats=True)
    graph = backward_graph(forward, with_grad_stats=True)
    operands = draw_arrays(graph)
    index = graph.inputs.index("grad_stats")
    operands[index] = size * operands[index]
    (rewrite,) = legalize(graph, HOPPER).candidates
    given = dict(zip(rewrite.graph.inputs, rewrite.before(operands), strict=True))
    e = _SIZES["e"]
    columns = np.s_[..., e : e + 3]
    products = np.prod(
        [np.asarray(given[name], np.float64) for name in ("output", "grad_output")], 0
    )
    carried = -products[columns].sum(-1).transpose(0, 2, 1)
    wanted = np.asarray(operands[index], np.float64)[..., 0]
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(carried, wanted, rtol=0, atol=1e-6 * largest)
