# SPDX-License-Identifier: Apache-2.0
"""Tests attention with a score_mod through cuDNN against a float64 softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import score_mods, sdpa
from tests.attention.shared.dense import at_places, dense_attention
from tests.common.gpu.versions import needs_cudnn

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def has_score_mods() -> None:
    """A function of scores is run with cuDNN 9.19 and newer."""
    needs_cudnn(91900, "a score_mod")


# s, t, h, k, d and options.
_SIZES = {
    "odd": ((197, 261, 4, 2, 64), {}),
    "causal_full_tiles": ((256, 256, 4, 4, 128), {"is_causal": True}),
    "lengths": ((130, 200, 4, 4, 80), {"lengths": (200, 77)}),
    "bias_causal": ((65, 192, 4, 2, 64), {"is_causal": True, "bias": True}),
    "one_query": ((1, 257, 4, 2, 128), {}),
    "head_256": ((129, 140, 2, 2, 256), {}),
}


def _chosen(c):
    def function(score, batch, head, query_index, key_index):
        return jnp.where((query_index + key_index) % 3 == 0, score, score * c[head])

    return function


# Functions that read c (h,), which is negative in places.
_FUNCTIONS = {
    "softcap": lambda c: score_mods.softcap(2.5),
    "alibi": lambda c: score_mods.alibi(jnp.abs(c) / 16),
    "temperatures": lambda c: lambda x, b, h, q, k: x * c[h],
    "gated": lambda c: lambda x, *_: x * jax.nn.sigmoid(x),
    "capped_after_rows": lambda c: (
        lambda x, b, h, q, k: (
            4 * jnp.tanh(x * c[(q + b) % c.size] + c[(k + h) % c.size])
        )
    ),
    "chosen": _chosen,
    "clipped": lambda c: lambda x, b, h, q, k: jnp.clip(x, -jnp.abs(c)[h], 1.5),
    # Steps that read one value twice, or the score last, forward or in the gradient.
    "square": lambda c: lambda x, *_: x * x,
    "twice": lambda c: lambda x, *_: x + x,
    "gelu": lambda c: lambda x, *_: jax.nn.gelu(x),
    "erf": lambda c: lambda x, *_: jax.lax.erf(x),
    "quotient": lambda c: lambda x, *_: 1 / (2 + jnp.abs(x)),
    "hidden_above": lambda c: lambda x, *_: jnp.where(x > 0.5, x * 0.5, x),
    "not_nan": lambda c: lambda x, *_: jnp.where(jnp.isnan(x), 0.0, x),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_results_and_gradients_match_float64(name, size, dtype, record_property):
    (s, t, h, k, d), options = _SIZES[size]
    b, function = 2, _FUNCTIONS[name]
    rng = np.random.default_rng(5)
    shapes = [(b, s, h, d), (b, t, k, d), (b, t, k, d)]
    operands = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    operands.append(jnp.asarray(rng.standard_normal(h), jnp.float32))
    if options.get("bias"):
        operands.append(jnp.asarray(rng.standard_normal((1, h, s, t)), dtype))
    weights = rng.standard_normal((b, s, h, d))
    lengths = np.array(options.get("lengths", (t,) * b))
    seen = np.arange(t) < lengths[:, None, None, None]
    if options.get("is_causal"):
        seen = seen & (np.arange(t) <= np.arange(s)[:, None])

    def ours(implementation, q, k, v, c, bias=None):
        return sdpa(
            q,
            k,
            v,
            bias,
            is_causal=options.get("is_causal", False),
            key_value_seq_lengths=lengths if "lengths" in options else None,
            score_mod=function(c),
            implementation=implementation,
        )

    def truth(q, k, v, c, bias=None):
        modify = at_places(function(c))
        return dense_attention(q, k, v, seen=seen, bias=bias, score_mod=modify)[0]

    def results(function, *operands):
        def loss(*operands):
            output = function(*operands)
            wide = jnp.float64 if output.dtype == jnp.float64 else jnp.float32
            return jnp.sum(output.astype(wide) * jnp.asarray(weights, wide)), output

        moving = tuple(range(len(operands)))
        found = jax.jit(jax.grad(loss, argnums=moving, has_aux=True))(*operands)
        return [found[1], *found[0]]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found, beside = (
            results(functools.partial(ours, implementation), *operands)
            for implementation in ("cudnn", "xla")
        )
        with jax.enable_x64(True):
            wide = [x.astype(jnp.float64) for x in operands]
            want = results(truth, *wide)
    names = ("output", "query", "key", "value", "captured", "bias")
    for role, x, y, z in zip(names, found, beside, want, strict=False):
        z = np.asarray(z)
        scale = np.abs(z).max()
        errors = [np.abs(np.asarray(each, np.float64) - z).max() for each in (x, y)]
        record_property(f"error of {role}, cudnn and xla", f"{errors}")
        least = float(jnp.finfo(dtype).eps) * scale
        assert errors[0] <= 2 * errors[1] + least, (role, errors, scale)
