# SPDX-License-Identifier: Apache-2.0
"""Tests that attention over several GPUs is as exact as on one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_cudnn
from jax_cudnn import masks, parallel, plans, score_mods
from jax_cudnn.parallel.order import natural, ordered
from tests.common.gpu.numerics import BOUND, judge, sinks_noise, to_f32
from tests.common.gpu.versions import needs_cudnn

pytestmark = pytest.mark.gpu

_TOKENS = PartitionSpec(None, "seq")
_METHODS = ("ring", "all_gather", "all_to_all")


@pytest.fixture(autouse=True)
def _needs_two_gpus():
    if len(jax.local_devices()) < 2:
        pytest.skip("one GPU only")


def _mesh():
    # Two, so that sizes are the same on every machine.
    return jax.make_mesh(
        (2,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:2]
    )


def _operands(s=512, t=512, h=8, k=2, d=64, bias=None, dtype=jnp.bfloat16):
    rng = np.random.default_rng([s, t, h, k, d])

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    operands = [normal(2, s, h, d), normal(2, t, k, d), normal(2, t, k, d)]
    if bias is not None:
        sizes = {"b": 2, "h": h, "s": s, "t": t, "1": 1}
        operands.append(normal(*(sizes[axis] for axis in bias)))
    return operands, (normal(2, s, h, d), to_f32(normal(2, s, h)))


def _with_gradients(function, operands, cotangents):
    """Return output, log-sum-exp and gradients of all operands."""

    @jax.jit
    def run(operands, cotangents):
        results, transpose = jax.vjp(function, *operands)
        return [*results, *transpose(cotangents)]

    return run(operands, cotangents)


def _on_one(*operands, implementation="cudnn", **options):
    return jax_cudnn.sdpa(
        *operands, implementation=implementation, return_residual=True, **options
    )


def _on_two(*operands, order="contiguous", method="ring", **options):
    """Return attention on two GPUs, of operands in the sequence's order."""
    *tokens, bias = (*operands, None)[:4]
    tokens = [ordered(x, 2, order) for x in tokens]
    for axis in () if bias is None else (2, 3):
        if bias.shape[axis] != 1:
            bias = ordered(bias, 2, order, axis)
    results = parallel.sharded_sdpa(
        *tokens,
        bias,
        mesh=_mesh(),
        axis="seq",
        order=order,
        method=method,
        implementation="cudnn",
        return_residual=True,
        **options,
    )
    return tuple(natural(x, 2, order) for x in results)


_CASES = {
    "whole": {},
    "causal": {"is_causal": True},
    "zigzag": {"is_causal": True, "order": "zigzag"},
    "striped": {"is_causal": True, "order": "striped"},
    "window": {"is_causal": True, "local_window_size": (100, 0)},
    "both_sides": {"local_window_size": (300, 40)},
}


