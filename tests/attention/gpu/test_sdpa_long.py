# SPDX-License-Identifier: Apache-2.0
"""Tests attention over a million tokens, and that it needs no memory for the scores.

Rows and columns are compared with NumPy in float64: the first ones, the last ones, and
some between, where an index of 32 bits would have overflowed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn

pytestmark = pytest.mark.gpu

_MILLION = 1 << 20
_QUARTER = 1 << 18


def _drawn(s, h, k, d):
    def draw():
        keys = jax.random.split(jax.random.key(s + h), 4)
        shapes = [(1, s, heads, d) for heads in (h, k, k, h)]
        return [
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(keys, shapes, strict=True)
        ]

    return jax.jit(draw)()


def _double(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def _rows_of_softmax(query, key, rows):
    """Return the causal probabilities of rows, and their log-sum-exp."""
    scores = query.shape[-1] ** -0.5 * query @ key.T
    scores[np.arange(key.shape[0])[None] > rows[:, None]] = -np.inf
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total, (top + np.log(total))[:, 0]


def _assert_near(got, truth, part):
    assert np.abs(got - truth).max() <= part * np.abs(truth).max()


@pytest.mark.parametrize(
    ("h", "k", "d"),
    [
        (8, 2, 64),
        # Each array has more than 2^31 numbers.
        (17, 17, 128),
    ],
)
def test_a_million_tokens(h, k, d):
    s = _MILLION
    query, key, value, _ = _drawn(s, h, k, d)
    run = jax.jit(
        lambda *operands: jax_cudnn.sdpa(
            *operands, is_causal=True, return_residual=True, implementation="cudnn"
        )
    )
    compiled = run.lower(query, key, value).compile()
    # Less than a number for each row and each of its head's values.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * s * h * d
    output, lse = compiled(query, key, value)
    rows = np.array([0, 1, 127, 128, s // 2 - 1, s // 2 + 3, s - 129, s - 2, s - 1])
    for head in (0, h - 1):
        of_key = head // (h // k)
        probabilities, stats = _rows_of_softmax(
            _double(query[0, rows, head]), _double(key[0, :, of_key]), rows
        )
        truth = probabilities @ _double(value[0, :, of_key])
        _assert_near(_double(output[0, rows, head]), truth, 2**-7)
        np.testing.assert_allclose(lse[0, rows, head], stats, atol=1e-4, rtol=1e-5)


def test_the_gradient_of_a_quarter_of_a_million_tokens():
    s, h, k, d = _QUARTER, 4, 2, 128
    query, key, value, grad = _drawn(s, h, k, d)

    def attend(query, key, value):
        return jax_cudnn.sdpa(
            query, key, value,
            is_causal=True, return_residual=True, implementation="cudnn",
        )  # fmt: skip

    def gradients(query, key, value, grad):
        (output, lse), pull = jax.vjp(attend, query, key, value)
        return pull((grad, jnp.zeros_like(lse))), output, lse

    compiled = jax.jit(gradients).lower(query, key, value, grad).compile()
    # Some numbers in f32 for each number of query and key, and nothing of s * s.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * s * (h + 2 * k) * d
    (dq, dk, dv), output, lse = compiled(query, key, value, grad)

    rows, head, of_key = np.array([5, s // 2, s - 1]), h - 1, k - 1
    keys, values = _double(key[0, :, of_key]), _double(value[0, :, of_key])
    probabilities, _ = _rows_of_softmax(_double(query[0, rows, head]), keys, rows)
    products = _double(grad[0, rows, head]) @ values.T
    delta = (probabilities * products).sum(axis=1, keepdims=True)
    truth = d**-0.5 * (probabilities * (products - delta)) @ keys
    for got, row in zip(_double(dq[0, rows, head]), truth, strict=True):
        _assert_near(got, row, 2**-6)

    columns = np.array([0, 1, 130, s // 2, s - 300, s - 1])
    dk_truth, dv_truth = np.zeros((2, len(columns), d))
    for head in range(of_key * (h // k), h):
        queries, grads = _double(query[0, :, head]), _double(grad[0, :, head])
        scores = d**-0.5 * queries @ keys[columns].T
        weights = np.exp(scores - np.asarray(lse[0, :, head], np.float64)[:, None])
        weights[np.arange(s)[:, None] < columns[None]] = 0
        delta = (_double(output[0, :, head]) * grads).sum(axis=1, keepdims=True)
        slope = weights * (grads @ values[columns].T - delta)
        dk_truth += d**-0.5 * slope.T @ queries
        dv_truth += weights.T @ grads
    _assert_near(_double(dk[0, columns, of_key]), dk_truth, 2**-6)
    _assert_near(_double(dv[0, columns, of_key]), dv_truth, 2**-6)
