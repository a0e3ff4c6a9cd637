# SPDX-License-Identifier: Apache-2.0
"""Tests that what has more than 2^31 numbers is right, or refused by a message.

Each result is compared with plain JAX in f32 on parts that lie at both ends, where an
index of 32 bits would have overflowed. A test takes up to 50 GiB of the GPU's memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_cudnn

pytestmark = pytest.mark.gpu

_BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def _memory_is_free() -> Iterator[None]:
    yield
    jax.clear_caches()


def _normal(seed: int, shape: tuple[int, ...], parts: int = 1) -> jax.Array:
    """Return random numbers, drawn in parts along the first axis."""
    size, *rest = shape
    keys = jax.random.split(jax.random.key(seed), parts)
    draw = jax.jit(lambda key: jax.random.normal(key, (size // parts, *rest), _BF16))
    drawn = [draw(key) for key in keys]
    return drawn[0] if parts == 1 else jnp.concatenate(drawn)


def _assert_near(name: str, found: jax.Array, truth: jax.Array) -> None:
    """Compare in norm: bf16 rounds by 2^-9, and a kernel a few times."""
    got, want = (np.asarray(x, np.float32) for x in (found, truth))
    assert np.isfinite(got).all(), name
    error = np.linalg.norm((got - want).astype(np.float64))
    assert error <= 2.0**-6 * np.linalg.norm(want.astype(np.float64)), name


def _run(call: Callable[..., Any], *operands: Any) -> Any:
    try:
        compiled = jax.jit(call).lower(*operands).compile()
    except jax_cudnn.UnsupportedError as error:
        pytest.skip(f"refused: {error}"[:400])
    return jax.block_until_ready(compiled(*operands))


def _gradients(call: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return a function of operands, cotangent and others, which do not move."""

    def run(moving: tuple[jax.Array, ...], grad: jax.Array, *rest: jax.Array) -> Any:
        output, pull = jax.vjp(lambda *moving: call(*moving, *rest), *moving)
        return output, pull(grad)

    return run


def _attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Return the attention of (s, h, d) operands, in f32, a head at a time."""

    def of_head(operands: tuple[jax.Array, ...]) -> jax.Array:
        q, k, v = (x.astype(jnp.float32) for x in operands)
        scores = q @ k.T / q.shape[1] ** 0.5
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        return jax.nn.softmax(scores) @ v

    heads = [jnp.moveaxis(x, 1, 0) for x in (query, key, value)]
    return jnp.moveaxis(jax.lax.map(of_head, tuple(heads)), 0, 1)


def _attention_gradients(
    operands: tuple[jax.Array, ...], grad: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    @jax.jit
    def run(operands: Any, grad: jax.Array, mask: jax.Array | None) -> Any:
        output, pull = jax.vjp(lambda *x: _attention(*x, mask), *operands)
        return output, pull(grad.astype(jnp.float32))

    with jax.default_matmul_precision("highest"):
        return run(tuple(x.astype(jnp.float32) for x in operands), grad, mask)


def _pattern(b: int, s: int, t: int, first: int = 0) -> jax.Array:
    """Return a mask that hides about a third of the keys, (b, 1, s, t)."""
    batch = first + jnp.arange(b).reshape(b, 1, 1, 1)
    row, column = jnp.arange(s).reshape(1, 1, s, 1), jnp.arange(t).reshape(1, 1, 1, t)
    return (7 * row + 13 * column + 5 * batch + row // 11) % 17 < 11


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_mask(is_trained: bool) -> None:
    b, s, d = 9, 16384, 64
    operands = tuple(_normal(seed, (b, s, 1, d)) for seed in range(3))
    grad = _normal(3, (b, s, 1, d))
    mask = jax.jit(lambda: _pattern(b, s, s))()
    assert mask.size > 2**31

    def call(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return jax_cudnn.sdpa(q, k, v, mask=mask, implementation="cudnn")

    if is_trained:
        output, grads = _run(_gradients(call), operands, grad, mask)
    else:
        output, grads = _run(call, *operands, mask), ()
    for i in (0, b - 1):
        part = _pattern(1, s, s, first=i)[0, 0]
        want, wanted = _attention_gradients(
            tuple(x[i] for x in operands), grad[i], part
        )
        _assert_near(f"output of {i}", output[i], want)
        for name, x, y in zip("qkv", grads, wanted, strict=False):
            _assert_near(f"gradient of {name} of {i}", x[i], y)


@pytest.mark.parametrize(
    ("b", "s", "t", "h"),
    [(1, 64, 1_064_960, 16), (544, 64, 2048, 16)],
    ids=["a long one", "many"],
)
def test_keys_and_values(b: int, s: int, t: int, h: int) -> None:
    d = 128
    query, grad = (_normal(seed, (b, s, h, d)) for seed in (0, 1))
    parts = 16 if b > 1 else 1
    key, value = (
        _normal(seed, (b, t, h, d), parts)
        if b > 1
        else _normal(seed, (t, h, d), 16)[None]
        for seed in (2, 3)
    )
    # The last keys have the largest weights.
    key = jax.jit(lambda x: x.at[:, -512:].multiply(3), donate_argnums=0)(key)
    assert key.size > 2**31

    def call(*operands: jax.Array) -> jax.Array:
        return jax_cudnn.sdpa(*operands, implementation="cudnn")

    output, grads = _run(_gradients(call), (query, key, value), grad)
    for i in {0, b - 1}:
        heads = slice(0, h, h - 1)
        each = tuple(x[i, :, heads] for x in (query, key, value))
        want, wanted = _attention_gradients(each, grad[i, :, heads])
        _assert_near(f"output of {i}", output[i, :, heads], want)
        for name, x, y in zip("qkv", grads, wanted, strict=True):
            _assert_near(f"gradient of {name} of {i}", x[i, :, heads], y)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_norm(norm: str) -> None:
    rows, n, parts = 175_000, 12_288, 7
    x, grad = (_normal(seed, (rows, n), parts) for seed in (0, 1))
    scale = 1 + jnp.arange(n, dtype=jnp.float32) / n
    assert x.size > 2**31
    function = getattr(jax_cudnn, norm)

    def call(x: jax.Array, scale: jax.Array) -> jax.Array:
        return function(x, scale, epsilon=1e-6, implementation="cudnn")

    output, (dx, dscale) = _run(_gradients(call), (x, scale), grad)

    def plain(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if norm == "layer_norm":
            wide = wide - jnp.mean(wide, 1, keepdims=True)
        mean_square = jnp.mean(jnp.square(wide), 1, keepdims=True)
        return wide * jax.lax.rsqrt(mean_square + 1e-6) * scale[None]

    @jax.jit
    def truth(x: jax.Array, grad: jax.Array) -> Any:
        want, pull = jax.vjp(plain, x.astype(jnp.float32), scale)
        return want, *pull(grad.astype(jnp.float32))

    total, size = jnp.zeros(n), rows // parts
    for start in range(0, rows, size):
        part = slice(start, start + size)
        want, want_dx, want_dscale = truth(x[part], grad[part])
        total = total + want_dscale
        if start in (0, rows - size):
            for ends in (slice(0, 64), slice(size - 64, size)):
                _assert_near("output", output[part][ends], want[ends])
                _assert_near("gradient of x", dx[part][ends], want_dx[ends])
    _assert_near("gradient of the scale", dscale, total)
