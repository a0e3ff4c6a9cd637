# SPDX-License-Identifier: Apache-2.0
"""The workloads of mixtures of experts: products in f8, and whole layers, in bf16.

Rivals of what is in f8 compute in bf16: plain JAX, and jax_cudnn itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_cudnn
from benchmarks.harness.contest import XLA, Cell, Way
from benchmarks.harness.operands import Operand
from jax_cudnn import f8, moe

_BF16, _ONE_HOT = "jax_cudnn in bf16", "dense one-hot"
# Relative errors that rounding operands to f8 makes, of results and of gradients:
# 2.6 % for each operand in e4m3 and 5 % in e5m2; a layer has three products in turn.
_OF_PRODUCTS, _OF_LAYERS = (6e-2, 1.5e-1), (1e-1, 3e-1)
_F8 = "float8_e4m3fn"


def cells(
    *,
    small: bool,
    skewed: Callable[[int, int], np.ndarray],
    truth: Callable[..., Any],
) -> list[Cell]:
    """Return the cells; small ones are for a CPU.

    Args:
      small: whether for a CPU.
      skewed: returns the sizes of groups of some rows.
      truth: computes a product in groups in f32.
    """
    rows, width = (64, 16) if small else (16384, 2048)
    shapes = (
        (rows, 8, 2 * width, 2 * width),
        (rows, 64, width, width),
        (rows, 128, width, width // 2),
    )
    sizes = [(shape, skewed(rows, shape[1])) for shape in shapes]
    tokens = rows // 4
    layers = (
        (tokens, width, 8, 2, 2 * width),
        (tokens, width, 64, 4, width // 2),
        (tokens, width, 128, 8, 3 * width // 8 // 16 * 16 or 16),
    )
    return [
        *(_product(*shape, each, truth, is_stored=False) for shape, each in sizes),
        *(_product(*shape, each, truth, is_stored=True) for shape, each in sizes),
        *(_layer(*each, None) for each in layers),
        *(_layer(*each, f8.Current()) for each in layers),
    ]


def _product(
    rows: int,
    groups: int,
    contracted: int,
    columns: int,
    sizes: np.ndarray,
    truth: Callable[..., Any],
    *,
    is_stored: bool,
) -> Cell:
    """Return a product in f8, of operands that are stored so or quantised with it."""
    dtype = _F8 if is_stored else "bfloat16"
    # Stored numbers have no scales. Of 1 / 64, f8 would keep two bits.
    scale = 1.0 if is_stored else contracted**-0.5

    def entered(operands: Sequence[Any]) -> list[Any]:
        return [x.astype(jnp.bfloat16) for x in operands[:2]] + [operands[2]]

    def stored(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return jax_cudnn.ragged_dot(
            lhs, rhs, sizes, preferred_element_type=jnp.bfloat16
        )

    rivals = {XLA: jax.lax.ragged_dot, _BF16: lambda *x: jax_cudnn.ragged_dot(*x)}
    return Cell(
        operation=f"f8 {'stored' if is_stored else 'quantised'}: ragged_dot, {groups} "
        "skewed groups",
        size=f"{rows} x {contracted}, {contracted} x {columns}",
        operands=(
            Operand((rows, contracted), dtype=dtype),
            Operand((groups, contracted, columns), scale, dtype=dtype),
            sizes,
        ),
        rivals={
            name: Way(function=each, enter=entered if is_stored else list)
            for name, each in rivals.items()
        },
        ours=lambda: stored if is_stored else lambda *x: f8.ragged_dot(*x),
        truth=truth,
        has_gradients=not is_stored,
        has_products=True,
        bounds=_OF_PRODUCTS,
    )


# --- whole layers ---------------------------------------------------------------------


def plain_layer(top_k: int) -> Callable[..., Any]:
    """Return a layer as plain JAX has it: a sort, and `lax.ragged_dot`."""

    def layer(x: Any, router_w: Any, gate: Any, up: Any, down: Any) -> Any:
        weights, experts = _routed(x, router_w, top_k)
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=len(up))
        rows, product = x[order // top_k], jax.lax.ragged_dot
        hidden = jax.nn.silu(product(rows, gate, sizes)) * product(rows, up, sizes)
        y = product(hidden, down, sizes) * weights.reshape(-1)[order, None]
        return jnp.zeros(x.shape, y.dtype).at[order // top_k].add(y).astype(x.dtype)

    return layer


def _routed(x: Any, router_w: Any, top_k: int) -> tuple[Any, Any]:
    """Return Mixtral's weights in f32, and the experts of each token."""
    logits = jnp.matmul(x, router_w, preferred_element_type=jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    return weights / weights.sum(-1, keepdims=True), experts


def _one_hot(top_k: int) -> Callable[..., Any]:
    """Return a layer that computes all experts for all tokens, one after another."""

    def layer(x: Any, router_w: Any, gate: Any, up: Any, down: Any) -> Any:
        weights, experts = _routed(x, router_w, top_k)
        hot = jax.nn.one_hot(experts, len(up), dtype=weights.dtype)
        shares = jnp.einsum("tk,tke->et", weights, hot)

        @jax.checkpoint
        def add(total: Any, expert: Any) -> Any:
            share, gate, up, down = expert
            y = (jax.nn.silu(x @ gate) * (x @ up)) @ down
            return total + share[:, None] * y, None

        none = jnp.zeros(x.shape, jnp.float32)
        total, _ = jax.lax.scan(add, none, (shares, gate, up, down))
        return total.astype(x.dtype)

    return layer


def _layer(
    tokens: int,
    width: int,
    experts: int,
    top_k: int,
    hidden: int,
    recipe: f8.Current | None,
) -> Cell:
    """Return a layer whose router prefers some experts: the mean of x is not 0."""

    def ours(recipe: f8.Current | None) -> Callable[..., Any]:
        return lambda *x: moe.layer(*x, top_k=top_k, recipe=recipe)[0]

    rivals = {XLA: plain_layer(top_k), _ONE_HOT: _one_hot(top_k)}
    if recipe is not None:
        rivals[_BF16] = ours(None)
    return Cell(
        operation=f"{'f8 ' if recipe else ''}moe layer, {top_k} of {experts} experts",
        size=f"{tokens} x {width}, hidden {hidden}",
        operands=(
            Operand((tokens, width), mean=0.5),
            Operand((width, experts), width**-0.5),
            Operand((experts, width, hidden), width**-0.5),
            Operand((experts, width, hidden), width**-0.5),
            Operand((experts, hidden, width), hidden**-0.5),
        ),
        rivals={name: Way(function=each) for name, each in rivals.items()},
        ours=lambda: ours(recipe),
        truth=_one_hot(top_k),
        has_products=True,
        bounds=None if recipe is None else _OF_LAYERS,
    )
