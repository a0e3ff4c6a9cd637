# SPDX-License-Identifier: Apache-2.0
"""Tests that all heads drop the same weights, those that Flax drops.

The truth is dense, in float64, with NumPy and finite differences; the weights that are
dropped are drawn as Flax's source draws them, and Flax's own attention agrees.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jax_cudnn
from jax_cudnn.flax import attention_fn, make_attention_fn
from jax_cudnn.flax.nnx import MultiHeadAttention
from tests.common import drawn

pytestmark = [pytest.mark.once, pytest.mark.sampled]

# Without a GPU, "cudnn" is XLA's code of the same graph, and takes f32 as well.
ALIKE = make_attention_fn(implementation="cudnn")


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return drawn.normal(seed, shape, dtype)


def kept(key: jax.Array, rate: float, s: int, t: int) -> np.ndarray:
    """Return what Flax's dropout keeps: one draw for all batch entries and heads."""
    return np.asarray(jax.random.bernoulli(key, 1 - rate, (1, 1, s, t)))


def dense(
    arrays: dict[str, np.ndarray], visible: np.ndarray, keep: np.ndarray, rate: float
) -> np.ndarray:
    """Return (b, s, h, e): dropout behind the softmax, in float64."""
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(visible, scores + arrays.get("bias", 0.0), -np.inf)
    largest = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhst,bthe->bshe", weights * keep / (1 - rate), v)


@given(
    sizes=st.tuples(
        st.integers(1, 3), st.integers(2, 9), st.integers(2, 11),
        st.integers(1, 2), st.integers(1, 3), st.sampled_from((3, 5, 8)),
    ),
    rate=st.sampled_from((0.1, 0.5, 0.9)),
    is_causal=st.booleans(),
    has_mask=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_values_and_gradients_are_those_of_dense_dropout(
    sizes: tuple[int, ...], rate: float, is_causal: bool, has_mask: bool,
    has_bias: bool, seed: int,
) -> None:  # fmt: skip
    b, s, t, heads, group, d = sizes
    h, key = heads * group, jax.random.key(seed)
    given = {
        "query": normal(seed, b, s, h, d),
        "key": normal(seed + 1, b, t, heads, d),
        "value": normal(seed + 2, b, t, heads, d + 1),
    }
    if has_bias:
        given["bias"] = normal(seed + 3, 1, h, s, t)
    mask = jax.random.bernoulli(jax.random.key(seed + 4), 0.7, (b, 1, s, t))
    cotangent = normal(seed + 5, b, s, h, d + 1)
    options = {"mask": mask} if has_mask else {}

    def ours(given: dict[str, jax.Array]) -> jax.Array:
        return ALIKE(
            **given, **options, is_causal=is_causal, dropout_rate=rate, dropout_rng=key
        )

    @jax.jit
    def both(given: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        output, pullback = jax.vjp(ours, given)
        return output, pullback(cotangent)[0]

    output, gradients = both(given, cotangent)

    exact = {name: np.asarray(x, np.float64) for name, x in given.items()}
    visible = np.asarray(mask) if has_mask else np.ones((1, 1, s, t), bool)
    if is_causal:
        visible = visible & np.tril(np.ones((s, t), bool))
    keep = kept(key, rate, s, t)
    expected = dense(exact, visible, keep, rate)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-5)
    weights, step = np.asarray(cotangent, np.float64), 1e-6
    rng = np.random.default_rng(seed)
    for name, x in exact.items():
        direction = rng.standard_normal(x.shape)
        ends = (
            dense({**exact, name: x + sign * step * direction}, visible, keep, rate)
            for sign in (1, -1)
        )
        slope = (weights * (next(ends) - next(ends))).sum() / (2 * step)
        found = (np.asarray(gradients[name], np.float64) * direction).sum()
        scale = np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
        assert abs(found - slope) <= 2e-5 * scale + 2e-4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_auto_drops_the_weights_that_flax_drops(dtype: Any) -> None:
    q, k, v = (normal(i, 2, 3, 13, 4, 8, dtype=dtype) for i in range(3))
    key = jax.random.key(5)
    options: dict[str, Any] = {"dropout_rate": 0.4, "dropout_rng": key}
    found = attention_fn(q, k, v, is_causal=True, **options)
    assert found.dtype == dtype
    exact = (x.astype(jnp.float32) for x in (q, k, v))
    mask = jnp.tril(jnp.ones((1, 1, 1, 13, 13), bool))
    with jax.numpy_rank_promotion("allow"):
        expected = nnx.dot_product_attention(*exact, mask=mask, **options)
    error = jnp.linalg.norm(found.astype(jnp.float32) - expected)
    assert error <= 2 * float(jnp.finfo(dtype).eps) * jnp.linalg.norm(expected)
    report = jax_cudnn.plans.inspect(attention_fn, q, k, v, **options)
    assert [call.op for call in report.calls] == ["sdpa", "sdpa"]


def test_xla_and_f32_and_large_heads_are_flaxs_own() -> None:
    q, k, v = (normal(i, 2, 7, 4, 8, dtype=jnp.bfloat16) for i in range(3))
    options: dict[str, Any] = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5)}
    expected = nnx.dot_product_attention(q, k, v, **options)
    found = make_attention_fn(implementation="xla")(q, k, v, **options)
    np.testing.assert_array_equal(found, expected)
    with jax_cudnn.plans.using(implementation="xla"):
        np.testing.assert_array_equal(attention_fn(q, k, v, **options), expected)
    large = [normal(i, 2, 7, 4, 128, dtype=jnp.bfloat16) for i in range(3)]
    expected = nnx.dot_product_attention(*large, **options)
    np.testing.assert_array_equal(attention_fn(*large, **options), expected)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = nnx.dot_product_attention(*wide, **options)
    np.testing.assert_array_equal(attention_fn(*wide, **options), expected)


