# SPDX-License-Identifier: Apache-2.0
"""Flax's attention layers and ours, as functions of parameters; and a NumPy truth."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jax_cudnn.flax import linen as our_linen
from jax_cudnn.flax import nnx as our_nnx
from tests.common import drawn

Call = Callable[..., Any]

# b batch, s length, t key length, f features, h heads, k key heads, d head size.
B, S, T, F, H, K, D = 3, 7, 11, 30, 6, 2, 5


@contextlib.contextmanager
def flax_promotes() -> Iterator[None]:
    """Allow promotion where Flax's own code relies on it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return drawn.normal(seed, shape, dtype)


def assert_trees_close(actual: Any, expected: Any, **tolerances: float) -> None:
    """Compare trees; differences may be 1e-5 of the largest number among them.

    Gradients are sums of terms as large as that, also where they cancel.
    """
    leaves = jax.tree.leaves(expected)
    largest = max(float(jnp.abs(x.astype(jnp.float32)).max()) for x in leaves)
    tolerances = tolerances or {"rtol": 2e-5, "atol": 1e-5 * max(largest, 1.0)}
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), **tolerances
        )


def pure(layer: nnx.Module) -> tuple[Call, Any]:
    """Return an nnx layer as a function of its parameters, and the parameters."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params: Any, *arguments: Any, **call: Any) -> Any:
        return nnx.merge(graph, nnx.State(params), rest)(*arguments, **call)

    return run, nnx.to_pure_dict(params)


def randomly(tree: Any, seed: int = 7) -> Any:
    """Return parameters of the same shapes, none of which is 0 or 1."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    numbers = [
        jnp.asarray(np.asarray(0.3 * rng.standard_normal(x.shape), x.dtype))
        for x in leaves
    ]
    return jax.tree.unflatten(structure, numbers)


def value_and_grads(function: Call, *operands: Any) -> Any:
    """Return a function's result, and the gradients of a sum that weighs it."""

    def loss(*operands: Any) -> tuple[jax.Array, jax.Array]:
        output = function(*operands)
        return jnp.sum(jnp.sin(output.astype(jnp.float32))), output

    argnums = tuple(range(len(operands)))
    run = jax.jit(jax.value_and_grad(loss, argnums=argnums, has_aux=True))
    (_, output), grads = run(*operands)
    return output, grads


def by_hand(
    params: Any,
    x: np.ndarray,
    *,
    seen: np.ndarray,
    scale: float | None = None,
    rotate: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    modify: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Self-attention of a layer with such parameters, in NumPy's f64.

    ``seen`` (b, s, s) says which keys a query sees, and ``modify`` is a function of the
    scores (b, h, s, s).
    """
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.asarray(x, np.float64)
    q, k, v = (
        np.einsum("bsf,fhd->bshd", x, p[name]["kernel"]) + p[name]["bias"]
        for name in ("query", "key", "value")
    )
    q, k = rotate(q), rotate(k)
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(each, group, axis=2) for each in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = modify(np.einsum("bshd,bthd->bhst", q, k) * scale)
    weights = np.exp(scores) * seen[:, None]
    total = weights.sum(-1, keepdims=True)
    if "sinks" in p:
        total = total + np.exp(p["sinks"])[:, None, None]
    heads = np.einsum("bhst,bthd->bshd", weights / total, v)
    return np.einsum("bshd,hdf->bsf", heads, p["out"]["kernel"]) + p["out"]["bias"]


def nnx_layer(layer: Any = our_nnx.MultiHeadAttention, **options: Any) -> Any:
    options = {"num_heads": H, "in_features": F, "decode": False, **options}
    return layer(rngs=nnx.Rngs(0), **options)


def linen_layer(
    layer: Any = our_linen.MultiHeadDotProductAttention, **options: Any
) -> Any:
    return layer(**{"num_heads": H, "qkv_features": F, **options})


flax_nnx = functools.partial(nnx_layer, nnx.MultiHeadAttention)
flax_linen = functools.partial(linen_layer, linen.MultiHeadDotProductAttention)


def padding(dtype: Any = bool) -> jax.Array:
    """Keys past each entry's length are hidden; every query sees a key."""
    is_key = np.arange(S) < np.array([S, 4, 1])[:, None, None, None]
    return jnp.asarray(np.broadcast_to(is_key, (B, 1, S, S)).astype(dtype))


def layers(**options: Any) -> tuple[tuple[Call, Call], Any]:
    """Return grouped layers of nnx and linen, as functions of one set of parameters.

    A call is one program.
    """
    run, params = pure(nnx_layer(**{"num_kv_heads": K, **options}))
    module = linen_layer(**{"num_kv_heads": K, **options})

    def apply(params: Any, x: jax.Array, **call: Any) -> jax.Array:
        return module.apply({"params": params}, x, **call)

    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((B, S, F)))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        lambda x: x.shape, shapes["params"]
    )
    return (_compiled(run), _compiled(apply)), randomly(params)


def _compiled(function: Call) -> Call:
    """Return a function whose arguments by name are constants of a program."""
    without = jax.jit(function)

    def run(params: Any, x: jax.Array, **call: Any) -> jax.Array:
        if not call:
            return without(params, x)
        return jax.jit(functools.partial(function, **call))(params, x)

    return run
