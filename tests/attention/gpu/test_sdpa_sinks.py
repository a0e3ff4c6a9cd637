# SPDX-License-Identifier: Apache-2.0
"""Tests attention with sinks through cuDNN against a dense softmax in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_cudnn import sdpa
from tests.attention.shared.dense import dense_attention

pytestmark = pytest.mark.gpu

# s, t, h, k, d, and the options: what a model asks for, forward and backward.
_CASES = {
    "causal_groups": ((129, 129, 8, 2, 128), {"is_causal": True}),
    "window": ((200, 200, 4, 4, 64), {"is_causal": True, "window": 31}),
    "lengths": ((65, 131, 4, 2, 80), {"lengths": (131, 40)}),
    "bias": ((64, 72, 4, 4, 64), {"bias": True}),
    "decode": ((1, 257, 8, 2, 128), {}),
    "head_256": ((40, 48, 2, 2, 256), {}),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", _CASES)
def test_results_and_gradients_match_float64(name, dtype, record_property):
    (s, t, h, k, d), options = _CASES[name]
    b = 2
    rng = np.random.default_rng(5)
    shapes = [(b, s, h, d), (b, t, k, d), (b, t, k, d), (h,)]
    shapes += [(1, h, s, t)] if options.get("bias") else []
    operands = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    operands[3] = operands[3].astype(jnp.float32)
    weights = rng.standard_normal((b, s, h, d))
    rows, columns = np.arange(s)[:, None], np.arange(t)
    lengths = np.array(options.get("lengths", (t,) * b))
    seen = np.broadcast_to(columns < lengths[:, None, None, None], (b, h, s, t))
    if options.get("is_causal"):
        seen = seen & (columns <= rows)
    if "window" in options:
        seen = seen & (columns >= rows - options["window"])

    def ours(implementation, q, k, v, sinks, bias=None):
        return sdpa(
            q,
            k,
            v,
            bias,
            sinks=sinks,
            is_causal=options.get("is_causal", False),
            local_window_size=(options["window"], t) if "window" in options else None,
            key_value_seq_lengths=lengths if "lengths" in options else None,
            implementation=implementation,
        )

    def truth(q, k, v, sinks, bias=None):
        return dense_attention(q, k, v, sinks=sinks, bias=bias, seen=seen)[0]

    def results(function, *operands):
        def loss(*operands):
            output = function(*operands)
            wide = jnp.float64 if output.dtype == jnp.float64 else jnp.float32
            return jnp.sum(output.astype(wide) * jnp.asarray(weights, wide)), output

        moving = tuple(range(len(operands)))
        found = jax.jit(jax.grad(loss, argnums=moving, has_aux=True))(*operands)
        return [found[1], *found[0]]

    found, beside = (
        results(functools.partial(ours, implementation), *operands)
        for implementation in ("cudnn", "xla")
    )
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in operands]
        want = results(truth, *wide)
    names = ("output", "query", "key", "value", "sinks", "bias")
    for role, x, y, z in zip(names, found, beside, want, strict=False):
        z = np.asarray(z)
        scale = np.abs(z).max()
        errors = [
            np.abs(np.asarray(each, np.float64) - z).max() / scale for each in (x, y)
        ]
        record_property(f"error of {role}, cudnn and xla", f"{errors}")
        assert errors[0] <= 2 * errors[1] + float(jnp.finfo(dtype).eps), (role, errors)