@pytest.mark.parametrize(
    ("case", "method"),
    [
        (case, method)
        for case in _CASES
        for method in _METHODS
        if (case, method) != ("striped", "all_gather")
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_and_gradients_are_as_exact_as_on_one_gpu(case, method, dtype):
    options = dict(_CASES[case])
    operands, cotangents = _operands(dtype=dtype)
    got = _with_gradients(
        functools.partial(_on_two, method=method, **options), operands, cotangents
    )
    _judge(got, operands, cotangents, options)


def _judge(got, operands, cotangents, options, names=("query", "key", "value")):
    options.pop("order", None)
    reference = functools.partial(_on_one, implementation="xla", **options)
    names = ["output", "residual", *(f"grad_{name}" for name in names)]
    with jax.default_matmul_precision("highest"):
        truths = _with_gradients(
            reference, list(map(to_f32, operands)), tuple(map(to_f32, cotangents))
        )
    references = _with_gradients(reference, operands, cotangents)
    assert len(names) == len(got)
    judge(names, got, references, truths)


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("bias", ["1hst", "b11t"])
def test_biases_have_their_gradient(bias, method):
    operands, cotangents = _operands(s=256, t=256, bias=bias)
    options = {"is_causal": True, "order": "zigzag", "method": method}
    got = _with_gradients(functools.partial(_on_two, **options), operands, cotangents)
    names = ("query", "key", "value", "bias")
    _judge(got, operands, cotangents, {"is_causal": True}, names)


@pytest.mark.parametrize("method", _METHODS)
def test_lengths_are_those_of_whole_sequences(method):
    operands, cotangents = _operands()
    # Both within the first GPU's tokens, and reaching into the second's.
    options = {
        "query_seq_lengths": jnp.array([512, 300]),
        "key_value_seq_lengths": jnp.array([100, 399]),
    }
    got = _with_gradients(
        functools.partial(_on_two, method=method, **options), operands, cotangents
    )
    _judge(got, operands, cotangents, options)


@pytest.mark.parametrize("method", _METHODS)
def test_keys_and_queries_of_different_lengths(method):
    operands, cotangents = _operands(s=256, t=640, d=72)
    got = _with_gradients(
        functools.partial(_on_two, method=method), operands, cotangents
    )
    _judge(got, operands, cotangents, {})


def _placed(operands):
    sharding = NamedSharding(_mesh(), _TOKENS)
    return [jax.device_put(x, sharding) for x in operands]


@pytest.mark.parametrize("method", _METHODS)
def test_results_stay_where_the_tokens_are(method):
    operands, _ = _operands()
    placed = _placed(operands)
    output, residual = jax.jit(functools.partial(_on_two, method=method))(*placed)
    for x in (output, residual):
        assert x.sharding.is_equivalent_to(NamedSharding(_mesh(), _TOKENS), x.ndim)


def test_gradients_repeat_to_the_bit_where_that_is_asked_for():
    operands, cotangents = _operands()
    options: Any = {
        "is_causal": True,
        "order": "zigzag",
        "plan": plans.PlanOptions(deterministic=True),
    }
    function = functools.partial(_on_two, **options)
    first = _with_gradients(function, operands, cotangents)
    for _ in range(3):
        again = _with_gradients(function, operands, cotangents)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y)


def test_every_block_is_planned_by_cudnn():
    operands, cotangents = _operands()
    function = functools.partial(_on_two, is_causal=True, order="zigzag")

    def both(operands, cotangents):
        results, transpose = jax.vjp(function, *operands)
        return results, transpose(cotangents)

    report = plans.inspect(both, operands, cotangents)
    assert report.calls
    assert all(call.implementation == "cudnn" for call in report.calls)


@pytest.mark.parametrize("method", _METHODS)
def test_memory_does_not_grow_with_the_scores(method):
    sharding = NamedSharding(_mesh(), _TOKENS)
    shape = jax.ShapeDtypeStruct((1, 65536, 8, 64), jnp.bfloat16, sharding=sharding)

    def loss(*operands):
        output, _ = _on_two(*operands, method=method, is_causal=True)
        return jnp.sum(output.astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    compiled = gradient.lower(shape, shape, shape).compile()
    # The scores of one block are 16 GiB, a device's tokens 32 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 2**30


# --- masks, scores, dropout, sinks ----------------------------------------------------

_OFFSETS = (0, 100, 256, 300, 470, 512)
_MASKS = {
    "segments": masks.Segments(np.arange(512) // 100) & masks.Causal(),
    "prefix": masks.Prefix(np.array([37, 300])),
    "packed": masks.Packed(np.array(_OFFSETS)),
    "packed_causal": masks.Packed(np.array(_OFFSETS)) & masks.Causal(),
    "packed_window": masks.Packed(np.array(_OFFSETS)) & masks.Window(60, 20),
}


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("name", _MASKS)
def test_masks_hide_what_they_hide_on_one_gpu(name, method):
    operands, cotangents = _operands()
    options = {"mask": _MASKS[name]}
    got = _with_gradients(
        functools.partial(_on_two, method=method, **options), operands, cotangents
    )
    _judge(got, operands, cotangents, options)


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("name", ["packed_causal", "prefix"])
def test_masks_in_zigzag_order(name, method):
    operands, cotangents = _operands()
    options = {"mask": _MASKS[name], "order": "zigzag", "method": method}
    got = _with_gradients(functools.partial(_on_two, **options), operands, cotangents)
    _judge(got, operands, cotangents, {"mask": _MASKS[name]})


_DOCUMENTS = {
    "causal": ({"is_causal": True}, _OFFSETS),
    "odd": ({"is_causal": True}, (0, 1, 2, 131, 388, 509)),
    "window": ({"is_causal": True, "local_window_size": (60, 0)}, _OFFSETS),
    "whole": ({}, _OFFSETS),
}


@pytest.mark.parametrize("name", _DOCUMENTS)
def test_documents_in_striped_order(name):
    options, offsets = _DOCUMENTS[name]
    options = {**options, "mask": masks.Packed(np.array(offsets))}
    operands, cotangents = _operands()
    got = _with_gradients(
        functools.partial(_on_two, order="striped", **options), operands, cotangents
    )
    _judge(got, operands, cotangents, options)


@pytest.mark.parametrize("method", _METHODS)
def test_the_same_weights_are_dropped_as_on_one_gpu(method):
    operands, cotangents = _operands()
    options = {
        "dropout_rate": 0.25,
        "dropout_key": jax.random.key(4),
        "is_causal": True,
    }
    got = _with_gradients(
        functools.partial(_on_two, method=method, order="zigzag", **options),
        operands,
        cotangents,
    )
    _judge(got, operands, cotangents, options)


@pytest.mark.parametrize("method", _METHODS)
def test_a_softcap_runs_in_the_kernels(method):
    needs_cudnn(91900, "score_mod")
    operands, cotangents = _operands()
    options = {"score_mod": score_mods.softcap(3.0), "is_causal": True}
    got = _with_gradients(
        functools.partial(_on_two, method=method, **options), operands, cotangents
    )
    _judge(got, operands, cotangents, options)


@pytest.mark.parametrize("bias", [None, "1hst"])
def test_sinks_take_their_share(bias):
    operands, cotangents = _operands(s=256, t=256, bias=bias)
    sinks = jnp.linspace(-2, 3, 8, dtype=jnp.float32)
    names = ("query", "key", "value", *(["bias"] if bias else []), "sinks")

    def on(function, *operands, **options):
        *tokens, sinks = operands
        return function(*tokens, sinks=sinks, **options)

    got = _with_gradients(
        functools.partial(on, _on_two, is_causal=True), [*operands, sinks], cotangents
    )
    reference = functools.partial(on, _on_one, implementation="xla", is_causal=True)
    given = [*operands, sinks]
    with jax.default_matmul_precision("highest"):
        truths = _with_gradients(
            reference, list(map(to_f32, given)), tuple(map(to_f32, cotangents))
        )
    references = _with_gradients(reference, given, cotangents)
    names = ["output", "residual", *(f"grad_{name}" for name in names)]
    noise = sinks_noise(sinks, truths[1], truths[0], cotangents[0]) / BOUND
    judge(names, got, references, truths, [*[0.0] * (len(names) - 1), noise])
