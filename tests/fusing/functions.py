# SPDX-License-Identifier: Apache-2.0
"""Functions for `fuse`: what users write, and the operands that tests give it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NHWC = ("NHWC", "HWIO", "NHWC")


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values).astype(dtype)


def like(x: jax.Array, *shape: int) -> jax.Array:
    return jnp.broadcast_to(x, shape)


class Case(NamedTuple):
    """A function, its operands, and the operations of its kernels."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    kernels: tuple[str, ...]


def conv_bn_relu(x, w, gamma, beta, mean, variance):
    """Inference of a convolution, batch norm and relu, as in a residual network."""
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    def along(v):
        return v[None, None, None, :]

    scale = gamma * jax.lax.rsqrt(variance + 1e-5)
    return jax.nn.relu((y - along(mean)) * along(scale) + along(beta))


def block(x, w, b, residual, scale, shift):
    """A product with bias, gelu and residual, and the layer norm that follows."""
    h = jax.nn.gelu(x @ w + b[None, None, :], approximate=False) + residual
    mean = h.mean(-1, keepdims=True)
    variance = ((h - mean) ** 2).mean(-1, keepdims=True)
    normed = (h - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normed * scale[None, None, :] + shift[None, None, :]


def normed(x, w, scale):
    """A product and the RMS norm of a Llama, in f32 and rounded at the end."""
    h = x @ w
    wide = h.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * inverse * scale.astype(jnp.float32)[None, None, :]).astype(h.dtype)


def gated_mlp(x, gate, up, down):
    """The MLP of a Llama."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _many_results(x, w, b):
    h = x @ w + b[None, :]
    return {"h": h, "relu": jax.nn.relu(h), "norm": jnp.sum(h**2)}


_X, _W, _B = normal(0, 5, 8), normal(1, 8, 12), normal(2, 12)


def _row(b):
    return b[None, :]


CASES: dict[str, Case] = {
    "conv, batch norm, relu": Case(
        conv_bn_relu,
        (
            *(normal(0, 2, 7, 5, 8), normal(1, 3, 3, 8, 12), normal(2, 12)),
            *(normal(3, 12), normal(4, 12), normal(5, 12) ** 2),
        ),
        ("conv_fprop+sub+mul+add+relu",),
    ),
    "matmul, bias, gelu, residual, layer norm": Case(
        block,
        (
            *(normal(0, 2, 5, 8), normal(1, 8, 12), normal(2, 12)),
            *(normal(3, 2, 5, 12), normal(4, 12), normal(5, 12)),
        ),
        ("matmul+add+gelu_erf+add",),
    ),
    "gated MLP": Case(
        gated_mlp,
        (normal(0, 2, 5, 8), normal(1, 8, 12), normal(2, 8, 12), normal(3, 12, 8)),
        ("matmul+silu", "matmul+mul", "matmul"),
    ),
    "tanh gelu": Case(
        lambda x, w, b: jax.nn.gelu(x @ w + _row(b)),
        (_X, _W, _B),
        ("matmul+add+gelu_tanh",),
    ),
    "bias first": Case(
        lambda x, w, b: _row(b) - x @ w, (_X, _W, _B), ("matmul+neg+add",)
    ),
    "softplus": Case(
        lambda x, w, b: jax.nn.softplus(x @ w), (_X, _W, _B), ("matmul+softplus",)
    ),
    "elu": Case(lambda x, w, b: jax.nn.elu(x @ w), (_X, _W, _B), ("matmul+elu",)),
    "selected by a comparison": Case(
        lambda x, w, b: (lambda h: jnp.where(h > _row(b), h, -h))(x @ w),
        (_X, _W, _B),
        ("matmul+gt+neg+select",),
    ),
    "power and division": Case(
        lambda x, w, b: (x @ w) ** 3 / (1.0 + jnp.abs(_row(b))),
        (_X, _W, _B),
        ("matmul+mul+mul+div",),
    ),
    "several results": Case(_many_results, (_X, _W, _B), ("matmul+add+relu",)),
    "transposed operand and result": Case(
        lambda x, w, b: (x.T @ w + _row(b)).T,
        (normal(0, 8, 5), _W, _B),
        ("matmul+add",),
    ),
    "rows merged and divided": Case(
        lambda x, w, b: jnp.tanh(
            (x.reshape(-1, 8) @ w).reshape(3, 5, 12) * b[None, None, :]
        ),
        (normal(0, 3, 5, 8), _W, _B),
        ("matmul+mul+tanh",),
    ),
    "batch of matrices": Case(
        lambda x, w, b: jnp.einsum("bmk,bkn->bmn", x, w) * b[:, None, None],
        (normal(0, 3, 5, 8), normal(1, 3, 8, 12), normal(2, 3)),
        ("matmul+mul",),
    ),
    "channels first": Case(
        lambda x, w, b: jax.nn.relu(
            jax.lax.conv(x, w, (2, 1), "SAME") + b[None, :, None, None]
        ),
        (normal(0, 2, 8, 7, 5), normal(1, 12, 8, 3, 3), _B),
        ("conv_fprop+add+relu",),
    ),
    "a number that is an operand": Case(
        lambda x, w, s: jnp.exp(x @ w * s),
        (_X, _W, jnp.float32(0.3)),
        ("matmul+mul+exp",),
    ),
    "a max along an axis": Case(
        lambda x, w, v: jax.nn.softmax(x @ w / 3.0) @ v,
        (_X, _W, normal(3, 12, 4)),
        ("matmul+div", "matmul"),
    ),
    "a shape that is not understood": Case(
        lambda x, w, b: jnp.concatenate([x @ w, x @ w + _row(b)])[1:4],
        (_X, _W, _B),
        ("matmul", "matmul+add"),
    ),
    "no contraction": Case(lambda x, w, b: jnp.sin(x), (_X, _W, _B), ()),
    "no rows": Case(
        lambda x, w, b: x @ w + _row(b), (normal(0, 0, 8), _W, _B), ("matmul+add",)
    ),
}
