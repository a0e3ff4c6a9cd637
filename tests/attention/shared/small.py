# SPDX-License-Identifier: Apache-2.0
"""Small attention, as a call and by its definition, for tests of transformations."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn import sdpa
from tests.attention.shared.dense import dense_attention
from tests.conftest import Draw
from tests.products.shared.fused import graphs

SMALL = {"n": 3, "b": 2, "s": 3, "t": 5, "h": 4, "k": 2, "d": 3, "e": 2}
AXES = ("bshd", "btkd", "btke", "1hst")


def small_operands(
    draw: Draw, dtype: Any = jnp.float64, **sizes: int
) -> list[jax.Array]:
    return [draw(axes, dtype, **{**SMALL, **sizes}) for axes in AXES]


def attend(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sdpa(*operands, is_causal=True, return_residual=True)


def textbook(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Attention by its definition, causal, with its log-sum-exp."""
    query, key, value, bias = operands
    seen = np.tri(query.shape[1], key.shape[1], dtype=bool)
    return dense_attention(query, key, value, seen=seen, bias=bias)


def attention_loss(function: Callable[..., Any], *operands: jax.Array) -> jax.Array:
    output, stats = function(*operands)
    return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(stats))


value_and_gradients = functools.partial(
    jax.value_and_grad(attention_loss, argnums=(1, 2, 3, 4)), attend
)


def assert_close(got: Any, want: Any, tolerance: float = 1e-10) -> None:
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance),
        got,
        want,
    )


def count_kinds(function: Callable[..., Any], *args: Any) -> Counter[str]:
    return Counter(
        f"{graph.nodes[0].kind}:derivative" if is_linear else graph.nodes[0].kind
        for graph, is_linear in graphs(function, *args)
    )
