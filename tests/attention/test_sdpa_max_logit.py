# SPDX-License-Identifier: Apache-2.0
"""Tests that `return_max_logit` gives each row's maximum, in all transformations.

tests/attention/test_sdpa_pairs.py compares it and its gradients beside every option
with dense attention in float64, and tests/attention/legalize/test_legalize_sdpa.py what
kernels get.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.test_util import check_grads

from jax_cudnn import sdpa
from jax_cudnn.legalize import legalize
from tests.attention.shared.dense import dense_attention
from tests.attention.shared.legal import (
    HOPPER,
)
from tests.attention.shared.oracle import attention_graph
from tests.common.devices import collectives, gradient, mesh_of, placed
from tests.products.shared.fused import graphs, stacked, subsets

pytestmark = [pytest.mark.once, pytest.mark.sampled]

_SHAPES = ((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 6), (1, 4, 5, 7), (4,))
_all = functools.partial(sdpa, return_residual=True, return_max_logit=True)


def _call(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
    return _all(q, k, v, bias, sinks=sinks, is_causal=True)


def _draw(shapes: Any, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("batched", subsets(8)[::37], ids=str)
def test_vmap_over_any_operands_and_cotangents(batched: tuple[int, ...]) -> None:
    rows = (2, 5, 4)
    shapes = [*_SHAPES, (*rows, 6), rows, rows]
    axes = [i % 2 if i in batched else None for i in range(8)]
    given = _draw(
        s if axis is None else (*s[:axis], 3, *s[axis:])
        for s, axis in zip(shapes, axes, strict=True)
    )

    def run(*x: Any) -> Any:
        results, pull = jax.vjp(_call, *x[:5])
        return results, pull(tuple(x[5:]))

    found = jax.jit(jax.vmap(run, in_axes=tuple(axes)))(*given)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(close, found, stacked(run, given, axes))


@pytest.mark.usefixtures("x64")
def test_both_modes_agree_with_finite_differences_scan_and_remat() -> None:
    operands = _draw(_SHAPES)
    check_grads(_call, operands, order=1)
    want = jax.grad(lambda q: jnp.sum(jnp.sin(_call(q, *operands[1:])[2])))

    def body(total: Any, q: Any) -> Any:
        function = jax.checkpoint(
            lambda q: jnp.sum(jnp.sin(_call(q, *operands[1:])[2]))
        )
        return total + jax.grad(function)(q), None

    queries = np.stack([operands[0], -operands[0]])
    found, _ = jax.jit(
        lambda: jax.lax.scan(body, jnp.zeros_like(queries[0]), queries)
    )()
    np.testing.assert_allclose(
        found, want(queries[0]) + want(queries[1]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_it_is_f32_and_that_of_the_operands_as_they_are(dtype: Any) -> None:
    q, k, v = (jnp.asarray(np.asarray(x, dtype)) for x in _draw(_SHAPES[:3]))
    output, largest = sdpa(q, k, v, return_max_logit=True)
    assert (output.dtype, largest.dtype) == (dtype, jnp.float32)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (q, k, v)]
        seen = np.ones((2, 4, 5, 7), bool)
        *_, want = dense_attention(*wide, seen=seen, with_max=True)
    np.testing.assert_allclose(largest, want, rtol=3e-6, atol=3e-6)
    # In each layout it has the same axes, and without a batch axis one fewer.
    swapped = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    _, same = sdpa(*swapped, layout="bhsd", return_max_logit=True)
    np.testing.assert_allclose(same, largest, rtol=1e-6)
    _, one = sdpa(q[1], k[1], v[1], return_max_logit=True)
    np.testing.assert_allclose(one, largest[1], rtol=1e-6)


def test_rows_without_keys_nan_and_equal_logits() -> None:
    q, k, v = (jnp.asarray(np.asarray(x, jnp.float32)) for x in _draw(_SHAPES[:3]))
    lengths = jnp.array([0, 6])
    call = functools.partial(_all, key_value_seq_lengths=lengths)
    _, lse, largest = call(q, k, v)
    assert (largest[0] == -jnp.inf).all()
    assert (largest[1] <= lse[1]).all()
    assert (lse[1] <= largest[1] + np.log(6) + 1e-6).all()
    for x in jax.grad(lambda *y: jnp.sum(call(*y)[2]), argnums=(0, 1, 2))(q, k, v):
        assert jnp.isfinite(x).all()
    _, none, none_too = _all(q, k[:, :0], v[:, :0])
    assert (none == -jnp.inf).all()
    assert (none_too == -jnp.inf).all()

    spoiled = k.at[1, 2, 0].set(jnp.nan)
    *_, largest = call(q, spoiled, v)
    assert jnp.isnan(largest[1, :, :2]).all()
    assert jnp.isfinite(largest[1, :, 2:]).all()

    # With a scale of 0 all logits are the bias; the first of the largest has the slope.
    bias = jnp.array([1.0, 3.0, 3.0, 2.0, 0.0, 3.0, 1.0])
    slopes = jax.grad(lambda b: jnp.sum(_all(q, k, v, b, scale=0.0)[2]))(bias)
    np.testing.assert_array_equal(slopes, [0, 40, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_stay_sharded(kind: AxisType) -> None:
    shapes = (4, 8, 8, 4), (4, 8, 4, 4), (4, 8, 4, 6)
    operands = [jnp.asarray(np.asarray(x, jnp.float32)) for x in _draw(shapes)]
    sharded = placed(mesh_of(kind, x=4, y=2), operands, [("x", None, "y")] * 3)

    def run(q: Any, k: Any, v: Any) -> jax.Array:
        return sdpa(q, k, v, is_causal=True, return_max_logit=True)[1]

    functions: tuple[Any, ...] = (run, gradient(run))
    for function in functions:
        got, want = jax.jit(function)(*sharded), function(*operands)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
        assert collectives(function, *sharded) == {}


def test_what_no_graph_holds_has_it_too() -> None:
    q, k, v = (jnp.asarray(np.asarray(x, jnp.float32)) for x in _draw(_SHAPES[:3]))

    def growing(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return jnp.sinh(score)

    found = _all(q, k, v, score_mod=growing)
    seen = np.ones((2, 4, 5, 7), bool)
    want = dense_attention(q, k, v, seen=seen, score_mod=jnp.sinh, with_max=True)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_only_its_gradient_is_xlas() -> None:
    forward = attention_graph(dtype="bf16", with_stats=True, with_max=True)
    (rewrite,) = legalize(forward, HOPPER).candidates
    assert rewrite.notes == ()
    assert set(rewrite.graph.outputs) == {"output", "max_logit", "sum_exp"}
    note = (
        "the gradient of max_logit is computed by XLA: cuDNN has none; its memory "
        "grows with s*t"
    )
    q, k, v = (jnp.asarray(np.asarray(x, jnp.bfloat16)) for x in _draw(_SHAPES[:3]))
    for place, notes in ((0, ()), (1, (note,))):

        def run(q: Any, place: int = place) -> Any:
            results, pull = jax.vjp(
                lambda q: sdpa(q, k, v, return_max_logit=True)[place], q
            )
            return pull(results)

        (_, _), (backward, _) = graphs(run, q)
        (rewrite,) = legalize(backward, HOPPER).candidates
        assert rewrite.notes == notes
        assert "grad_max_logit" not in rewrite.graph.inputs


@pytest.mark.parametrize("flag", [None, 1, "yes"])
def test_a_flag_that_is_none_is_refused(flag: Any) -> None:
    q, k, v = _draw(_SHAPES[:3])
    message = f"sdpa: return_max_logit is {type(flag).__name__}. It must be True or"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        sdpa(q, k, v, return_max_logit=flag)
