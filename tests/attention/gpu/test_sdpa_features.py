# SPDX-License-Identifier: Apache-2.0
"""Tests each feature of attention on a GPU under vmap, scan, remat and export.

Results and all gradients are compared with f32. A replayed command buffer with dropout
has the mask of its key.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_cudnn
from jax_cudnn import masks, plans, qkv_sdpa, score_mods, sdpa
from tests.attention.shared.ways import WAYS
from tests.common.gpu.captured import custom_calls, run_dumped
from tests.common.gpu.numerics import to_f32
from tests.common.gpu.versions import needs_cudnn

pytestmark = pytest.mark.gpu

_B, _S, _T, _H, _K, _D, _E = 3, 67, 93, 4, 2, 64, 96
_KEY = jax.random.key(2)
_RNG = np.random.default_rng(0)


def _segments():
    ids = [np.sort(_RNG.integers(0, 3, (_B, n)), axis=1) for n in (_S, _T)]
    return masks.Segments(*ids) & masks.Prefix(np.array([40, 1, 93]))


def _packed():
    starts = np.array([0, 20, 20, 61]), np.array([0, 33, 40, 90])
    return masks.Packed(*starts) & masks.Causal("bottom-right")


# Calls of q, k and v, with others that have a gradient, and the shapes of the others.
_SCORES, _HEADS = (1, _H, _S, _T), (_H,)
_FEATURES = {
    "bias": (lambda q, k, v, bias: sdpa(q, k, v, bias, is_causal=True), _SCORES),
    "mask": (partial(sdpa, mask=_RNG.random((_B, 1, _S, _T)) < 0.8),),
    "window": (partial(sdpa, is_causal=True, local_window_size=(20, 0)),),
    "two_sided_window": (partial(sdpa, local_window_size=(20, 9)),),
    "lengths": (
        partial(
            sdpa,
            query_seq_lengths=np.array([67, 0, 31]),
            key_value_seq_lengths=np.array([93, 40, 0]),
        ),
    ),
    "packed": (partial(sdpa, mask=_packed()),),
    "segments": (partial(sdpa, mask=_segments()),),
    "softcap": (partial(sdpa, is_causal=True, score_mod=score_mods.softcap(2.5)),),
    "score_mod": (
        lambda q, k, v, c: sdpa(
            q, k, v, score_mod=lambda x, b, h, i, j: 4 * jnp.tanh(x * c[h])
        ),
        _HEADS,
    ),
    "alibi": (
        lambda q, k, v, c: sdpa(q, k, v, score_mod=score_mods.alibi(c)),
        _HEADS,
    ),
    "sinks": (
        lambda q, k, v, sinks: sdpa(q, k, v, sinks=sinks, is_causal=True),
        _HEADS,
    ),
    "dropout": (partial(sdpa, dropout_rate=0.25, dropout_key=_KEY, is_causal=True),),
    "max_logit": (partial(sdpa, return_residual=True, return_max_logit=True),),
    "bhsd": (partial(sdpa, layout="bhsd", is_causal=True),),
    "sbhd": (partial(sdpa, layout="sbhd", is_causal=True),),
    "qkv": (partial(qkv_sdpa, layout="bs3hd", is_causal=True),),
    "grouped_qkv": (partial(qkv_sdpa, layout="bshd", key_value_heads=_K),),
}
_OF_QKV = {"qkv": (_B, _S, 3, _H, _D), "grouped_qkv": (_B, _S, _H + 2 * _K, _D)}


def _operands(name):
    shapes = [(_B, _S, _H, _D), (_B, _T, _K, _D), (_B, _T, _K, _E)]
    if name in ("bhsd", "sbhd"):
        axes = ["bshd".index(letter) for letter in name]
        shapes = [tuple(shape[axis] for axis in axes) for shape in shapes]
    shapes = [_OF_QKV[name]] if name in _OF_QKV else shapes
    rng = np.random.default_rng(5)
    drawn = [
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in (*shapes, *_FEATURES[name][1:])
    ]
    return [x.astype(jnp.float32) if x.ndim == 1 else x for x in drawn]


def _assert_right(got, beside, truth):
    """Allow twice the error of XLA's bf16, and two roundings at other places."""
    leaves = zip(*(jax.tree.leaves(x) for x in (got, beside, truth)), strict=True)
    for i, (x, y, z) in enumerate(leaves):
        x, y, z = (np.asarray(each, np.float64) for each in (x, y, z))
        errors = [np.abs(each - z).max() for each in (x, y)]
        most = 2 * errors[1] + 2.0**-6 * np.abs(z).max()
        assert errors[0] <= most, (i, x.shape, errors, np.abs(z).max())


@pytest.mark.parametrize("way", ["loop", "examples"])
@pytest.mark.parametrize("name", _FEATURES)
def test_results_and_gradients_match_f32_as_traced_and_exported(name, way):
    if name in ("softcap", "score_mod"):
        needs_cudnn(91900, "a score_mod")
    operands = _operands(name)
    call = partial(WAYS[way], _FEATURES[name][0])
    with plans.using(implementation="xla"):
        beside = jax.jit(call)(*operands)
        with jax.default_matmul_precision("highest"):
            truth = jax.jit(call)(*map(to_f32, operands))
    with plans.using(implementation="cudnn"):
        program = jax.jit(call)
        _assert_right(program(*operands), beside, truth)
        checks = jax_cudnn.EXPORT_SAFETY_CHECKS
        exported = export.export(program, disabled_checks=checks)(*operands)
    again = export.deserialize(exported.serialize())
    _assert_right(again.call(*operands), beside, truth)


_REPLAY = """
import jax, jax.numpy as jnp, numpy as np
from jax_cudnn import sdpa
b, n, h = 2, 64, 4
# Equal scores: the output shows the weights for values that are columns of the
# identity, and the gradient of the values for such a cotangent.
zeros = jnp.zeros((b, n, h, n), jnp.bfloat16)
eye = jnp.broadcast_to(jnp.eye(n, dtype=jnp.bfloat16)[None, :, None], (b, n, h, n))
def results(how, key, v, pull):
    output, back = jax.vjp(lambda v: sdpa(
        zeros, zeros, v, dropout_rate=0.25, dropout_key=key, implementation=how), v)
    return output, back(pull)[0]
@jax.jit
def plain(*x):
    return results("xla", *x)
@jax.jit
def step(*x):
    return results("cudnn", *x)
def kept(function, key):
    output, value = (np.asarray(x != 0) for x in function(key, eye, eye))
    return np.moveaxis(output, 1, 2), np.transpose(value, (0, 2, 3, 1))
one, two = jax.random.split(jax.random.key(3))
want = {key: kept(plain, each)[0] for key, each in (("one", one), ("two", two))}
assert 0 < want["one"].mean() < 1 and (want["one"] != want["two"]).any()
for turn in range(4):
    for name, key in (("one", one), ("two", two)):
        for found in kept(step, key):
            assert (found == want[name]).all(), (turn, name)
print("done")
"""


def test_a_replayed_command_buffer_drops_what_its_key_says(tmp_path):
    assert run_dumped(_REPLAY, tmp_path).strip() == "done"
    if jax.default_backend() != "gpu":
        return
    # Forward and gradient.
    inside, outside = custom_calls(tmp_path, "jit_step")
    assert len(inside) + len(outside) >= 2
    assert not outside