def test_a_query_whose_keys_are_all_dropped_or_hidden_gives_0() -> None:
    q, k, v = (normal(i, 2, 33, 4, 8) for i in range(3))
    key, rate = jax.random.key(3), 0.9
    mask = np.ones((1, 1, 33, 33), bool)
    mask[..., 5, :] = False
    mask[..., 8:, 2:] = False

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ALIKE(q, k, v, mask=mask, dropout_rate=rate, dropout_rng=key)

    output, pullback = jax.vjp(ours, q, k, v)
    is_empty = ~(kept(key, rate, 33, 33) & mask).any(-1)[0, 0]
    assert is_empty[5]
    assert 10 < is_empty.sum() < 33
    assert (output[:, is_empty] == 0).all()
    assert (output[:, ~is_empty] != 0).any((0, 2, 3)).all()
    gradients = pullback(jnp.ones_like(output))
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert (gradients[0][:, is_empty] == 0).all()


def test_sinks_count_among_what_is_divided_by() -> None:
    """Flax has no sinks: they add to the sum of each row, and are not dropped."""
    x = normal(1, 2, 9, 32)
    key, rate = jax.random.key(7), 0.3

    def layer(**options: Any) -> MultiHeadAttention:
        return MultiHeadAttention(
            4, 32, is_causal=True, decode=False, dropout_rate=rate, use_sinks=True,
            sinks_init=nnx.initializers.normal(2.0), rngs=nnx.Rngs(0), **options,
        )  # fmt: skip

    with jax.numpy_rank_promotion("allow"):
        ours = layer()(x, deterministic=False, rngs=nnx.Rngs(dropout=key))
        found = layer(implementation="xla")
        same = found(x, deterministic=False, rngs=nnx.Rngs(dropout=key))
    np.testing.assert_allclose(ours, same, rtol=2e-5, atol=2e-5)
    # The same by hand, with the layer's own projections.
    keep = kept(nnx.Rngs(dropout=key).dropout(), rate, 9, 9)
    q, k, v = (
        np.asarray(p(x), np.float64) for p in (found.query, found.key, found.value)
    )
    scores = np.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
    visible = np.tril(np.ones((9, 9), bool))
    sinks = np.asarray(found.sinks[...], np.float64)[:, None, None]
    weights = np.where(visible, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sinks)
    output = np.einsum("bhst,bthe->bshe", weights * keep / (1 - rate), v)
    expected = found.out(jnp.asarray(output, jnp.float32))
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_vmap_and_second_derivatives() -> None:
    q, k, v = (normal(i, 3, 1, 5, 2, 4) for i in range(3))
    key = jax.random.key(2)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ALIKE(q, k, v, dropout_rate=0.4, dropout_rng=key)

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return nnx.dot_product_attention(q, k, v, dropout_rate=0.4, dropout_rng=key)

    def hessian(function: Any) -> Any:
        run = jax.hessian(lambda q: jnp.sin(function(q, k[0], v[0])).sum())
        return jax.jit(run)(q[0])

    mapped = jax.jit(jax.vmap(ours, (0, None, 0)))(q, k[1], v)
    each = jnp.stack([jax.jit(ours)(q[i], k[1], v[i]) for i in range(3)])
    np.testing.assert_allclose(mapped, each, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(hessian(ours), hessian(theirs), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_rate_that_is_none_is_refused(rate: float, is_shared: bool) -> None:
    q = normal(0, 2, 5, 2, 4)
    with pytest.raises(ValueError, match=rf"dropout_rate={rate} is not in \[0, 1\)"):
        attention_fn(
            q, q, q, dropout_rate=rate, dropout_rng=jax.random.key(0),
            broadcast_dropout=is_shared,
        )  # fmt: skip
