# SPDX-License-Identifier: Apache-2.0
"""Tests cuDNN's largest score of each row against float64, with all options.

Also tests which maximum it is, and that output and log-sum-exp do not change with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import masks, plans, score_mods, sdpa
from tests.attention.shared.dense import dense_attention
from tests.common.gpu.versions import needs_cudnn

pytestmark = pytest.mark.gpu

# s, t, h, k, d: lengths that fill tiles and that do not, one query, large heads.
_SIZES = (
    (129, 131, 4, 2, 64),
    (256, 256, 2, 2, 128),
    (1, 77, 4, 1, 40),
    (65, 40, 2, 2, 256),
)
_RNG = np.random.default_rng(3)


def _options(name, s, t, h):
    """Return the options of a call, and of dense attention with what is seen."""
    rows, columns = np.arange(s)[:, None], np.arange(t)
    seen = np.ones((2, h, s, t), bool)
    if name == "causal":
        return {"is_causal": True}, {"seen": seen & (columns <= rows)}
    if name == "window":
        left = min(s, t) // 3
        seen = seen & (columns >= rows - left) & (columns <= rows + 5)
        return {"local_window_size": (left, 5)}, {"seen": seen}
    if name == "lengths":
        lengths = np.array([t, t // 3])
        seen = seen & (columns < lengths[:, None, None, None])
        return {"key_value_seq_lengths": lengths}, {"seen": seen}
    if name == "none_seen":
        lengths = np.array([0, t])
        seen = seen & (columns < lengths[:, None, None, None])
        return {"key_value_seq_lengths": lengths}, {"seen": seen}
    if name == "packed":
        starts = [np.array([[0, n // 3, n]] * 2) for n in (s, t)]
        ids = [np.arange(n) >= n // 3 for n in (s, t)]
        seen = seen & (ids[0][:, None] == ids[1])
        return {"mask": masks.Packed(*starts)}, {"seen": seen}
    if name == "bias_and_sinks":
        bias = 3 * _RNG.standard_normal((1, h, s, t)).astype(jnp.bfloat16)
        sinks = np.full(h, 50, np.float32)
        told = {"bias": bias, "sinks": sinks}
        return told, {"bias": bias.astype(np.float64), "sinks": sinks, "seen": seen}
    if name == "row_bias":
        bias = _RNG.standard_normal((2, 1, s, 1)).astype(np.float32)
        return {"bias": bias}, {"bias": bias, "seen": seen}
    if name == "softcap":
        needs_cudnn(91900, "a score_mod")

        def capped(scores):
            return 2 * jnp.tanh(scores / 2)

        return {"score_mod": score_mods.softcap(2.0)}, {
            "score_mod": capped,
            "seen": seen,
        }
    if name == "negative_scale":
        return {"scale": -0.7}, {"scale": -0.7, "seen": seen}
    assert name == "dropout"
    # The maximum is that without it.
    return {"dropout_rate": 0.25, "dropout_key": jax.random.key(5)}, {"seen": seen}


@pytest.mark.parametrize(
    "name",
    [
        *("causal", "window", "lengths", "none_seen", "packed", "bias_and_sinks"),
        *("row_bias", "softcap", "negative_scale", "dropout"),
    ],
)
@pytest.mark.parametrize("sizes", _SIZES, ids=str)
def test_the_maximum_is_that_of_float64(name, sizes):
    s, t, h, k, d = sizes
    shapes = [(2, s, h, d), (2, t, k, d), (2, t, k, d)]
    operands = [jnp.asarray(_RNG.standard_normal(x), jnp.bfloat16) for x in shapes]
    told, meant = _options(name, s, t, h)

    def call(q, k, v, **more):
        return sdpa(
            q, k, v, return_residual=True, implementation="cudnn", **told, **more
        )

    output, lse, largest = jax.jit(lambda *x: call(*x, return_max_logit=True))(
        *operands
    )
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in operands]
        *_, want = dense_attention(*wide, with_max=True, **meant)
    want = np.asarray(want)
    hidden = want == -np.inf
    np.testing.assert_array_equal(np.isneginf(largest), hidden)
    # tanh.approx has eleven digits.
    tolerance = 4e-3 if name == "softcap" else 2e-5
    gap = np.abs(np.asarray(largest)[~hidden] - want[~hidden])
    assert gap.max(initial=0) <= tolerance * max(
        1, np.abs(want[~hidden]).max(initial=0)
    )
    plain = jax.jit(call)(*operands)
    if name != "dropout":
        for x, y, slack in zip((output, lse), plain, (2e-2, 1e-4), strict=True):
            x, y = (np.asarray(each, np.float64) for each in (x, y))
            np.testing.assert_allclose(x, y, rtol=slack, atol=slack)


def test_only_the_gradient_of_the_maximum_is_xlas():
    shapes = [(2, 129, 4, 64), (2, 131, 2, 64), (2, 131, 2, 64)]
    operands = [jnp.asarray(_RNG.standard_normal(x), jnp.bfloat16) for x in shapes]

    def loss(implementation):
        def run(*x):
            output, largest = sdpa(
                *x, is_causal=True, return_max_logit=True, implementation=implementation
            )
            return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(largest**2)

        return jax.jit(jax.grad(run, argnums=(0, 1, 2)))

    for x, y in zip(loss("cudnn")(*operands), loss("xla")(*operands), strict=True):
        x, y = (np.asarray(each, np.float64) for each in (x, y))
        assert np.abs(x - y).max() <= 2e-2 * np.abs(y).max()
    found = plans.inspect(loss("cudnn"), *operands)
    assert "the gradient of max_logit is computed by XLA" in str(found)


def test_nan_in_a_key_reaches_the_maximum_of_rows_that_see_it():
    q, k, v = (
        jnp.asarray(_RNG.standard_normal((1, 64, 2, 64)), jnp.bfloat16) for _ in "qkv"
    )
    k = k.at[0, 9, 0, 0].set(jnp.nan)
    _, largest = sdpa(
        q, k, v, is_causal=True, return_max_logit=True, implementation="cudnn"
    )
    assert jnp.isnan(largest[0, 9:, 0]).all()
    assert jnp.isfinite(largest[0, :9, 0]).all()
    assert jnp.isfinite(largest[0, :, 1]).all()
