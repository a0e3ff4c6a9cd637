# SPDX-License-Identifier: Apache-2.0
"""Attention over devices that hold one query, key, head or batch entry each.

An axis of size 1 means "shared" in a bias or mask, and its size on one device must not
be taken for that. The truth is dense attention of the whole arrays
(tests/attention/shared/dense.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_cudnn import UnsupportedError, masks, parallel
from tests.attention.shared.dense import dense_attention
from tests.common.devices import mesh_of

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("x64"), pytest.mark.sampled]

METHODS = ("ring", "all_gather", "all_to_all")


def _scores_shape(rng: np.random.Generator, full: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if rng.integers(2) else 1 for size in full)


def _draw(seed: int) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return operands with a bias, which keys are seen, and how the mesh shares them.

    Queries, keys, heads and batch entries are one or two a device.
    """
    rng = np.random.default_rng(seed)
    n, data, model = ((4, 1, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1))[rng.integers(4)]
    s, t = n * rng.integers(1, 3), n * rng.integers(1, 3)
    b, k = data * rng.integers(1, 3), n * model * rng.integers(1, 3)
    h = k * rng.integers(1, 3)
    full = (b, h, s, t)
    operands = {
        "query": rng.standard_normal((b, s, h, 3)),
        "key": rng.standard_normal((b, t, k, 3)),
        "value": rng.standard_normal((b, t, k, 2)),
        "bias": rng.standard_normal(_scores_shape(rng, full)),
    }
    seen = rng.integers(0, 3, _scores_shape(rng, full)) > 0
    sizes = {"data": data, "seq": n, "model": model}
    return {name: jnp.asarray(x) for name, x in operands.items()}, seen, sizes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(16))
def test_rows_of_one_device_are_not_shared_by_all(seed: int, method: Any) -> None:
    operands, seen, sizes = _draw(seed)
    (b, s, h, _), t = operands["query"].shape, operands["key"].shape[1]
    ramp = jnp.asarray(np.random.default_rng(seed).standard_normal((h, s, t)))

    def spread(x: dict[str, Any]) -> jax.Array:
        return parallel.sharded_sdpa(
            **x,
            mask=masks.Where(seen) if seed % 2 else seen,
            score_mod=lambda score, b, h, i, j: score + ramp[h, i, j],
            method=method,
            mesh=mesh_of(**sizes),
            axis="seq",
            batch_axis="data",
            head_axis="model",
        )

    def dense(x: dict[str, Any]) -> jax.Array:
        whole = np.broadcast_to(seen, (b, h, s, t))
        return dense_attention(**x, seen=whole, score_mod=lambda y: y + ramp[None])[0]

    def run(function: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(function(x)))))(
            operands
        )

    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    close(spread(operands), dense(operands))
    jax.tree.map(close, run(spread), run(dense))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_own", [True, False])
def test_a_bias_of_one_row_on_a_device_with_one_query(
    method: Any, is_own: bool
) -> None:
    rng = np.random.default_rng(5)
    n, h = 4, 4
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, h, 3))) for _ in range(3))
    bias = jnp.asarray(rng.standard_normal((1, h, n if is_own else 1, n)))
    tokens, rows = P(None, "seq"), P(None, None, "seq" if is_own else None)

    def loss(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        attend = functools.partial(parallel.sdpa, axis_name="seq", method=method)
        spread = jax.shard_map(
            attend,
            mesh=mesh_of(seq=n),
            in_specs=(tokens, tokens, tokens, rows),
            out_specs=tokens,
        )
        return jnp.sum(jnp.sin(spread(q, k, v, bias)))

    def dense(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        seen = np.ones((2, h, n, n), bool)
        return jnp.sum(jnp.sin(dense_attention(q, k, v, bias=bias, seen=seen)[0]))

    got = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, bias)
    want = jax.value_and_grad(dense, (0, 1, 2, 3))(q, k, v, bias)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, got, want)


_READS: dict[str, Any] = {
    "query": lambda x, b, h, i, j, table: x + table[i],
    "key": lambda x, b, h, i, j, table: x * table[j],
    "distance": lambda x, b, h, i, j, table: x + table[jnp.abs(i - j)],
    "chosen": lambda x, b, h, i, j, table: jnp.where(i % 3 == 0, x, x * table[h]),
    "clipped": lambda x, b, h, i, j, table: x + table[jnp.clip(i - j, 0, 3)],
    "remainder": lambda x, b, h, i, j, table: x + jnp.sin(table[(i * j) % 8]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", _READS)
def test_a_score_mod_reads_arrays_by_positions_of_a_device(
    name: str, method: Any
) -> None:
    rng = np.random.default_rng(7)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 8, 2, 3))) for _ in range(3))
    table = jnp.asarray(rng.standard_normal(8))
    tokens = P(None, "seq")

    def loss(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
        def attend(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
            def score_mod(*args: jax.Array) -> jax.Array:
                return _READS[name](*args, table)

            options: dict[str, Any] = {"axis_name": "seq", "method": method}
            return parallel.sdpa(q, k, v, score_mod=score_mod, **options)

        specs = (tokens, tokens, tokens, P())
        spread = jax.shard_map(
            attend, mesh=mesh_of(seq=2), in_specs=specs, out_specs=tokens
        )
        return jnp.sum(jnp.sin(spread(q, k, v, table)))

    def dense(q: Any, k: Any, v: Any, table: Any) -> jax.Array:
        heads, rows, columns = jnp.meshgrid(
            *map(jnp.arange, (2, 8, 8)), indexing="ij", sparse=True
        )
        places = (jnp.zeros((1, 1, 1, 1), int), heads[None], rows[None], columns[None])
        seen = np.ones((2, 2, 8, 8), bool)
        output, _ = dense_attention(
            q, k, v, seen=seen, score_mod=lambda x: _READS[name](x, *places, table)
        )
        return jnp.sum(jnp.sin(output))

    numbers = (0, 1, 2, 3)
    got = jax.jit(jax.value_and_grad(loss, numbers))(q, k, v, table)
    want = jax.value_and_grad(dense, numbers)(q, k, v, table)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(close, got, want)


_CALLS: dict[str, Any] = {
    "cond": lambda i: jax.lax.cond(i > 1, lambda: 1.0, lambda: 2.0),
    "custom_jvp_call": lambda i: jax.nn.relu(jnp.cos(i.astype(float))),
}


@pytest.mark.parametrize("name", _CALLS)
def test_calls_of_positions_of_a_device_are_refused(name: str) -> None:
    x = jnp.ones((1, 4, 2, 3))

    def attend(x: jax.Array) -> jax.Array:
        return parallel.sdpa(
            *(x, x, x),
            axis_name="seq",
            score_mod=lambda score, b, h, i, j: score + _CALLS[name](i),
        )

    tokens = P(None, "seq")
    message = f"{name} cannot be part of a function of positions that differ between"
    with pytest.raises(UnsupportedError, match=message):
        jax.shard_map(attend, mesh=mesh_of(seq=2), in_specs=tokens, out_specs=tokens)(x)
